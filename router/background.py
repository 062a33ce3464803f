"""Threads for the work of requests that would block the event loop.

Each piece of work is Python code, which yields to the loop at every switch interval, or a call that
releases the GIL, or a short call of bounded size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

HUGE = 1_000_000
"""Larger work has a thread of its own, so that it does not delay smaller work."""

SWITCH_INTERVAL_S = 0.001
"""How long a thread may make the loop wait for the GIL (`sys.setswitchinterval`)."""

_Result = TypeVar("_Result")


class Background:
    """Runs functions at once or in threads, by the size of their input."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(max_workers=2, thread_name_prefix="long work")
        self._huge = ThreadPoolExecutor(max_workers=1, thread_name_prefix="huge work")

    async def run(self, size: int, at_once: int, work: Callable[[], _Result]) -> _Result:
        """The result of `work`, which runs at once if `size` is at most `at_once`."""
        if size <= at_once:
            return work()
        threads = self._huge if size > HUGE else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def close(self) -> None:
        """End the threads; pending work is dropped."""
        for threads in (self._long, self._huge):
            threads.shutdown(wait=True, cancel_futures=True)
