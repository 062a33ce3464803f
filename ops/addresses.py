"""Addresses that a user gives: URLs, where to listen, and which ones HTTP proxies are meant for."""

from __future__ import annotations

import ipaddress
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
