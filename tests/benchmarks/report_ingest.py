"""How many block events a second one core takes in: decode the report, change index and load."""

from __future__ import annotations

import random
import time

import msgspec

from cluster.blocks import join_hashes
from cluster.protocol import Load, Report
from router.fleet import Fleet
from tests.benchmarks.routing import fleet_of, fresh_blocks

BAR_EVENTS_S = 600_000
WORKERS = 64
BLOCKS_A_REPORT = 32
"""What a worker stores in 20 ms at 25,000 prompt tokens a second."""

ROUNDS = 5
"""The quickest round counts: whatever else the machine does only ever adds time."""


def run() -> int:
    """Reports of stored and evicted blocks into an index of a million blocks."""
    rng = random.Random(1)
    fleet, _ = fleet_of(WORKERS, 100, 512, rng)
    rounds = [measure(fleet, rng, sequence) for sequence in range(ROUNDS)]
    rates, cpu_rates = zip(*rounds, strict=True)
    print("block events a second, by round:", ", ".join(f"{rate:.0f}" for rate in rates))
    print("and a second of CPU time:", ", ".join(f"{rate:.0f}" for rate in cpu_rates))
    best = max(rates)
    print(f"report_ingest: {best:.0f} events/s (bar {BAR_EVENTS_S})")
    return int(best < BAR_EVENTS_S)


def measure(fleet: Fleet, rng: random.Random, round_number: int) -> tuple[float, float]:
    """Events a second, and a second of CPU time.

    Each worker caches new blocks, a third of them known elsewhere, and evicts as many.
    """
    encoded = []
    events = 0
    for worker in range(WORKERS):
        own = list(fleet.index.blocks_of(worker))
        common = fresh_blocks(BLOCKS_A_REPORT)
        for number in range(60):
            stored = fresh_blocks(BLOCKS_A_REPORT * 2 // 3) + common[: BLOCKS_A_REPORT // 3]
            evicted = own[number * len(stored) : (number + 1) * len(stored)]
            events += len(stored) + len(evicted)
            encoded.append(
                msgspec.msgpack.encode(
                    Report(
                        worker=f"w{worker:04}",
                        epoch=1,
                        sequence=number,
                        load=Load(running=number, free_blocks=1000),
                        stored=join_hashes(stored),
                        evicted=join_hashes(evicted),
                        received=[f"request-{round_number}-{number}"],
                    )
                )
            )
    rng.shuffle(encoded)
    decode = msgspec.msgpack.Decoder(Report).decode
    cpu_began, began = time.thread_time(), time.perf_counter()
    for raw in encoded:
        fleet.on_report(decode(raw))
    return events / (time.perf_counter() - began), events / (time.thread_time() - cpu_began)
