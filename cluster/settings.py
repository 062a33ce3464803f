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
    """An invalid setting. The message names the setting, where it came from, and what to change."""


class BusSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How workers report their caches and load to gateways.

    lease_s             a worker without a report for this many seconds counts as gone
    heartbeat_s         longest interval between two reports, in seconds
    min_report_gap_s    shortest interval between two reports, in seconds
    blocks_ttl_s        seconds until Redis drops a worker's block set that is not renewed
    stream_max_reports  approximate length of the report stream in Redis
    """

    lease_s: float = 3.0
    heartbeat_s: float = 0.5
    min_report_gap_s: float = 0.02
    blocks_ttl_s: float = 60.0
    stream_max_reports: int = 20_000


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway.

    host                 interface to listen on
    port                 port to listen on; 0: a free port
    processes            gateway processes that share the port; the limits below apply per process
    policy               routing policy with its parameters, such as "locality" or
                         "consistent_hash:bound=1.25"
    shadow               policies to evaluate on live traffic without using them, such as
                         "round_robin,least_requests"; "": none
    cors_origins         origins whose web pages may call /v1, separated by commas, such as
                         "https://chat.example.com"; "*": all; "": none
    api_key              bearer token that clients must send; "": none required
    admin_key            bearer token for /admin; "": only clients on this machine are admitted
    max_body_bytes       largest request body; larger ones are refused with 413
    max_held_body_bytes  most bytes of the bodies of all requests that are not answered yet; beyond
                         it, requests are refused with 503
    max_messages         most messages in a chat; more are refused with 400
    max_connections      most client connections; when it is reached, a connection that has been
                         idle for 5 s is closed for a new one, otherwise the new one gets 503
    write_timeout_s      close a connection whose client has read nothing of its response for this
                         many seconds, and cancel the request
    attempts             most workers that are tried per request, until one responds; those that
                         fail every request do not count
    migrations           how often another worker may go on with a response whose worker has failed
    connect_timeout_s    timeout for connecting to a worker
    first_byte_timeout_s timeout for a worker's response headers
    inter_token_timeout_s a response that has begun and then sends nothing for this many seconds
                         has failed
    stall_timeout_s      a worker without a sign of life (a report, a byte of a response, an answer
                         to `GET /health`) for this many seconds gets no requests until the next
                         one, and those under way there fail
    default_max_tokens   max_tokens of requests that set none (bounded by the context)
    max_wait_s           longest expected wait of a request before it starts; beyond it, it is
                         refused with 429. If requests usually wait less, the limit is lower. 0: no
                         limit
    queue                size of the admission queue, in which requests wait until a worker is
                         ready and has room, by priority, then first in, first out; 0: no queue
    queue_timeout_s      longest wait in the admission queue; then 429, or 503 if no worker is ready
    drain_notice_s       at shutdown, time for which /ready fails while requests are still served,
                         so that load balancers send new ones elsewhere
    drain_timeout_s      then, grace period for requests under way; the rest ends with an error
    index_max_pairs      most (block, worker) pairs in the prefix index, about 90 bytes each; a
                         full index drops the deepest blocks
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
    max_held_body_bytes: Annotated[int, msgspec.Meta(ge=1)] = 256 * 1024 * 1024
    max_messages: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    max_connections: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    write_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    attempts: int = 3
    migrations: Annotated[int, msgspec.Meta(ge=0)] = 3
    connect_timeout_s: float = 2.0
    first_byte_timeout_s: float = 600.0
    inter_token_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    stall_timeout_s: Annotated[float, msgspec.Meta(ge=0.5)] = 3.0
    default_max_tokens: int = 1024
    max_wait_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    queue: Annotated[int, msgspec.Meta(ge=0)] = 0
    queue_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    drain_notice_s: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    drain_timeout_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    index_max_pairs: Annotated[int, msgspec.Meta(ge=1)] = 20_000_000

    @property
    def shutdown_s(self) -> float:
        """Longest time from the signal to the end of a drain."""
        return self.drain_notice_s + self.drain_timeout_s


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker.

    model            "smollm2", a Hugging Face directory, a GGUF file, or "emulated:PROFILE"
    served_name      model name for clients; "": the model's own name
    device           "auto", "cpu" or "cuda"
    dtype            of weights and KV cache: "auto", "float32", "bfloat16" or "float16"
    block_size       tokens per KV block; the same for all workers of a model
    attention        "auto" (triton on CUDA, otherwise sdpa), "sdpa" or "triton"
    kv_blocks        KV blocks in the pool; 0: as many as fit into `kv_memory_share`
    kv_memory_share  share of the free device memory for the KV pool
    context_tokens   longest prompt + output; 0: as in the model's configuration
    max_batch_size   most sequences that run at once
    cuda_graphs      with triton on CUDA, record decode steps at start and replay them
    token_budget     most tokens per engine step
    chunk_tokens     most prompt tokens of one sequence per step; 0: the whole budget
    max_waiting      most waiting requests; more are refused with 429
    eviction         eviction policy of cached blocks: "lru", "lfu", "ttl:ttl_s=600" or
                     "workload_aware"
    cache_share      share of the pool for cached blocks that no request uses
    cpu_tier_gb      GiB of host memory for evicted KV blocks; 0: no host tier
    disk_tier_gb     GiB of disk for evicted KV blocks, written behind the host tier, which it
                     needs; 0: no disk tier
    disk_tier_dir    directory of the disk tier; "": ~/.cache/stemroute/kv
    save_timeout_s   with a disk tier, longest time at shutdown for saving blocks that are on the
                     device only; 0: do not save them
    warmup_file      text file with prompts, separated by lines of "---", that are computed before
                     the worker becomes ready; "": no warm-up
    pin_share        share of the pool in which the warm-up prompts are protected from eviction
    threads          threads of torch; one thread per worker is fastest on a busy CPU machine
    host             interface of the worker's HTTP server
    advertise_host   host name that gateways connect to; "": the node's address
    port             port of the worker's HTTP server; 0: a free port
    drain_timeout_s  grace period at shutdown for running requests
    stall_timeout_s  an engine that sends nothing for this many seconds is stalled, and its requests
                     fail; within a step, twice the longest measured step is allowed in addition
    cache_dir        directory of converted weights; "": ~/.cache/stemroute
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
    stall_timeout_s: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    cache_dir: str = ""


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How Ray Serve places workers.

    replicas               number of workers
    gpus_per_worker        GPUs per worker; 0 on CPU machines
    cpus_per_worker        CPUs that Ray reserves per worker
    health_check_period_s  interval between Ray's health checks of a worker
    health_check_timeout_s a worker that does not answer within this time is unhealthy
    gcs_fault_tolerance    keep the state of Ray's head (its GCS) in Redis, so that workers survive
                           a loss of the head. `stemroute up` does so, in the pool's Redis;
                           `stemroute deploy` refuses a Ray cluster whose state is in memory
    """

    replicas: int = 2
    gpus_per_worker: float = 0.0
    cpus_per_worker: float = 1.0
    health_check_period_s: float = 2.0
    health_check_timeout_s: float = 10.0
    gcs_fault_tolerance: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings.

    pool            name that workers and gateways share to find each other; `stemroute up` replaces
                    "default" by a name of its own
    redis_url       redis://[user:password@]host:port[/db]; with Sentinel
                    redis+sentinel://[user:password@]host:port[,host:port]/service[/db]; with Redis
                    Cluster redis://host:port,host:port. `rediss` uses TLS. User and password are
                    percent-encoded. "": `stemroute up` starts an embedded Valkey
    redis_password  replaces the password of the URL; not percent-encoded
    secret          secret of the pool, which enters every block hash; the same for workers and
                    gateways; `stemroute up` generates one where it is empty
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
