"""A Redis client whose connections lead to the primary, wherever it is now.

A connection looks for the primary each time it is made, and ends when the server refuses writes or
no longer holds the keys. The next command then makes another one:

    Sentinels              asked for the primary's address by its name
    a replica              names its primary (ROLE), which is tried next
    a node of a cluster    names the node that has the keys (MOVED), which is tried next

All keys of a pool share a hash tag, so on Redis Cluster one node has them all, and one connection
at a time is enough. Nothing is retried here: callers wait and try again.
"""

from __future__ import annotations

from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from cluster.redis_address import RedisAddress, parse_redis_url

REDIRECTIONS = 5
"""From server to server while a connection is made, at most."""

UNBLOCKED = "UNBLOCKED"
"""How a server that becomes a replica ends a blocking read."""


def connect(url: str, *, timeout_s: float, key: str = "") -> aioredis.Redis:
    """A client of the primary that reports trouble at once instead of hiding it behind retries.

    key   one of the keys that will be used: on Redis Cluster, connections are made to its node

    Connects with the first command. Raises RedisAddressError for a URL that cannot be used.
    """
    address = parse_redis_url(url)
    options: dict[str, Any] = {
        **address.options,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    if not address.hosts:
        return aioredis.Redis(unix_socket_path=options.pop("path"), **options)
    options["socket_keepalive"] = True
    pool = ConnectionPool(
        connection_class=_PrimaryTlsConnection if address.tls else _PrimaryConnection,
        locator=Locator(address, timeout_s),
        key=key,
        **options,
    )
    return aioredis.Redis.from_pool(pool)


def trouble(error: Exception) -> str:
    """What an error of Redis means, in words, with what to do. Contains no password."""
    match error:
        case ReadOnlyError():
            return (
                "Redis takes no writes: this server is a replica (READONLY); the primary is wanted"
            )
        case OutOfMemoryError():
            return (
                "Redis takes no writes: it has reached maxmemory and evicts nothing; "
                "raise maxmemory, or give the pool a Redis of its own"
            )
        case AuthenticationError() | AuthorizationError():
            return (
                f"Redis refuses user or password ({_said(error)}): correct "
                "STEMROUTE_REDIS_PASSWORD or STEMROUTE_REDIS_URL"
            )
        case NoPermissionError():
            return f"the Redis user lacks a permission: {_said(error)}"
        case MovedError():
            return f"the pool's keys have moved to the cluster node {error.host}:{error.port}"
        case AskError() | TryAgainError():
            return "Redis Cluster is moving the pool's keys to another node"
        case ClusterDownError():
            return f"Redis Cluster does not serve the pool's keys: {_said(error)}"
        case BusyLoadingError():
            return "Redis is loading its data"
        case ResponseError():
            return f"Redis refuses a command: {_said(error)}"
        case _:
            return f"Redis cannot be reached: {_said(error)}"


def _said(error: Exception) -> str:
    """The text of an error, without the arguments of an unknown command: they hold the password
    where HELLO or AUTH is the unknown one."""
    return str(error).partition(", with args beginning with")[0] or repr(error)


class Locator:
    """Where to look for the primary next."""

    def __init__(self, address: RedisAddress, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._named: tuple[str, int] | None = None  # by a replica or a cluster node
        self._turn = 0

    async def find(self) -> tuple[str, int]:
        """Host and port to try now. Raises RedisError where no Sentinel knows one."""
        if self._named is not None:
            return self._named
        if self._address.service:
            return await self._ask_sentinels()
        return self._address.hosts[self._turn % len(self._address.hosts)]

    def go_to(self, host: str, port: int) -> None:
        """A server has named another one."""
        self._named = (host, port)

    def start_over(self) -> None:
        """The server found last is of no use: begin with the URL again, at its next host."""
        self._named = None
        self._turn += 1

    async def _ask_sentinels(self) -> tuple[str, int]:
        """The first Sentinel that knows the service is asked first the next time, too."""
        hosts, service = self._address.hosts, self._address.service
        problems = []
        for offset in range(len(hosts)):
            turn = (self._turn + offset) % len(hosts)
            host, port = hosts[turn]
            try:
                answer = await self._ask(host, port)
            except (RedisError, OSError, TimeoutError) as error:
                problems.append(f"{host}:{port}: {_said(error)}")
                continue
            if answer:
                self._turn = turn
                return _text(answer[0]), int(answer[1])
            problems.append(f"{host}:{port} does not know it")
        raise RedisConnectionError(
            f"no Sentinel names a primary of {service!r} ({'; '.join(problems)})"
        )

    async def _ask(self, host: str, port: int) -> Any:
        """Sentinels mostly ask for no password; where one does, it is taken to be Redis'."""
        known = {k: v for k, v in self._address.options.items() if k in ("username", "password")}
        try:
            return await self._ask_as(host, port, {})
        except AuthenticationError:
            if not known:
                raise
            return await self._ask_as(host, port, known)

    async def _ask_as(self, host: str, port: int, credentials: dict[str, Any]) -> Any:
        kept = {k: v for k, v in self._address.options.items() if k.startswith("ssl_")}
        async with aioredis.Redis(
            host=host,
            port=port,
            ssl=self._address.tls,
            socket_timeout=self._timeout_s,
            socket_connect_timeout=self._timeout_s,
            retry=Retry(NoBackoff(), 0),
            **kept,
            **credentials,
        ) as sentinel:
            return await sentinel.execute_command(  # type: ignore[no-untyped-call]
                "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.service
            )


class _Redirected(RedisConnectionError):
    """The server has named another one."""


class _ToPrimary(Connection):
    """A connection that finds the primary when it is made, and ends when that is no longer it."""

    def __init__(self, *, locator: Locator, key: str, **options: Any) -> None:
        super().__init__(**options)
        self._locator = locator
        self._key = key

    async def connect(self) -> None:
        """Follow redirections. Raises RedisError."""
        if self.is_connected:
            return
        way = ""  # how this server came to be tried
        for _ in range(REDIRECTIONS):
            try:
                self.host, self.port = await self._locator.find()
                await super().connect()  # type: ignore[no-untyped-call]
                return
            except _Redirected as redirected:
                way = f"{redirected}; "
            except RedisConnectionError as error:
                self._locator.start_over()
                if not way or isinstance(error, AuthenticationError):
                    raise
                raise RedisConnectionError(f"{way}{error}") from error
            except BaseException:
                self._locator.start_over()
                raise
        self._locator.start_over()
        raise RedisConnectionError(f"{way}no server is the primary")

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and make sure that this is the primary of the keys."""
        await super().on_connect_check_health(check_health)
        role = await self._role()
        if role and role[0] in (b"slave", "slave"):
            primary = _text(role[1]), int(role[2])
            self._locator.go_to(*primary)
            raise _Redirected(f"{self.host}:{self.port} is a replica of {primary[0]}:{primary[1]}")
        if self._key:
            await self._check_key()

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """End the connection where the server is no longer the one that serves the keys."""
        try:
            return await super().read_response(*args, **options)
        except MovedError as error:
            self._locator.go_to(error.host or self.host, error.port)
            await self.disconnect(nowait=True)
            raise
        except ResponseError as error:
            if isinstance(error, ReadOnlyError | ClusterDownError) or str(error).startswith(
                UNBLOCKED
            ):
                self._locator.start_over()
                await self.disconnect(nowait=True)
            raise

    async def _role(self) -> Any:
        """None where the server does not tell this user: a replica is noticed at the first write
        then."""
        await self.send_command("ROLE", check_health=False)
        try:
            return await self.read_response()
        except ResponseError:  # not permitted, or not offered, as by some proxies
            return None

    async def _check_key(self) -> None:
        """Ask for the key: another node of a cluster answers with MOVED."""
        await self.send_command("EXISTS", self._key, check_health=False)
        try:
            await self.read_response()
        except MovedError as error:
            raise _Redirected(trouble(error)) from error
        except NoPermissionError:
            return


class _PrimaryConnection(_ToPrimary):
    """Without TLS."""


class _PrimaryTlsConnection(_ToPrimary, SSLConnection):
    """With TLS."""


def _text(raw: bytes | str) -> str:
    return raw if isinstance(raw, str) else raw.decode()
