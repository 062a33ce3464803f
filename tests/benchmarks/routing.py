"""A fleet with an index like that of a busy pool, and prompts that ask for it.

Every worker holds the same system prompt. Tenants share a longer prefix on an eighth of the
workers. Conversations go on below it: each is held by one to three workers, by each of them to
another depth. The rest of the million blocks are conversations of a medium length.
"""

from __future__ import annotations

import os
import random

from cluster.blocks import Namespace, join_hashes
from cluster.protocol import Load, Report, WorkerCard
from router.fleet import Fleet

BLOCK_SIZE = 16
INDEXED_BLOCKS = 1_000_000
NAMESPACE = Namespace(
    weights="w", tokenizer="t", kv_dtype="bfloat16", block_size=BLOCK_SIZE, positions="rope:1"
)


def fresh_blocks(count: int) -> list[bytes]:
    """Hashes that nobody has seen; as good as SHA-256's for look-ups."""
    raw = os.urandom(16 * count)
    return [raw[i : i + 16] for i in range(0, len(raw), 16)]


def fleet_of(workers: int, conversations: int, blocks: int, rng: random.Random):
    """A fleet, and the chains that its conversations will ask for next (`blocks` long)."""
    fleet = Fleet()
    for worker in range(workers):
        fleet.on_card(
            WorkerCard(
                worker=f"w{worker:04}",
                epoch=1,
                address=f"http://w{worker}.invalid:1",
                model="m",
                namespace=NAMESPACE,
                namespace_check=NAMESPACE.check(),
                capacity_blocks=1_000_000,
                context_tokens=10**6,
                max_batch_size=256,
                token_budget=8192,
                device="none",
                state="ready",
            )
        )
    holds: dict[int, list[list[bytes]]] = {worker: [] for worker in range(workers)}
    system = fresh_blocks(32)
    tenants = [(system + fresh_blocks(blocks // 8)) for _ in range(8)]
    for tenant, chain in enumerate(tenants):
        for worker in range(workers):
            holds[worker].append(chain if worker % 8 == tenant else system)
    chains = []
    for _ in range(conversations):
        tenant = rng.choice(tenants)
        chain = tenant + fresh_blocks(blocks - len(tenant))
        chains.append(chain)
        for worker in rng.sample(range(workers), rng.randint(1, 3)):
            holds[worker].append(chain[: rng.randint(len(tenant), blocks)])
    other = len({block for held in holds.values() for chain in held for block in chain})
    while other < INDEXED_BLOCKS:
        filler = rng.choice(tenants) + fresh_blocks(256)
        holds[rng.randrange(workers)].append(filler)
        other += 256
    for worker, held in holds.items():
        stored = list(dict.fromkeys(block for chain in held for block in chain))
        load = Load(
            pending_prefill_tokens=rng.randrange(8000),
            running=rng.randrange(40),
            waiting=rng.randrange(3),
            free_blocks=900_000,
            cached_blocks=len(stored),
        )
        fleet.on_report(
            Report(
                worker=f"w{worker:04}", epoch=1, sequence=1, load=load, stored=join_hashes(stored)
            )
        )
    return fleet, chains
