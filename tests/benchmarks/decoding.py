"""What the decode benchmarks share: prompts, our engine's arm, how a run is timed."""

from __future__ import annotations

import random
import statistics
import time
from typing import NamedTuple

from cluster.blocks import pack_tokens
from cluster.protocol import Sampling
from cluster.settings import WorkerSettings
from worker.build import build_engine
from worker.engine import EngineCore, EngineRequest

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 25
BATCH_SIZES = (1, 4, 8, 16)
ROUNDS = 3
ROOT = bytes(32)


class Timing(NamedTuple):
    """One run of one batch.

    prefill_s  until every sequence had its first token
    step_s     median time between tokens afterwards
    """

    prefill_s: float
    step_s: float
    tokens: list[list[int]]


def prompts(batch_size: int, seed: int) -> list[list[int]]:
    """Random prompts of equal length, so that nobody computes padding."""
    source = random.Random(seed)
    return [
        [source.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(batch_size)
    ]


def our_engine(dtype: str, model: str = "smollm2") -> EngineCore:
    """The engine as a worker has it, one thread, with room for the largest batch."""
    blocks = max(BATCH_SIZES) * -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // 16) + 32
    settings = WorkerSettings(
        model=model, device="cpu", dtype=dtype, threads=1, kv_blocks=blocks, token_budget=2048
    )
    return build_engine(settings)[0]


def time_ours(core: EngineCore, batch: list[list[int]], outputs: int = OUTPUT_TOKENS) -> Timing:
    """Run a batch through the whole engine: scheduler, prefix cache, runner, sampler."""
    sampling = Sampling(max_tokens=outputs, temperature=0.0, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for index, prompt in enumerate(batch):
        tokens[str(index)] = []
        core.add(
            EngineRequest(
                request_id=str(index),
                token_ids=pack_tokens(prompt),
                namespace_root=ROOT,
                sampling=sampling,
            )
        )
    start = time.perf_counter()
    began, last, gaps = 0.0, 0.0, []
    while core.has_work():
        for output in core.step():
            if output.finish_reason == "error":
                raise RuntimeError(output.error)
            tokens[output.request_id] += output.token_ids
        now = time.perf_counter()
        if began:
            gaps.append(now - last)
        elif all(tokens.values()):
            began = now
        last = now
    core.flush()
    core.take_changes()
    return Timing(began - start, statistics.median(gaps), list(tokens.values()))


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> str:
    """How many sequences got the same tokens."""
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    return f"{same} of {len(ours)} sequences identical"
