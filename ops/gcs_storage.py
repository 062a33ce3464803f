"""Where Ray's GCS, the part of its head that knows all nodes and actors, keeps its state.

In memory (Ray's default) the state is lost with the head, and Ray ends all workers when the head
comes back. In Redis it outlives the head: workers serve meanwhile, and go on when it is back.
"""

from __future__ import annotations

import secrets
from typing import Any

import redis

from cluster.redis_address import RedisAddressError, parse_redis_url
from cluster.settings import SettingsError

STORAGE_KEY = b"extra_usage_tag_gcs_storage"
"""Each Ray head writes here how it keeps its state: "memory", "redis" or "rocksdb"
(`ray._private.node.Node._record_stats`)."""
STORAGE_NAMESPACE = b"usage_stats"
IN_MEMORY = "memory"

TLS_VARIABLES = {
    "ssl_ca_certs": "RAY_REDIS_CA_CERT",
    "ssl_ca_path": "RAY_REDIS_CA_PATH",
    "ssl_certfile": "RAY_REDIS_CLIENT_CERT",
    "ssl_keyfile": "RAY_REDIS_CLIENT_KEY",
}
"""Option of a Redis URL -> the environment variable in which Ray looks for it."""

HOW_TO_START = "RAY_REDIS_ADDRESS=HOST:PORT RAY_external_storage_namespace=NAME ray start --head"


TIMEOUT_S = 5.0


class GcsRedis:
    """The Redis of a GCS, as Ray takes it.

    environment   RAY_REDIS_ADDRESS and TLS files, read when a head starts
    username      "" for Redis' default user
    password      "" for none; Ray shows it in the command lines of its processes
    """

    def __init__(self, redis_url: str) -> None:
        """Raises SettingsError where Ray cannot keep its state in this Redis."""
        try:
            address = parse_redis_url(redis_url)
        except RedisAddressError as error:
            raise SettingsError(f"redis_url (STEMROUTE_REDIS_URL): {error}") from None
        if address.service or len(address.hosts) != 1:
            raise SettingsError(
                f"serve.gcs_fault_tolerance: Ray cannot keep its state in {address.shown}, because "
                "it needs a single Redis server: give redis_url as redis://HOST:PORT, or set "
                "serve.gcs_fault_tolerance=false"
            )
        host, port = address.hosts[0]
        tls = {name: value for name, value in address.options.items() if name.startswith("ssl_")}
        if unknown := tls.keys() - TLS_VARIABLES.keys():
            raise SettingsError(
                f"serve.gcs_fault_tolerance: Ray does not know {', '.join(sorted(unknown))} of "
                f"redis_url; of the TLS options it knows {', '.join(TLS_VARIABLES)}"
            )
        netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.environment = {
            "RAY_REDIS_ADDRESS": f"{'rediss' if address.tls else 'redis'}://{netloc}",
            **{TLS_VARIABLES[name]: str(value) for name, value in tls.items()},
        }
        self.username: str = address.options.get("username", "")
        self.password: str = address.options.get("password", "")
        self._options: dict[str, Any] = {
            "host": host,
            "port": port,
            "username": self.username or None,
            "password": self.password or None,
            "ssl": address.tls,
            **tls,
        }

    def check(self) -> None:
        """Raises RedisError or OSError where it cannot be written to: Ray would end the process."""
        with self._client() as client:
            client.set(f"RAY{secrets.token_hex(8)}@check", "", px=1000)

    def remove(self, namespace: str) -> None:
        """Remove the state of a GCS that has ended. Raises RedisError, OSError."""
        with self._client() as client:
            for key in client.scan_iter(f"RAY{namespace}@*", count=1000):
                client.unlink(key)

    def _client(self) -> redis.Redis:
        """Of database 0, which is Ray's whatever the URL says."""
        return redis.Redis(**self._options, socket_timeout=TIMEOUT_S)


def gcs_storage() -> str:
    """Where the Ray cluster that this process is connected to keeps its state: "memory", "redis",
    "rocksdb", or "" where its head does not say."""
    from ray.experimental.internal_kv import _internal_kv_get

    found = _internal_kv_get(STORAGE_KEY, namespace=STORAGE_NAMESPACE)
    return found.decode() if found else ""
