"""One load: copying blocks from host memory and files to the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from worker.tiers.block_file import BadBlockFile, Header
from worker.tiers.chain_set import Entry
from worker.tiers.disk_folder import DiskFolder

log = logging.getLogger(__name__)

FILES_AT_ONCE = 32
"""Number of files that are read before their blocks are written to the device."""


class KvCopies(Protocol):
    """The interface that the tiers need for copies of KV. `block_bytes`: KV of one block."""

    block_bytes: int

    def copy_out(self, blocks: Sequence[int], places: Sequence[int]) -> Callable[[], bool]:
        """Start copying device blocks to places in host memory.

        The next step may overwrite the blocks at once. The result tells whether the copies are
        complete.
        """
        ...

    def fence(self) -> Callable[[], None]:
        """A mark in the computation so far. Call the result in the I/O thread before it writes to
        device blocks that were allocated before the mark."""
        ...

    def copy_in(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy from host memory to device blocks; complete on return. For the I/O thread."""
        ...

    def put(self, bodies: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Write KV read from files to device blocks; complete on return. For the I/O thread."""
        ...

    def host_bytes(self, place: int) -> memoryview:
        """The KV at a place of host memory."""
        ...


class Loaded(NamedTuple):
    """Result of a load: leading blocks that are complete, seconds, and the failure."""

    blocks: int
    host_s: float
    disk_s: float
    problem: str


class ColdLoad:
    """Blocks [start, start + len(entries)) of a chain, to be loaded to the device.

    The first `from_host` come from host memory, the others from disk. Its entries are pinned until
    `ColdTiers.take_loaded` gives the load back with `whole`, the number of leading blocks that are
    then on the device.
    """

    __slots__ = ("blocks", "entries", "estimate_s", "from_host", "future", "start", "whole")

    def __init__(self, start: int, entries: list[Entry], from_host: int, estimate_s: float) -> None:
        self.start = start
        self.entries = entries
        self.from_host = from_host
        self.estimate_s = estimate_s
        self.blocks: list[int] = []
        self.whole = 0
        self.future: Future[Loaded] | None = None


def run_load(
    copies: KvCopies,
    clock: Callable[[], float],
    fence: Callable[[], None],
    load: ColdLoad,
    folder: DiskFolder | None,
    headers: list[Header],
) -> Loaded:
    """Run the load in the I/O thread. A failure is returned, never raised.

    fence     `KvCopies.fence` of the time at which the load's blocks were allocated
    clock     in seconds
    headers   of the blocks that are read from `folder`
    """
    count = load.from_host
    whole, host_s, began_s = 0, 0.0, clock()
    try:
        fence()
        began_s = clock()
        if count:
            places = [entry.place for entry in load.entries[:count]]
            copies.copy_in(places, load.blocks[:count])
        whole, host_s = count, clock() - began_s
        for start in range(0, len(headers), FILES_AT_ONCE):
            assert folder is not None
            bodies, problem = _read(folder, headers[start : start + FILES_AT_ONCE])
            if bodies:
                first = count + start
                copies.put(bodies, load.blocks[first : first + len(bodies)])
                whole += len(bodies)
            if problem:
                return Loaded(whole, host_s, 0.0, problem)
        return Loaded(whole, host_s, clock() - began_s - host_s, "")
    except Exception as error:  # any error of a driver: the blocks are computed instead
        log.exception("loading blocks from a cold tier failed")
        return Loaded(whole, host_s, 0.0, repr(error))


def _read(folder: DiskFolder, headers: list[Header]) -> tuple[list[bytes], str]:
    bodies = []
    for header in headers:
        try:
            bodies.append(folder.read(header))
        except (OSError, BadBlockFile) as error:
            return bodies, f"{header.block_hash.hex()}: {error}"
    return bodies, ""
