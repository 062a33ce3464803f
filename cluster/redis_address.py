"""Redis addresses: what a URL may say, and how it is shown without its secrets.

    redis://[[user]:password@]host[:port][,host[:port]...][/db][?option=value]
    redis+sentinel://[[user]:password@]host[:port][,host[:port]...]/service[/db]
    unix://[[user]:password@]/path[?db=0]

`rediss` in place of `redis` is TLS. User and password are percent-encoded. The options are OPTIONS,
and with TLS also TLS_OPTIONS, as redis-py reads them. No error and nothing shown contains a user or
a password.
"""

from __future__ import annotations

import inspect
from typing import Any
from urllib.parse import quote, unquote

import msgspec
from redis.asyncio.connection import SSLConnection, parse_url

REDIS_PORT = 6379
SENTINEL_PORT = 26379

SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "unix")

OPTIONS = (
    *("db", "username", "password", "client_name", "protocol", "max_connections"),
    *("health_check_interval", "retry_on_timeout"),
    *("socket_keepalive", "socket_timeout", "socket_connect_timeout"),
)

TLS_OPTIONS = tuple(
    name for name in inspect.signature(SSLConnection).parameters if name.startswith("ssl_")
)


class RedisAddressError(ValueError):
    """A Redis URL that cannot be used. The text contains no part of user or password."""


class RedisAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where Redis is.

    hosts      (host, port) of servers of which one is the primary, or of Sentinels; () for unix
    service    the name under which the Sentinels know the primary; "" where hosts are servers
    tls        whether servers and Sentinels are spoken to over TLS
    options    further arguments of a redis-py connection: username, password, db, path, ...
    shown      the address for messages: scheme, hosts, service and database
    """

    hosts: tuple[tuple[str, int], ...]
    service: str
    tls: bool
    options: dict[str, Any]
    shown: str


def parse_redis_url(url: str) -> RedisAddress:
    """Raises RedisAddressError with the reason."""
    scheme, separator, rest = url.strip().partition("://")
    if not separator or scheme not in SCHEMES:
        raise RedisAddressError(
            f"a Redis URL begins with one of {', '.join(f'{s}://' for s in SCHEMES)}"
        )
    end = min((at for c in "/?#" if (at := rest.find(c)) >= 0), default=len(rest))
    authority, tail = rest[:end], rest[end:]
    if "@" in tail and scheme != "unix":
        raise RedisAddressError(
            "user or password of the Redis URL contain '/', '?' or '#': percent-encode them "
            "(%2F, %3F, %23), or set the password as STEMROUTE_REDIS_PASSWORD instead"
        )
    userinfo, _, places = authority.rpartition("@")
    options = _options(tail, tls=scheme.startswith("rediss"))
    user, _, password = userinfo.partition(":")
    if user:
        options["username"] = unquote(user)
    if password:
        options["password"] = unquote(password)
    path = tail.partition("?")[0].partition("#")[0]
    if scheme == "unix":
        if places:
            raise RedisAddressError(
                "a Redis URL with unix:// has no host: unix:///PATH, or unix://:PASSWORD@/PATH "
                "with a percent-encoded password"
            )
        return RedisAddress(
            hosts=(),
            service="",
            tls=False,
            options=options | {"path": path},
            shown=f"unix://{path}",
        )
    sentinel = scheme.endswith("+sentinel")
    default_port = SENTINEL_PORT if sentinel else REDIS_PORT
    hosts = tuple(_host(place, default_port) for place in places.split(","))
    service, database = _path(path, sentinel)
    if database:
        options["db"] = int(database)
    names = ",".join(
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in hosts
    )
    return RedisAddress(
        hosts=hosts,
        service=service,
        tls=scheme.startswith("rediss"),
        options=options,
        shown="/".join(part for part in (f"{scheme}://{names}", service, database) if part),
    )


def with_password(url: str, password: str) -> str:
    """The URL with another password; unchanged where `password` is "".

    Raises RedisAddressError where the URL cannot be used.
    """
    if not password or not url:
        return url
    user = parse_redis_url(url).options.get("username", "")
    scheme, _, rest = url.strip().partition("://")
    end = min((at for c in "/?#" if (at := rest.find(c)) >= 0), default=len(rest))
    places = rest[:end].rpartition("@")[2]
    return f"{scheme}://{quote(user, safe='')}:{quote(password, safe='')}@{places}{rest[end:]}"


def _options(tail: str, *, tls: bool) -> dict[str, Any]:
    query = tail.partition("?")[2].partition("#")[0]
    try:
        options: dict[str, Any] = dict(parse_url(f"redis://?{query}"))
    except ValueError:
        raise RedisAddressError("an option of the Redis URL has no valid value") from None
    known = OPTIONS + TLS_OPTIONS if tls else OPTIONS
    if not options.keys() <= set(known):
        raise RedisAddressError(
            f"an option of the Redis URL is unknown; known are {', '.join(known)}"
        )
    return options


def _host(place: str, default_port: int) -> tuple[str, int]:
    if place.startswith("["):
        host, _, port = place[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = place.partition(":")
    try:
        return unquote(host) or "127.0.0.1", int(port) if port else default_port
    except ValueError:
        raise RedisAddressError(
            "the port in the Redis URL is not a number; if the URL has a password, it ends with '@'"
        ) from None


def _path(path: str, sentinel: bool) -> tuple[str, str]:
    """The service and the database, "" where there is none."""
    parts = [unquote(part) for part in path.strip("/").split("/")] if path.strip("/") else []
    service = parts.pop(0) if sentinel and parts else ""
    if sentinel and not service:
        raise RedisAddressError(
            "a Sentinel URL names the service: redis+sentinel://host:port/SERVICE"
        )
    if len(parts) > 1 or (parts and not parts[0].isdecimal()):
        raise RedisAddressError("the path of a Redis URL is the number of a database, such as /0")
    return service, parts[0] if parts else ""
