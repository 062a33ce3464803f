"""What the decode benchmarks share: prompts, our engine's arm, taking turns step by step.

The engines alternate within a run: one step of ours, one of theirs, and so on. Whatever else the
machine does then meets both alike, and each pair of steps gives a ratio.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cluster.blocks import pack_tokens
from cluster.protocol import Sampling
from cluster.settings import WorkerSettings
from worker.build import build_engine
from worker.engine import EngineCore
from worker.messages import EngineRequest

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 33
BATCH_SIZES = (1, 4, 8, 16)
ROOT = bytes(32)


class Run(NamedTuple):
    """One batch. `step_s[0]` is the prefill: until every sequence had its first token."""

    step_s: list[float]
    tokens: list[list[int]]

    @property
    def prefill_s(self) -> float:
        return self.step_s[0]

    @property
    def decode_s(self) -> float:
        """Median time between tokens after the first."""
        return statistics.median(self.step_s[1:])


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


def steps_of_ours(core: EngineCore, batch: list[list[int]], outputs: int) -> Iterator[Run]:
    """Runs a batch through the whole engine: scheduler, prefix cache, runner, sampler.

    Yields the run so far whenever every sequence has got one token more.
    """
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
    step_s: list[float] = []
    for count in range(1, outputs + 1):
        start = time.perf_counter()
        while min(len(sequence) for sequence in tokens.values()) < count:
            for output in core.step():
                if output.finish_reason == "error":
                    raise RuntimeError(output.error)
                tokens[output.request_id] += output.token_ids
        step_s.append(time.perf_counter() - start)
        yield Run(step_s, list(tokens.values()))
    core.flush()
    core.take_changes()


class Turns:
    """Lets a function that cannot be paused, but calls back after every step, take turns.

    `body(on_step)` runs in a thread of its own and calls `on_step` after every step; it stands
    still between that and the next `step()`.
    """

    def __init__(self, body: Callable[[Callable[[], None]], list[list[int]]]) -> None:
        self._go = threading.Semaphore(0)
        self._done = threading.Semaphore(0)
        self._step_s: list[float] = []
        self._start = 0.0
        self._error: BaseException | None = None
        self._tokens: list[list[int]] = []
        self._thread = threading.Thread(target=self._run, args=(body,))
        self._thread.start()

    def _run(self, body: Callable[[Callable[[], None]], list[list[int]]]) -> None:
        self._go.acquire()
        self._start = time.perf_counter()
        try:
            self._tokens = body(self._on_step)
        except BaseException as error:
            self._error = error
        self._done.release()

    def _on_step(self) -> None:
        self._step_s.append(time.perf_counter() - self._start)
        self._done.release()
        self._go.acquire()
        self._start = time.perf_counter()

    def step(self) -> None:
        """Let it make one step, and wait for its end."""
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def finish(self) -> Run:
        """Let it run to its end."""
        self._go.release()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return Run(self._step_s, self._tokens)


def in_turns(
    core: EngineCore,
    batch: list[list[int]],
    theirs: Callable[[Callable[[], None]], list[list[int]]],
    outputs: int = OUTPUT_TOKENS,
) -> tuple[Run, Run]:
    """Both engines on one batch, step by step: (ours, theirs)."""
    turns = Turns(theirs)
    ours = Run([], [])
    for run in steps_of_ours(core, batch, outputs):
        ours = run
        turns.step()
    return ours, turns.finish()


def ratio(ours: Run, theirs: Run) -> float:
    """Median over the pairs of decode steps of their time over ours."""
    pairs = zip(theirs.step_s[1:], ours.step_s[1:], strict=True)
    return statistics.median(their_s / our_s for their_s, our_s in pairs)


def agreement(ours: Run, theirs: Run) -> str:
    """How many sequences got the same tokens."""
    same = sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True))
    return f"{same} of {len(ours.tokens)} sequences with identical tokens"
