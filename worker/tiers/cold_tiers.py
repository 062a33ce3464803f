"""The cold tiers of one engine: blocks that leave the device go to host memory and then to disk.

    device ──evicted, copied at once──▶ host memory ──written in the background──▶ disk
       ▲                                    │                                        │
       └────────────── loaded by the I/O thread, cached when complete ───────────────┘

Both tiers keep their copy of a loaded block, so that its next eviction costs nothing. Blocks are
written to disk at once, not when host memory is full, so that they survive a crash and host memory
can evict by dropping.

The engine's thread owns the indexes; the two I/O threads get jobs and return results. Look-ups find
an entry once its job has ended (`ready`); it is not evicted while a job uses it (`pins`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

from cluster.protocol import ColdReport, prefill_pairs
from worker.messages import TierStats
from worker.tiers.block_file import Header
from worker.tiers.chain_set import ChainSet, Entry
from worker.tiers.cold_load import ColdLoad, KvCopies, Loaded, run_load
from worker.tiers.disk_folder import DiskFolder
from worker.tiers.disk_index import index_of
from worker.tiers.load_speed import LoadSpeed

log = logging.getLogger(__name__)

DIGITS = 3


class Leaving(NamedTuple):
    """A device block to store in a tier. `content` is as in `PrefixCache`."""

    block: int
    block_hash: bytes
    content: bytes


class ColdTiers:
    """Owns both tiers. Called by the engine's thread only.

    host_blocks    places in host memory
    loader         runs loads, one after the other; `writer` does the same with writes to disk
    clock          in seconds, called in the I/O threads to measure loads
    folder         folder of the disk tier, for `disk_blocks` blocks; None: no disk tier
    """

    def __init__(
        self,
        copies: KvCopies,
        *,
        block_size: int,
        block_bytes: int,
        host_blocks: int,
        loader: Executor,
        writer: Executor,
        clock: Callable[[], float],
        folder: DiskFolder | None = None,
        disk_blocks: int = 0,
    ) -> None:
        self._copies = copies
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._loader, self._writer = loader, writer
        self._clock = clock
        self.host = ChainSet(host_blocks)
        self.host_speed, self.disk_speed = LoadSpeed(), LoadSpeed()
        self._twins: dict[int, Entry] = {}  # device block -> its entry in host memory
        self._leaving: list[tuple[int, Entry]] = []
        self._copying: deque[tuple[Callable[[], bool], list[Entry]]] = deque()
        self._writing: deque[tuple[Future[None], Entry, Entry, ChainSet]] = deque()
        self._loading: deque[tuple[ColdLoad, ChainSet]] = deque()
        self._s_per_token = self._s_per_pair = 0.0
        self._count = dict.fromkeys(TierStats.__struct_fields__, 0)
        self._folder: DiskFolder | None = None
        self._writes_fail = False
        self.use_folder(folder, disk_blocks)

    def use_folder(self, folder: DiskFolder | None, disk_blocks: int) -> None:
        """Use this folder and its blocks as the disk tier from now on.

        The former folder is released after the writes queued for it.
        """
        if self._folder is not None:
            self._writer.submit(self._folder.close)
            if folder is not None:  # until then it was in use, so it was not among the leftovers
                self._writer.submit(folder.find_leftovers)
        self._folder = folder
        if folder is None:
            self.disk = ChainSet(0)
            return
        self.disk, orphans = index_of(
            folder, disk_blocks, lambda entry: self._remove(folder, entry.block_hash)
        )
        for block_hash in orphans:
            self._count["orphaned_files"] += 1
            self._remove(folder, block_hash)
        self._count["unusable_files"] += folder.unusable

    def set_prefill_speed(self, s_per_token: float, s_per_pair: float) -> None:
        """Set the measured cost of computing; 0: unknown, then nothing is loaded."""
        self._s_per_token, self._s_per_pair = s_per_token, s_per_pair

    # Blocks that leave the device

    def keeps(self, block: int) -> bool:
        """Whether host memory holds the KV of this cached device block, or will soon."""
        twin = self._twins.get(block)
        return twin is not None and twin.alive

    def leave(self, parent: int, path: Sequence[Leaving], now: float) -> None:
        """Store the evicted last block of `path`; the blocks before it are its ancestors, from the
        front, that host memory lacks. `parent` is the device block before them, stored here, or 0.
        """
        above = self._twins[parent] if parent else None
        for block, block_hash, content in path:
            entry = self.host.get(block_hash)
            if entry is None:
                entry = self.host.add(block_hash, above, content, now)
                if entry is None:
                    self._count["refused_blocks"] += 1
                    break
                self._leaving.append((block, entry))
            elif entry.parent is not above or entry.content != content:
                self.host.collisions += 1
                break
            self._twins[block] = above = entry

    def left(self, block: int, now: float) -> None:
        """The device block was evicted or dropped."""
        twin = self._twins.pop(block, None)
        if twin is not None and twin.alive:
            self.host.touch((twin,), now)

    def copy_out(self) -> None:
        """Start copying all blocks that left. Call it before anything overwrites these blocks."""
        leaving, self._leaving = self._leaving, []
        if leaving:
            entries = [entry for _, entry in leaving]
            arrived = self._copies.copy_out(
                [block for block, _ in leaving], [entry.place for entry in entries]
            )
            self._copying.append((arrived, entries))
            self._count["demoted_blocks"] += len(entries)

    # Blocks that are loaded

    def plan(
        self, root: bytes, hashes: Sequence[bytes], packed: bytes, cached: int, limit: int
    ) -> ColdLoad | None:
        """The best load for a chain of which the device has `cached` blocks.

        None if no tier has more of the first `limit` blocks, or if computing is estimated to be
        faster. The entries of a load are pinned: `start` or `drop` it.
        """
        if self.host.get(hashes[cached]) is None and self.disk.get(hashes[cached]) is None:
            return None
        size = self._block_bytes
        in_host = self.host.match(root, hashes, packed, size, limit)
        on_disk = self.disk.match(root, hashes, packed, size, limit)
        middle = max(cached, len(in_host))
        best: ColdLoad | None = None
        most = 0.0
        queued_s = sum(load.estimate_s for load, _ in self._loading)
        for end in (middle, max(middle, len(on_disk))):
            load_s = self.host_speed.seconds(middle - cached) + self.disk_speed.seconds(
                end - middle
            )
            saved_s = self._compute_s(cached, end) - load_s - queued_s
            if saved_s > most:
                entries = in_host[cached:middle] + on_disk[middle:end]
                best, most = ColdLoad(cached, entries, middle - cached, load_s), saved_s
        if best is not None:
            self._pin(best, self.disk)
        elif max(middle, len(on_disk)) > cached:
            self._count["declined_loads"] += 1
        return best

    def drop(self, load: ColdLoad) -> None:
        """Cancel a planned load."""
        self._unpin(load, self.disk)

    def start(self, load: ColdLoad, blocks: list[int]) -> None:
        """Start a load into these device blocks, which nothing else may use until `take_loaded`."""
        self.copy_out()  # some of them may have been evicted for this load
        load.blocks = blocks
        folder = self._folder
        from_disk = load.entries[load.from_host :]
        headers = [] if folder is None else [_header(folder, entry) for entry in from_disk]
        load.future = self._loader.submit(
            run_load, self._copies, self._clock, self._copies.fence(), load, folder, headers
        )
        self._loading.append((load, self.disk))

    @property
    def loads(self) -> int:
        """Loads in progress."""
        return len(self._loading)

    @property
    def pending(self) -> int:
        """Jobs in progress: copies, writes and loads."""
        return len(self._copying) + len(self._writing) + len(self._loading)

    def take_loaded(self, now: float) -> list[ColdLoad]:
        """Process the results of the I/O threads; returns the loads that have ended."""
        self._take_copied()
        self._take_written()
        ended = []
        while self._loading:
            load, disk = self._loading[0]
            if load.future is None or not load.future.done():
                break
            self._loading.popleft()
            self._end_load(load, disk, load.future.result(), now)
            ended.append(load)
        return ended

    def loaded_block(self, load: ColdLoad, index: int, block: int) -> None:
        """Record that block `index` of an ended load is cached as this device block."""
        entry = load.entries[index]
        if index < load.from_host and entry.alive:
            self._twins[block] = entry

    def on_disk(self, block_hash: bytes) -> bool:
        """Whether the disk tier holds the complete block."""
        entry = self.disk.get(block_hash)
        return entry is not None and entry.ready

    def end_writing(self) -> None:
        """Cancel queued writes, finish the current file, remove flushed and evicted files, and
        write nothing any more."""
        for job, *_ in reversed(self._writing):  # the writer continues: no block without its parent
            job.cancel()
        self._writer.shutdown()  # waits
        for job, _, twin, disk in self._writing:
            if twin.alive and not job.cancelled() and job.exception() is None:
                disk.set_ready(twin)

    def keep_on_disk(self, hashes: Sequence[bytes], now: float) -> None:
        """Mark those of these blocks that are on disk as just used, at `now`."""
        self.disk.touch([entry for entry in map(self.disk.get, hashes) if entry is not None], now)

    def note_use(self, hashes: Sequence[bytes]) -> None:
        """Mark blocks on disk as just used, in this order."""
        if self._folder is not None:
            for block_hash in hashes:
                self._folder.note_use(block_hash)

    def forget(self, *, files: bool) -> None:
        """Drop all blocks; with `files` also those on disk. Jobs in progress run to their end.

        Called when the device's cache is flushed: none of its blocks has a twin any more.
        """
        leaving, self._leaving = self._leaving, []
        self._twins.clear()
        self.host.clear()
        for _, entry in leaving:
            self.host.unpin(entry)
        if files:
            self.disk.clear()

    def forget_blocks(self, hashes: Sequence[bytes]) -> None:
        """Drop these blocks and all that continue them, also on disk."""
        for tier in (self.host, self.disk):
            for block_hash in hashes:
                entry = tier.get(block_hash)
                if entry is not None:
                    tier.remove(entry)

    # Reporting

    def report(self) -> ColdReport:
        """The change since the last report, and the current state."""
        host_stored, host_gone = self.host.take_changes()
        disk_stored, disk_gone = self.disk.take_changes()
        return ColdReport(
            cpu_stored=b"".join(host_stored),
            cpu_evicted=b"".join(host_gone),
            disk_stored=b"".join(disk_stored),
            disk_evicted=b"".join(disk_gone),
            cpu_blocks=len(self.host),
            disk_blocks=len(self.disk),
            cpu_s_per_token=_rounded(self.host_speed.s_per_block / self._block_size),
            disk_s_per_token=_rounded(self.disk_speed.s_per_block / self._block_size),
        )

    def stats(self) -> TierStats:
        """Counts since the engine started, and occupancy now."""
        count = self._count
        count["cpu_blocks"], count["disk_blocks"] = len(self.host), len(self.disk)
        count["cpu_capacity_blocks"] = self.host.capacity
        count["disk_capacity_blocks"] = self.disk.capacity
        count["cpu_evictions"], count["disk_evictions"] = self.host.evicted, self.disk.evicted
        count["tier_collisions"] = self.host.collisions + self.disk.collisions
        return TierStats(**count)

    def check(self) -> None:
        """Raises InvariantError if a tier's bookkeeping is inconsistent. O(tiers)."""
        self.host.check()
        self.disk.check()

    # Inner workings

    def _compute_s(self, first_block: int, end_block: int) -> float:
        start, end = first_block * self._block_size, end_block * self._block_size
        return self._s_per_token * (end - start) + self._s_per_pair * prefill_pairs(start, end)

    def _take_copied(self) -> None:
        while self._copying and self._copying[0][0]():
            _, entries = self._copying.popleft()
            for entry in entries:
                if entry.alive:
                    self.host.set_ready(entry)
            for entry in entries:
                if entry.alive:
                    self._write_through(entry)
                self.host.unpin(entry)

    def _write_through(self, entry: Entry) -> None:
        """Queue this block for disk, after those before it that the disk lacks."""
        folder = self._folder
        if folder is None:
            return
        path = []
        above: Entry | None = entry
        while above is not None and not (above.twin is not None and above.twin.alive):
            path.append(above)
            above = above.parent
        parent = above.twin if above is not None else None
        for source in reversed(path):
            twin = self.disk.get(source.block_hash)
            if twin is None:
                twin = self.disk.add(source.block_hash, parent, source.content, source.last_used)
                if twin is None:
                    self._count["refused_blocks"] += 1
                    return
                self.host.pin(source)
                body = self._copies.host_bytes(source.place)
                job = self._writer.submit(folder.write, _header(folder, twin), body)
                self._writing.append((job, source, twin, self.disk))
            elif twin.parent is not parent or twin.content != source.content:
                self.disk.collisions += 1
                return
            source.twin = parent = twin
        if parent is not None:
            self.disk.touch((parent,), entry.last_used)

    def _take_written(self) -> None:
        while self._writing and self._writing[0][0].done():
            job, source, twin, disk = self._writing.popleft()
            error = job.exception()
            if error is not None:
                if not self._writes_fail:
                    log.warning("cannot write blocks to disk, still trying: %s", error)
                self._writes_fail = True
                self._count["failed_writes"] += 1
                if twin.alive:
                    disk.remove(twin)
            else:
                self._writes_fail = False
                self._count["written_blocks"] += 1
                self._count["written_bytes"] += self._copies.block_bytes
                if twin.alive:
                    disk.set_ready(twin)
            self.host.unpin(source)
            disk.unpin(twin)

    def _end_load(self, load: ColdLoad, disk: ChainSet, loaded: Loaded, now: float) -> None:
        load.whole = loaded.blocks
        count = self._count
        count["loads"] += 1
        of_host = min(load.from_host, load.whole)
        count["cpu_loaded_blocks"] += of_host
        count["disk_loaded_blocks"] += load.whole - of_host
        count["loaded_bytes"] += load.whole * self._copies.block_bytes
        self.host_speed.observe(of_host, loaded.host_s)
        self.disk_speed.observe(load.whole - of_host, loaded.disk_s)
        self._unpin(load, disk)
        if loaded.problem:
            log.warning("a block could not be loaded and is computed instead: %s", loaded.problem)
            count["failed_loads"] += 1
            bad = load.entries[load.whole]
            if bad.alive:
                (self.host if load.whole < load.from_host else disk).remove(bad)
        self.host.touch([e for e in load.entries[:of_host] if e.alive], now)
        disk.touch([e for e in load.entries[load.from_host : load.whole] if e.alive], now)

    def _pin(self, load: ColdLoad, disk: ChainSet) -> None:
        for index, entry in enumerate(load.entries):
            (self.host if index < load.from_host else disk).pin(entry)

    def _unpin(self, load: ColdLoad, disk: ChainSet) -> None:
        for index, entry in enumerate(load.entries):
            (self.host if index < load.from_host else disk).unpin(entry)

    def _remove(self, folder: DiskFolder, block_hash: bytes) -> None:
        self._writer.submit(folder.remove, block_hash)  # after the queued writes


def _header(folder: DiskFolder, entry: Entry) -> Header:
    parent = entry.parent.block_hash if entry.parent is not None else b""
    return folder.header(entry.block_hash, parent, entry.content)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
