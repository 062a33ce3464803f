"""A steady load on the engine's pure core: many long sequences that decode, end and are replaced.

The runner computes nothing, so what a step costs is the core's: schedule, prefix match, commit, and
what the engine process takes from it afterwards. The thread's CPU time is measured.
"""

from __future__ import annotations

import gc
import random
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.blocks import hash_blocks, join_hashes
from cluster.protocol import Sampling
from worker.batch import BatchItem
from worker.engine import EngineCore
from worker.engine_config import EngineConfig
from worker.messages import EngineRequest

BLOCK = 16
RUNNING = 256
PROMPT = 7680
STEM = 7168
"""Leading tokens that a prompt shares with those of its stem; the rest is its own."""
STEMS = 16
MOST_OUTPUT = 1024
"""Tokens of an answer, so that a sequence has 8,192 tokens on average."""
ROOT = b"r" * 32


class NoRunner:
    """Answers at once: every token is another, so that every full block is a new one."""

    def __init__(self) -> None:
        self.count = 0

    def execute(self, batch: list[BatchItem]) -> list[int | None]:
        self.count += 1
        token = self.count & 0xFFFF
        return [token if item.sample else None for item in batch]


class StepCost(NamedTuple):
    """CPU time of a step in ms: mean, median and 99th percentile; and what happened meanwhile."""

    mean_ms: float
    median_ms: float
    p99_ms: float
    steps: int
    arrivals: int
    hit_tokens: int


class SteadyLoad:
    """256 sequences of about 8k tokens run; each that ends is followed by a new one."""

    def __init__(self, capacity_blocks: int, seed: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        self.draws = random.Random(seed)
        self.core = EngineCore(
            EngineConfig(
                block_size=BLOCK,
                capacity_blocks=capacity_blocks,
                context_tokens=4 * PROMPT,
                max_batch_size=RUNNING,
                token_budget=RUNNING * (PROMPT - STEM),
            ),
            NoRunner(),
        )
        self.stems = [self._tokens(STEM) for _ in range(STEMS)]
        self.served = 0
        self.arrived = 0
        self.now = 0.0

    def fill(self, blocks: int) -> None:
        """Compute so many blocks that nobody will ask for again; the pool keeps the last ones."""
        for _ in range(blocks // (PROMPT // BLOCK)):
            self._add(self._tokens(PROMPT), 1)
            self._step()

    def start(self, in_lockstep: bool = False) -> None:
        """Bring the sequences to different places, as a running engine has them, or all to one."""
        for stem in range(STEMS):
            self._add(self.stems[stem] + self._tokens(BLOCK), 1)
            self._step()
        for number in range(RUNNING):
            answer = 1 + MOST_OUTPUT * (number + 1) // RUNNING
            self._add(self._prompt(), MOST_OUTPUT if in_lockstep else answer)
            if not in_lockstep:
                self._step()

    def measure(self, steps: int) -> StepCost:
        """The cost of so many steps, each with the arrivals that keep 256 running."""
        hit_before, arrived_before = self.core.stats().reused_tokens, self.arrived
        ms = self.costs_ms(steps)
        return StepCost(
            float(ms.mean()),
            float(np.median(ms)),
            float(np.percentile(ms, 99)),
            steps,
            self.arrived - arrived_before,
            self.core.stats().reused_tokens - hit_before,
        )

    def costs_ms(self, steps: int) -> NDArray[np.float64]:
        """CPU time of each of so many steps, taken as in `measure`."""
        costs = []
        waiting = [self._request(self._prompt(), MOST_OUTPUT) for _ in range(steps)]
        gc.collect()
        gc.freeze()
        core = self.core
        for _ in range(steps):
            self.now += 0.02
            begun = time.thread_time_ns()
            missing = RUNNING - core.load().batch
            for _ in range(missing):
                core.add(waiting.pop())
            core.step(self.now)
            core.take_changes()
            core.load()
            costs.append(time.thread_time_ns() - begun)
        gc.unfreeze()
        self.arrived += steps - len(waiting)
        return np.array(costs) / 1e6

    def _prompt(self) -> bytes:
        return self.draws.choice(self.stems) + self._tokens(PROMPT - STEM)

    def _tokens(self, count: int) -> bytes:
        return self.rng.integers(0, 1 << 16, count, dtype=np.uint32).tobytes()

    def _add(self, token_ids: bytes, max_tokens: int) -> None:
        self.core.add(self._request(token_ids, max_tokens))

    def _request(self, token_ids: bytes, max_tokens: int) -> EngineRequest:
        """As the server makes it, with the prompt's hashes."""
        self.served += 1
        return EngineRequest(
            request_id=f"r{self.served}",
            token_ids=token_ids,
            namespace_root=ROOT,
            sampling=Sampling(max_tokens=max_tokens, seed=1, ignore_eos=True),
            block_hashes=join_hashes(hash_blocks(ROOT, token_ids, BLOCK)),
        )

    def _step(self) -> None:
        self.now += 0.02
        self.core.step(self.now)
        self.core.take_changes()
