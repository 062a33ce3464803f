"""One tree of settings: file < environment < flags.

A TOML file holds the tree; `STEMROUTE_POOL`, `STEMROUTE_GATEWAY_PORT`, … override single
values (`STEMROUTE_` + section + `_` + field); flags of the command line override both.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cluster.redis_address import RedisAddressError, parse_redis_url, with_password

ENV_PREFIX = "STEMROUTE_"


class SettingsError(ValueError):
    """A setting that cannot be used. Its text names the setting, its origin and the mend."""


class BusSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How reports travel.

    lease_s             a worker that has not reported for so long is gone
    heartbeat_s         a report at least so often
    min_report_gap_s    and at most so often
    blocks_ttl_s        life of a worker's block set without a renewal
    stream_max_reports  about how many reports the stream keeps
    """

    lease_s: float = 3.0
    heartbeat_s: float = 0.5
    min_report_gap_s: float = 0.02
    blocks_ttl_s: float = 60.0
    stream_max_reports: int = 20_000


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway.

    host                 interface to listen on
    port                 port to listen on; 0 takes a free one
    processes            processes that serve the port together; limits below hold for each of them
    policy               name of the routing policy, with parameters: "locality",
                         "consistent_hash:bound=1.25"
    shadow               policies to evaluate on live traffic without using them, such as
                         "round_robin,least_requests"; "" for none
    cors_origins         origins whose web pages may call /v1, such as "https://chat.example.com",
                         separated by commas; "*" admits all, "" none
    api_key              clients must send it as a bearer token; "" asks for none
    admin_key            for /admin; "" admits only clients on this machine
    max_body_bytes       longer request bodies are refused with 413
    max_messages         a chat with more messages is refused with 400
    max_connections      of clients at once; then idle ones make way for further ones, or those are
                         answered 503 and closed
    write_timeout_s      a client that takes nothing of its answer for so long is cut off, and its
                         request cancelled
    attempts             how many workers a request tries before it fails
    connect_timeout_s    for one worker to accept a connection
    first_byte_timeout_s for one worker to send response headers
    default_max_tokens   where a request sets no limit (bounded by the context)
    queue                requests that may wait at the gateway until a worker is ready and has room
                         for them, released in order of arrival; 0: none waits here
    queue_timeout_s      for so long at most; then 429, or 503 where no worker is ready
    index_max_pairs      (block, worker) pairs in the prefix index, some 90 bytes each;
                         beyond it the ends of long prefixes are left out
    """

    host: str = "127.0.0.1"
    port: int = 8000
    processes: Annotated[int, msgspec.Meta(ge=1)] = 1
    policy: str = "locality"
    shadow: str = ""
    cors_origins: str = ""
    api_key: str = ""
    admin_key: str = ""
    max_body_bytes: int = 8 * 1024 * 1024
    max_messages: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    max_connections: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    write_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    attempts: int = 3
    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    default_max_tokens: int = 1024
    queue: Annotated[int, msgspec.Meta(ge=0)] = 0
    queue_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    index_max_pairs: Annotated[int, msgspec.Meta(ge=1)] = 20_000_000


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker.

    model            "smollm2", a Hugging Face directory, a GGUF file, or "emulated:PROFILE"
    served_name      name under which clients ask for the model; "" takes the model's own
    device           "auto", "cpu", "cuda"
    dtype            of weights and KV: "auto", "float32", "bfloat16", "float16"
    block_size       tokens in a KV block; the same in all workers of a model
    attention        "auto" (triton on CUDA, else sdpa), "sdpa", "triton"
    kv_blocks        blocks in the pool; 0 sizes it from `kv_memory_share` of free memory
    kv_memory_share  share of free accelerator memory for the pool
    context_tokens   longest prompt + output; 0 takes the model's own
    max_batch_size   sequences that may run at once
    cuda_graphs      on CUDA with triton, record decode steps at start and replay them
    token_budget     tokens computed in one step at most
    chunk_tokens     prompt tokens of one sequence in one step at most; 0 is the whole budget
    max_waiting      requests that may wait; more are refused with 429
    eviction         which cached block goes first: "lru", "lfu", "ttl:ttl_s=600" or
                     "workload_aware"
    cache_share      share of the pool that may hold cached blocks which no request uses
    cpu_tier_gb      GiB of host memory for KV blocks that the pool has no room for; 0: none
    disk_tier_gb     GiB on disk for the same, written behind host memory, which it needs; 0: none
    disk_tier_dir    its directory; "" takes ~/.cache/stemroute/kv
    save_timeout_s   at shutdown, blocks on the device alone may take so long to be written to disk,
                     where there is a disk tier; 0: they are not
    warmup_file      text file of prompts (separated by lines of "---") that are computed before
                     the worker is ready; "" warms nothing up
    pin_share        share of the pool in which the warm-up's prompts are kept from eviction
    threads          of torch; on a CPU one a worker is quickest on a busy machine
    host             interface of the worker's server
    advertise_host   host that gateways connect to; "" takes the node's address
    port             of the worker's server; 0 takes a free one
    drain_timeout_s  running requests may take so long to end at shutdown
    cache_dir        converted weights; "" takes ~/.cache/stemroute
    """

    model: str = "smollm2"
    served_name: str = ""
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "auto"
    block_size: int = 16
    kv_blocks: int = 0
    kv_memory_share: float = 0.85
    context_tokens: int = 0
    max_batch_size: int = 64
    cuda_graphs: bool = True
    token_budget: int = 512
    chunk_tokens: int = 0
    max_waiting: int = 1024
    eviction: str = "lru"
    cache_share: float = 1.0
    cpu_tier_gb: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    disk_tier_gb: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    disk_tier_dir: str = ""
    save_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    warmup_file: str = ""
    pin_share: float = 0.0
    threads: int = 1
    host: str = "127.0.0.1"
    advertise_host: str = ""
    port: int = 0
    drain_timeout_s: float = 30.0
    cache_dir: str = ""


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How Ray Serve places workers.

    replicas               workers
    gpus_per_worker        0 on CPU machines
    cpus_per_worker        CPU share that Ray books for a worker
    health_check_period_s  how often Ray asks a worker for its health
    health_check_timeout_s a worker that has not answered by then is unhealthy
    """

    replicas: int = 2
    gpus_per_worker: float = 0.0
    cpus_per_worker: float = 1.0
    health_check_period_s: float = 2.0
    health_check_timeout_s: float = 10.0


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree.

    pool            workers and gateways of one pool see each other; `stemroute up` makes up a name
                    of its own where this is "default"
    redis_url       redis://[user:password@]host:port[/db], with Sentinels
                    redis+sentinel://[user:password@]host:port[,host:port]/service[/db], several
                    nodes of a Redis Cluster redis://host:port,host:port; `rediss` is TLS; user and
                    password are percent-encoded; "" lets `stemroute up` start an embedded Valkey
    redis_password  takes the place of the URL's password, and is not percent-encoded
    secret          of the pool: goes into every block hash; the same for workers and gateways;
                    `stemroute up` makes one up where there is none
    """

    pool: str = "default"
    redis_url: str = ""
    redis_password: str = ""
    secret: str = ""
    bus: BusSettings = BusSettings()
    gateway: GatewaySettings = GatewaySettings()
    worker: WorkerSettings = WorkerSettings()
    serve: ServeSettings = ServeSettings()


