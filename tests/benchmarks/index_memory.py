"""Router memory of an indexed (block, worker) pair, and for how long growing holds it up."""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable

from router.prefix_index import MAX_PAIRS, SHARDS, PrefixIndex
from tests.benchmarks.routing import fresh_blocks

BAR_BYTES = 200
BLOCKS_A_REPORT = 32


def run() -> int:
    """A million pairs; a third of the blocks are held by two or more workers, by up to all."""
    worst = 0.0
    for workers in (64, 1000):
        rng = random.Random(workers)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        index = PrefixIndex()
        while index.pairs < 1_000_000:
            chain = fresh_blocks(128)
            holders = rng.choice((1, 1, 1, 1, 2, 3))
            for slot in rng.sample(range(workers), holders):
                # each report brings its own copies of the hashes
                index.store(slot, [bytes(bytearray(b)) for b in chain[: rng.randint(32, 128)]])
        system = fresh_blocks(64)
        for slot in range(workers):
            index.store(slot, [bytes(bytearray(block)) for block in system])
        del chain, system
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        each = used / index.pairs
        worst = max(worst, each)
        print(f"{workers} workers: {len(index)} blocks, {index.pairs} pairs, {each:.0f} bytes each")

    bound = PrefixIndex(max_pairs=100_000)
    for slot in range(100):
        bound.store(slot, fresh_blocks(2000))
    bound.check()
    print(f"bounded: {bound.pairs} of 200000 pairs kept; {bound.problem}")
    growing()
    print(f"index_memory: {worst:.0f} bytes/pair (bar {BAR_BYTES})")
    return int(worst > BAR_BYTES or bound.pairs > bound.max_pairs or not bound.problem)


def growing() -> None:
    """The longest that one report's blocks take while an index grows, in CPU time."""
    blocks, workers = 1_500_000, 64
    index, plain, shard = PrefixIndex(), {}, {}
    slots = (number % workers for number in range(blocks))
    spread = longest(lambda chain: index.store(next(slots), chain), blocks)
    whole = longest(lambda chain: plain.update(dict.fromkeys(chain, 1)), blocks)
    full = longest(lambda chain: shard.update(dict.fromkeys(chain, 1)), MAX_PAIRS // SHARDS)
    print(
        f"growing to {blocks} blocks, longest report: {spread * 1e3:.1f} ms, in one dictionary "
        f"{whole * 1e3:.1f} ms ({whole / spread:.0f} times as long); a dictionary of "
        f"{MAX_PAIRS} / {SHARDS} blocks: {full * 1e3:.1f} ms"
    )


def longest(store: Callable[[list[bytes]], None], blocks: int) -> float:
    """Seconds that the slowest call of `store` took, 32 blocks at a time."""
    worst = 0.0
    for _ in range(blocks // BLOCKS_A_REPORT):
        chain = fresh_blocks(BLOCKS_A_REPORT)
        began = time.thread_time()
        store(chain)
        worst = max(worst, time.thread_time() - began)
    return worst
