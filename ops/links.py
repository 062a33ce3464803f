"""The links that `stemroute doctor` checks, and how a broken one is detected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple, TypeVar

import msgspec
from redis.exceptions import RedisError

from cluster.redis_client import trouble

LOOK_AGAIN_S = 0.05
"""Polling interval: other processes offer nothing to wait on."""

HTTP_TIMEOUT_S = 10.0

LinkState = Literal["ok", "broken", "skipped"]

Found = TypeVar("Found")


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One link of the chain.

    found   the finding, in words
    fix    how to fix it if it is broken
    """

    name: str
    state: LinkState
    found: str
    fix: str = ""


class Step(NamedTuple):
    """The check of one link: `look` returns its finding, or raises Broken or Skip."""

    name: str
    look: Callable[[], Awaitable[str]]


class Broken(Exception):
    """A link is broken: the finding, and how to fix it."""

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(found)
        self.found = found
        self.fix = fix


class Skip(Exception):
    """A link cannot be checked; the message says why."""


async def take(step: Step) -> Link:
    """Check one link."""
    try:
        return Link(name=step.name, state="ok", found=await step.look())
    except Broken as broken:
        return Link(name=step.name, state="broken", found=broken.found, fix=broken.fix)
    except Skip as skipped:
        return Link(name=step.name, state="skipped", found=str(skipped))
    except (RedisError, OSError, TimeoutError) as error:
        return Link(
            name=step.name,
            state="broken",
            found=trouble(error),
            fix="check whether Redis is restarting or refuses this user",
        )


async def settled(trouble: Callable[[], Awaitable[Found]], patience_s: float) -> Found:
    """The last result of `trouble`: empty, or what it still finds when the patience ends."""
    deadline = time.monotonic() + patience_s
    while True:
        found = await trouble()
        if not found or time.monotonic() >= deadline:
            return found
        await asyncio.sleep(LOOK_AGAIN_S)
