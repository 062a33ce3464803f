"""Which blocks workers hold in cold tiers, and their worth relative to blocks on the device.

A block in a cold tier counts with a credit of `1 − load_s / compute_s`, both measured at its
worker: 1 if loading is free, 0 if computing is as fast. Each tier is prefix-closed:

    chain   |<- device ->|<- only in host memory ->|<- only on disk ->|
    credit        1            of host memory            of disk
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.blocks import split_hashes
from cluster.protocol import ColdReport, Load
from router.prefix_index import PrefixIndex

IntArray = NDArray[np.int64]


class ColdIndex:
    """Blocks in cold tiers by worker slot, with each worker's credits."""

    def __init__(self, max_pairs: int) -> None:
        self._cpu, self._disk = PrefixIndex(max_pairs), PrefixIndex(max_pairs)
        self._credits: dict[int, tuple[float, float]] = {}

    def __bool__(self) -> bool:
        """Whether any worker has cold tiers."""
        return bool(self._credits)

    def apply(self, slot: int, cold: ColdReport, load: Load) -> bool:
        """Apply a worker's report. False if the index then holds another number of blocks than it
        states."""
        right = True
        for index, stored, evicted, blocks in (
            (self._cpu, cold.cpu_stored, cold.cpu_evicted, cold.cpu_blocks),
            (self._disk, cold.disk_stored, cold.disk_evicted, cold.disk_blocks),
        ):
            if stored or evicted:
                index.evict(slot, split_hashes(evicted))
                index.store(slot, split_hashes(stored))
            right &= index.count(slot) + index.dropped(slot) == blocks
        self._credits[slot] = (
            credit(cold.cpu_s_per_token, load.prefill_s_per_token),
            credit(cold.disk_s_per_token, load.prefill_s_per_token),
        )
        return right

    def replace(self, slot: int, cpu: Sequence[bytes], disk: Sequence[bytes]) -> None:
        """The worker in `slot` holds exactly these in its tiers."""
        self._cpu.replace(slot, cpu)
        self._disk.replace(slot, disk)

    def drop(self, slot: int) -> None:
        """Forget `slot`."""
        self._cpu.drop(slot)
        self._disk.drop(slot)
        self._credits.pop(slot, None)

    def blocks_of(self, slot: int) -> tuple[frozenset[bytes], frozenset[bytes]]:
        """All blocks of `slot` in host memory, and on disk (copies)."""
        return self._cpu.blocks_of(slot), self._disk.blocks_of(slot)

    def ends(
        self, device: IntArray, chain: Sequence[bytes], mask: int, limit: int
    ) -> tuple[IntArray, IntArray]:
        """Leading blocks of each slot `[slots]`: on the device or in host memory, and on any tier.

        device `[slots]`: those on the device. Only the first `limit` blocks of the chain count, and
        the slots in `mask`.
        """
        cpu = np.maximum(device, self._cpu.depths(chain, mask, len(device), limit))
        return cpu, np.maximum(cpu, self._disk.depths(chain, mask, len(device), limit))

    def credited_tokens(
        self, device: IntArray, chain: Sequence[bytes], mask: int, limit: int, block_size: int
    ) -> IntArray:
        """Worth, in tokens, of each slot's blocks beyond those on its device `[slots]`."""
        cpu, disk = self.ends(device, chain, mask, limit)
        tokens = np.zeros(len(device), dtype=np.int64)
        for slot in np.flatnonzero(disk > device).tolist():
            of_cpu, of_disk = self._credits.get(slot, (0.0, 0.0))
            blocks = of_cpu * (cpu[slot] - device[slot]) + of_disk * (disk[slot] - cpu[slot])
            tokens[slot] = int(blocks * block_size)
        return tokens

    def check(self) -> None:
        """Raises IndexCheckError if the two sides of an index disagree."""
        self._cpu.check()
        self._disk.check()


def credit(load_s_per_token: float, prefill_s_per_token: float) -> float:
    """Share of the compute time that loading saves; 0 while either is not measured yet."""
    if load_s_per_token <= 0 or prefill_s_per_token <= 0:
        return 0.0
    return max(0.0, 1.0 - load_s_per_token / prefill_s_per_token)