def load_settings(
    file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Merge file, environment and flags.

    `flags` maps dotted names ("gateway.port") to values; None means "not given".
    `redis_url` has `redis_password` in it afterwards, percent-encoded.
    Raises SettingsError for an unknown name or a wrong type, naming where it came from.
    """
    tree: dict[str, Any] = {}
    if file is not None:
        try:
            tree = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingsError(f"cannot read the settings file {file}: {error}") from error
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"the settings file {file} is not TOML: {error}") from error
        _convert(tree, f"settings file {file}")
    for name, text in (os.environ if environ is None else environ).items():
        path = _path_of_variable(name)
        if path is not None:
            _put(tree, path, text)
            _convert(tree, f"environment variable {name}")
    for dotted, value in (flags or {}).items():
        if value is not None:
            _put(tree, dotted.split("."), value)
            _convert(tree, f"flag {dotted}")
    return _with_redis_password(_convert(tree, "settings"))


def _with_redis_password(settings: Settings) -> Settings:
    if not settings.redis_url:
        return msgspec.structs.replace(settings, redis_password="")
    try:
        parse_redis_url(settings.redis_url)
        url = with_password(settings.redis_url, settings.redis_password)
    except RedisAddressError as error:
        raise SettingsError(f"redis_url (STEMROUTE_REDIS_URL): {error}") from None
    return msgspec.structs.replace(settings, redis_url=url, redis_password="")


def _path_of_variable(name: str) -> list[str] | None:
    if not name.startswith(ENV_PREFIX):
        return None
    rest = name[len(ENV_PREFIX) :].lower()
    for section in ("bus", "gateway", "worker", "serve"):
        if rest.startswith(section + "_"):
            return [section, rest[len(section) + 1 :]]
    return [rest] if rest in Settings.__struct_fields__ else None


def _put(tree: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _convert(tree: dict[str, Any], origin: str) -> Settings:
    try:
        return msgspec.convert(tree, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{origin}: {error}") from error


def flat_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A (partial) settings tree as dotted names: {"worker": {"port": 1}} -> {"worker.port": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{name}": inner for name, inner in flat_settings(value).items()})
        else:
            flat[key] = value
    return flat


def settings_environment(settings: Settings) -> dict[str, str]:
    """The environment variables that make a child process load equal settings."""
    tree: dict[str, Any] = msgspec.to_builtins(settings)
    return {
        ENV_PREFIX + name.replace(".", "_").upper(): str(value)
        for name, value in flat_settings(tree).items()
    }
