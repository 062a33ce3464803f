"""Signals that end a command."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


def interrupt_on_signals() -> None:
    """Make SIGTERM and a closed terminal raise KeyboardInterrupt, as Ctrl-C does.

    That also stops a process that a shell started in the background, where Ctrl-C is ignored.
    Under `nohup` a closed terminal stops nothing.
    """

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, interrupt)


async def until_signal(serving: Coroutine[Any, Any, None]) -> None:
    """Run until it ends by itself, or until SIGINT or SIGTERM cancels it."""
    task = asyncio.ensure_future(serving)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise
