"""Addresses that a user gives: URLs, where to listen, and which ones HTTP proxies are meant for."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
from urllib.parse import urlsplit


def base_url(url: str) -> str:
    """The URL without a slash at its end; one without a scheme is taken as http.

    Raises ValueError where its host or port cannot be.
    """
    whole = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        _ = urlsplit(whole).port
    except ValueError as error:
        raise ValueError(f"{url} is not a URL: {error}") from None
    return whole


def listen_url(host: str, port: int) -> str:
    """Base URL of a server that listens at `host` and `port`."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listen_address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Address family, and numeric host with port, to listen at. Raises OSError for no address."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, (str(address[0]), int(address[1]))


def free_port(host: str) -> int:
    """A port that nobody listens on, to be used later.

    It is one that the system gives to no connection and to no listener on port 0, so that it is
    most likely still free then. Ray uses ports below 20,000. Raises OSError for no address.
    """
    family, (numeric, _) = listen_address(host, 0)
    for port in random.sample(range(20_000, 32_000), 50):
        with contextlib.suppress(OSError), socket.create_server((numeric, port), family=family):
            return port
    with socket.create_server((numeric, 0), family=family) as probe:
        return int(probe.getsockname()[1])


def is_loopback(url: str) -> bool:
    """Whether the URL leads to this machine."""
    try:
        host = urlsplit(base_url(url)).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def uses_proxy(url: str) -> bool:
    """Whether HTTP_PROXY and the like apply; they do not to this machine's own addresses."""
    return not is_loopback(url)
