"""`stemroute doctor`: check every link from Redis to a reused prompt and name broken ones.

    redis ─ writes ─ cards ─ versions ─ digests ─ epochs ─ reports ─ workers ─ blocks
                                                       gateway ─ ready ─ index ─ probe

Each link is checked from outside, with the settings of the command: what a gateway or a worker
reports of itself is compared with what the others see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import httpx
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.bus import BusKeys
from cluster.protocol import pool_token
from cluster.redis_client import connect
from cluster.settings import Settings
from ops.addresses import base_url, uses_proxy
from ops.bus_links import BusLinks
from ops.gateway_links import GatewayLinks
from ops.links import HTTP_TIMEOUT_S, Link, LinkState, take

PATIENCE_S = 5.0
"""Time that reports and the index get to become current."""

STYLES: dict[LinkState, str] = {"ok": "green", "broken": "bold red", "skipped": "yellow"}


async def examine(
    settings: Settings,
    url: str,
    *,
    patience_s: float = PATIENCE_S,
    tell: Callable[[Link], None] | None = None,
) -> list[Link]:
    """Every link in order.

    settings   redis_url, pool, secret and the gateway's keys: as the gateway has them
    url        base URL of the gateway; http without a scheme
    tell       receives each link as soon as it has been checked
    """
    url = base_url(url)
    token = pool_token(settings.secret)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with contextlib.AsyncExitStack() as stack:
        redis = None
        if settings.redis_url:
            redis = connect(
                settings.redis_url,
                timeout_s=patience_s + 2.0,
                key=BusKeys(settings.pool).workers,
            )
            stack.push_async_callback(redis.aclose)
        workers = await stack.enter_async_context(
            httpx.AsyncClient(timeout=HTTP_TIMEOUT_S, headers=headers, trust_env=False)
        )
        client = await stack.enter_async_context(
            httpx.AsyncClient(timeout=HTTP_TIMEOUT_S, base_url=url, trust_env=uses_proxy(url))
        )
        bus = BusLinks(settings, redis, workers, patience_s)
        gateway = GatewayLinks(settings.gateway, client, bus, patience_s)
        links = []
        for step in [*bus.steps(), *gateway.steps()]:
            link = await take(step)
            links.append(link)
            if tell is not None:
                tell(link)
        return links


def healthy(links: Iterable[Link]) -> bool:
    """Whether no link is broken."""
    return all(link.state != "broken" for link in links)


def links_table(links: Iterable[Link]) -> RenderableType:
    """The links with their findings, and the fix below each broken one."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("link", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("found")
    for link in links:
        found: RenderableType = Text(link.found)
        if link.fix:
            found = Group(Text(link.found), Text(f"fix: {link.fix}", style="bold"))
        table.add_row(link.name, Text(link.state, style=STYLES[link.state]), found)
    return table
