"""The workers' load as arrays by slot, which policies read directly.

A change of a worker's load writes its entries; a decision gathers nothing. Policies see views of
these arrays if the slots of the group are consecutive, and copies otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from router.policies import Columns

ROWS = (
    "pending_tokens",
    "waiting",
    "batch",
    "pending_pairs",
    "room_blocks",
    "running",
    "free_blocks",
    "capacity_blocks",
    "worker_keys",
)
"""The integers of each worker, in this order: first those that bookings change
(`router.member.booked_of`), then those from its reports alone."""

SPEEDS = ("s_per_token", "s_per_pair", "start_interval_s", "wait_s")
"""What was measured of each worker, and its expected wait, in this order."""


class LoadTable:
    """The arrays: a row of `ROWS` and `SPEEDS` for each slot. They grow by doubling."""

    def __init__(self, slots: int = 8) -> None:
        self._take(np.zeros((len(ROWS), slots), dtype=np.int64), np.zeros((len(SPEEDS), slots)))

    def _take(self, rows: NDArray[np.int64], speeds: NDArray[np.float64]) -> None:
        self.rows = rows
        self.speeds = speeds
        self.size = rows.shape[1]
        # single numbers are read and written through these: that costs half of what it does in
        # an array
        self._cells = [memoryview(row) for row in rows]
        self._speed_rows = list(speeds)

    def grow(self) -> None:
        """Double the number of slots. Columns returned earlier are not updated any more."""
        self._take(
            np.concatenate([self.rows, np.zeros_like(self.rows)], axis=1),
            np.concatenate([self.speeds, np.zeros_like(self.speeds)], axis=1),
        )

    def put(self, slot: int, row: Iterable[int]) -> None:
        """Set the first `len(row)` of `ROWS`."""
        for cells, value in zip(self._cells, row, strict=False):
            cells[slot] = value

    def put_speeds(self, slot: int, speeds: tuple[float, float, float]) -> None:
        """Set `SPEEDS` but the last."""
        for row, value in zip(self._speed_rows, speeds, strict=False):
            row[slot] = value

    def put_wait(self, slot: int, wait_s: float) -> None:
        """Set the last of `SPEEDS`."""
        self._speed_rows[-1][slot] = wait_s

    def booked(self, slot: int) -> tuple[int, int, int, int]:
        """The first four of the slot's `ROWS`."""
        tokens, waiting, batch, pairs = self._cells[:4]
        return tokens[slot], waiting[slot], batch[slot], pairs[slot]

    def add_booking(self, slot: int, tokens: int, pairs: int, blocks: int) -> None:
        """Add a request that was sent to the worker, with the work that it causes there."""
        pending_tokens, waiting, batch, pending_pairs, room_blocks = self._cells[:5]
        pending_tokens[slot] += tokens
        waiting[slot] += 1
        batch[slot] += 1
        pending_pairs[slot] += pairs
        room_blocks[slot] -= blocks

    def clear(self, slot: int) -> None:
        """The slot has no worker any more."""
        self.rows[:, slot] = 0
        self.speeds[:, slot] = 0

    def row(self, slot: int) -> list[int]:
        """The slot's `ROWS`."""
        row: list[int] = self.rows[:, slot].tolist()
        return row

    def columns(self, slots: NDArray[np.int64], run: slice | None) -> Columns:
        """The columns of `slots`, read-only: views that change with the table if `run` is given,
        otherwise copies."""
        at = slots if run is None else run
        picked, measured = self.rows[:, at], self.speeds[:, at]
        picked.flags.writeable = measured.flags.writeable = False
        return Columns(slots, *picked, *measured)


def run_of(slots: NDArray[np.int64]) -> slice | None:
    """The sorted `slots` as a slice if they are consecutive, as they mostly are."""
    if not len(slots):
        return None
    first, last = int(slots[0]), int(slots[-1])
    return slice(first, last + 1) if last - first + 1 == len(slots) else None
