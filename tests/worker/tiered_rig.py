"""An engine core with cold tiers over a `RecordingRunner`; the test decides when I/O happens.

Copies and files are kept in memory, but the index, the loads and the core are the real ones, and
the runner checks every slot that it reads: a block that came back with other KV cannot go unseen.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Executor, Future

import msgspec

from tests.worker.recording_runner import RecordingRunner, Rig
from worker.tiers.block_file import BadBlockFile, Header
from worker.tiers.cold_tiers import ColdTiers
from worker.tiers.disk_folder import Found


class ByHand(Executor):
    """Runs its jobs in order, when told."""

    def __init__(self) -> None:
        self.jobs: deque = deque()

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        self.jobs.append((future, fn, args))
        return future

    def shutdown(self, wait=True, *, cancel_futures=False) -> None:
        assert wait
        assert not cancel_futures
        self.run()

    def run(self, count: int = 1 << 30) -> None:
        while self.jobs and count > 0:
            count -= 1
            future, fn, args = self.jobs.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(fn(*args))
            except Exception as error:
                future.set_exception(error)


class RecordedCopies:
    """`KvCopies` of what a RecordingRunner's slots hold. `late` copies arrive at `arrive`."""

    block_bytes = 64

    def __init__(self, runner: RecordingRunner) -> None:
        self._runner = runner
        self.host: dict[int, list] = {}
        self.late: list[dict[int, list]] = []
        self.is_late = False

    def copy_out(self, blocks, places):
        assert len(set(places)) == len(places)
        taken = {p: self._read(b) for b, p in zip(blocks, places, strict=True)}
        assert all(None not in values for values in taken.values()), "a block without KV leaves"
        for place in places:
            self.host.pop(place, None)  # a copy on its way makes what was there unusable
        self.late.append(taken)
        if not self.is_late:
            self.arrive()
        return lambda: all(other is not taken for other in self.late)

    def arrive(self) -> None:
        for taken in self.late:
            self.host.update(taken)
        self.late.clear()

    def fence(self):
        return lambda: None

    def copy_in(self, places, blocks):
        for place, block in zip(places, blocks, strict=True):
            self._write(block, self.host[place])

    def put(self, bodies, blocks):
        for body, block in zip(bodies, blocks, strict=True):
            self._write(block, msgspec.msgpack.decode(body))

    def host_bytes(self, place):
        return place

    def _read(self, block):
        size = self._runner.block_size
        return [self._runner.kv.get((block, offset)) for offset in range(size)]

    def _write(self, block, values):
        for offset, value in enumerate(values):
            self._runner.kv[block, offset] = value


class MemoryFolder:
    """A `DiskFolder` without a disk. `bad` names blocks whose files are broken."""

    unusable = 0

    def __init__(self, copies: RecordedCopies) -> None:
        self._copies = copies
        self.files: dict[bytes, tuple[Header, bytes]] = {}
        self.bad: set[bytes] = set()
        self.full = False

    def header(self, block_hash, parent, content):
        return Header("", "", [], block_hash, parent, content)

    def scan(self):
        return [Found(header, 0) for header, _ in self.files.values()]

    def write(self, header, body):
        if self.full:
            raise OSError("no space left on device")
        kv = msgspec.msgpack.encode(self._copies.host[body])
        self.bad.discard(header.block_hash)
        self.files[header.block_hash] = header, kv

    def read(self, header):
        if header.block_hash in self.bad or header.block_hash not in self.files:
            raise BadBlockFile("broken")
        found, body = self.files[header.block_hash]
        if found != header:
            raise BadBlockFile("another block")
        return body

    def remove(self, block_hash):
        self.files.pop(block_hash, None)

    def note_use(self, block_hash):
        self.files[block_hash] = self.files.pop(block_hash)

    def close(self):
        pass


class TieredRig(Rig):
    """A Rig whose cache has cold tiers. Loading is always estimated to be quicker."""

    def __init__(
        self, *, host_blocks=8, disk_blocks=0, patience=1.0, seed=0, files=None, **overrides
    ) -> None:
        self.files = {} if files is None else files  # of a former life
        self.host_blocks, self.disk_blocks = host_blocks, disk_blocks
        self.rng = random.Random(seed)
        self.patience = patience
        self.loader, self.writer = ByHand(), ByHand()
        self.cold: dict[str, set[bytes]] = {"cpu": set(), "disk": set()}
        super().__init__(**overrides)

    def make_tiers(self) -> ColdTiers:
        size = self.config.block_size
        self.copies = RecordedCopies(self.runner)
        self.folder = MemoryFolder(self.copies) if self.disk_blocks else None
        if self.folder is not None:
            self.folder.files = self.files
        tiers = ColdTiers(
            self.copies,
            block_size=size,
            block_bytes=4 * size,
            host_blocks=self.host_blocks,
            loader=self.loader,
            writer=self.writer,
            clock=lambda: 0.0,
            folder=self.folder,
            disk_blocks=self.disk_blocks,
        )
        tiers.set_prefill_speed(1.0, 0.0)
        return tiers

    def step(self):
        """What is due of the I/O happens before it: all where `patience` is 1."""
        self.copies.is_late = self.rng.random() >= self.patience
        for executor in (self.loader, self.writer):
            if self.rng.random() < self.patience:
                executor.run()
            else:
                executor.run(self.rng.randrange(2))
        if self.rng.random() < self.patience:
            self.copies.arrive()
        return super().step()

    def settle(self) -> None:
        for _ in range(3):  # copies, then writes, then what these bring about
            self.copies.arrive()
            self.loader.run()
            self.writer.run()
            self.core.expire(self.now)
        assert not self.core.tiers.loads

    def publish(self):
        changes = self.core.take_changes()
        cold = changes.cold
        for tier, stored, gone in (
            ("cpu", cold.cpu_stored, cold.cpu_evicted),
            ("disk", cold.disk_stored, cold.disk_evicted),
        ):
            added, dropped = _split(stored), _split(gone)
            assert not added & self.cold[tier]
            assert dropped <= self.cold[tier]
            self.cold[tier] = (self.cold[tier] | added) - dropped
        tiers = self.core.tiers
        assert self.cold["cpu"] == set(tiers.host.hashes())
        assert self.cold["disk"] == set(tiers.disk.hashes())
        assert cold.cpu_blocks == len(self.cold["cpu"])
        assert cold.disk_blocks == len(self.cold["disk"])
        self.received += changes.received
        self.published = (self.published | set(changes.stored)) - set(changes.evicted)
        assert self.published == set(self.core.cached_blocks())
        return self.published


def _split(joined: bytes) -> set[bytes]:
    return {joined[i : i + 16] for i in range(0, len(joined), 16)}
