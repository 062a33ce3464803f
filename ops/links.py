"""Links of the chain that `stemroute doctor` walks, and how one is found to be broken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple, TypeVar

import msgspec
from redis.exceptions import RedisError

from cluster.redis_client import trouble

LOOK_AGAIN_S = 0.05
"""Other processes are looked at so often: there is nothing here to wait on."""

HTTP_TIMEOUT_S = 10.0

LinkState = Literal["ok", "broken", "skipped"]

Found = TypeVar("Found")


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One link of the chain.

    found   what was seen, in words
    mend    what to do where it is broken
    """

    name: str
    state: LinkState
    found: str
    mend: str = ""


class Step(NamedTuple):
    """How one link is looked at: `look` returns what it found, or raises Broken or Skip."""

    name: str
    look: Callable[[], Awaitable[str]]


class Broken(Exception):
    """A link is broken: what was found, and the mend."""

    def __init__(self, found: str, mend: str) -> None:
        super().__init__(found)
        self.found = found
        self.mend = mend


class Skip(Exception):
    """A link cannot be looked at; the text says why."""


async def take(step: Step) -> Link:
    """Look at one link."""
    try:
        return Link(name=step.name, state="ok", found=await step.look())
    except Broken as broken:
        return Link(name=step.name, state="broken", found=broken.found, mend=broken.mend)
    except Skip as skipped:
        return Link(name=step.name, state="skipped", found=str(skipped))
    except (RedisError, OSError, TimeoutError) as error:
        return Link(
            name=step.name,
            state="broken",
            found=trouble(error),
            mend="see whether Redis restarts, or refuses this user",
        )


async def settled(trouble: Callable[[], Awaitable[Found]], patience_s: float) -> Found:
    """What `trouble` finds, once it finds nothing or the patience ends."""
    deadline = time.monotonic() + patience_s
    while True:
        found = await trouble()
        if not found or time.monotonic() >= deadline:
            return found
        await asyncio.sleep(LOOK_AGAIN_S)
