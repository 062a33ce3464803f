"""Router memory of an indexed (block, worker) pair."""

from __future__ import annotations

import gc
import random
import tracemalloc

from tests.benchmarks.routing import fresh_blocks

BAR_BYTES = 200


def run() -> int:
    """A million pairs; a third of the blocks are held by two or more workers, by up to all."""
    from router.prefix_index import PrefixIndex

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
    print(f"index_memory: {worst:.0f} bytes/pair (bar {BAR_BYTES})")
    return int(worst > BAR_BYTES or bound.pairs > bound.max_pairs or not bound.problem)
