"""Our prefix index and Dynamo's radix tree (through its Python binding) on the same chains."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from router.prefix_index import PrefixIndex

WORKERS, CONVERSATIONS, BLOCKS = 64, 200, 512
ASKED = 600


class Lookups(NamedTuple):
    """Median microseconds of one look-up; `theirs` None where the peer does not run."""

    ours_us: float
    theirs_us: float | None
    trouble: str


def compare(peers_python: str) -> Lookups:
    """64 workers, conversations of 512 blocks below one system prompt, each held by one to three
    workers to some depth."""
    rng = random.Random(1)
    system = [rng.getrandbits(63) for _ in range(32)]
    held: list[tuple[int, list[int]]] = []
    asked = []
    for _ in range(CONVERSATIONS):
        chain = system + [rng.getrandbits(63) for _ in range(BLOCKS - len(system))]
        asked.append(chain)
        holders = rng.sample(range(WORKERS), rng.randint(1, 3))
        held += [(worker, chain[: rng.randint(len(system), BLOCKS)]) for worker in holders]
    prompts = rng.choices(asked, k=ASKED)
    depths, ours_s = _ours(held, prompts)
    done = subprocess.run(
        [peers_python, str(Path(__file__).with_name("radix_peer.py"))],
        input=json.dumps({"held": held, "asked": prompts}),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Lookups(1e6 * ours_s, None, last)
    answer = json.loads(done.stdout)
    if answer["depths"] != depths:
        return Lookups(1e6 * ours_s, None, f"other depths: {answer['depths']}, not {depths}")
    return Lookups(1e6 * ours_s, 1e6 * statistics.median(answer["times_s"]), "")


def _ours(held: list[tuple[int, list[int]]], prompts: list[list[int]]) -> tuple[list[int], float]:
    """Depths that are not 0 for the first prompt, and the median seconds."""
    index = PrefixIndex()
    for worker, blocks in held:
        index.store(worker, list(map(_block, blocks)))
    everybody = (1 << WORKERS) - 1
    times_s, first = [], []
    for prompt in prompts:
        chain = list(map(_block, prompt))  # new objects, as those of a prompt just hashed
        began = time.perf_counter()
        depths = index.depths(chain, everybody, WORKERS)
        times_s.append(time.perf_counter() - began)
        first = first or sorted(depth for depth in depths.tolist() if depth)
    return first, statistics.median(times_s)


def _block(number: int) -> bytes:
    return number.to_bytes(16, "little")
