"""URLs that a user gives, and which of them a proxy of the environment is meant for."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def base_url(url: str) -> str:
    """The URL without a slash at its end; one without a scheme is taken as http."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


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
