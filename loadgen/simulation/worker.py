"""One simulated worker: the engine core, stepped in virtual time."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import repeat
from math import ceil, sqrt

import msgspec
import numpy as np

from cluster.protocol import Load, RequestError
from loadgen.simulation.events import Clock
from loadgen.simulation.prompts import OUTPUT_TOKEN
from loadgen.simulation.reporting import Reporter
from worker.batch import BatchItem
from worker.emulated_profiles import CostModel
from worker.engine import EngineCore
from worker.engine_config import EngineConfig
from worker.eviction.registry import parse_eviction
from worker.messages import EngineRequest, Output
from worker.prefill_speed import PrefillSpeed, StepWork


class TimedRunner:
    """Implements `worker.batch.Runner`: notes how long the batch takes, and takes no time."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.seconds = 0.0

    def execute(self, batch: list[BatchItem]) -> list[int | None]:
        """The same token for everybody."""
        self.seconds = self.cost.seconds((item.start, len(item.token_ids)) for item in batch)
        return [OUTPUT_TOKEN if item.sample else None for item in batch]


class SimulatedWorker:
    """The loop of `worker.engine_process` in virtual time: take what has come, step, tell.

    A step's effects are there at its end: the core steps at the begin, but nobody looks at it
    before, and what comes meanwhile waits for the end. Steady steps (`EngineCore.steady_steps`) are
    taken as one run, which a request that comes ends at the next step's end.

    on_token   told (request id, step number, how many) of tokens: the first is that step's, the
               others those of the steps after it
    on_end     told of outputs that end a request
    on_refused told of requests that the engine does not take
    ends_s     when each step ended
    """

    def __init__(
        self,
        clock: Clock,
        config: EngineConfig,
        cost: CostModel,
        eviction: str,
        reporter: Reporter,
        on_token: Callable[[str, int, int], None],
        on_end: Callable[[Output], None],
        on_refused: Callable[[str, RequestError], None],
    ) -> None:
        self.core = EngineCore(config, TimedRunner(cost), make_policy=parse_eviction(eviction))
        self.ends_s = array("d")
        self.busy_s = 0.0
        self._runner: TimedRunner = self.core.runner  # type: ignore[assignment]
        self._clock = clock
        self._reporter = reporter
        self._on_token = on_token
        self._on_end = on_end
        self._on_refused = on_refused
        self._inbox: list[EngineRequest] = []
        self._speed = PrefillSpeed(cost.first_speed(config.chunk_limit))
        self._busy = False
        self._run: _Run | None = None
        self._runs = 0
        reporter.begin(self._load())

    def receive(self, request: EngineRequest) -> None:
        """A request has come."""
        self._inbox.append(request)
        if not self._busy:
            self._next()
        elif self._run is not None:
            self._shorten(self._run)

    def _next(self) -> None:
        """Begin a step, or a run of steady ones; rest where there is no work."""
        core, now = self.core, self._clock.now
        for request in self._inbox:
            try:
                core.add(request)
            except RequestError as error:
                self._on_refused(request.request_id, error)
        self._inbox.clear()
        self._busy = core.has_work()
        if not self._busy:
            return
        steps = core.steady_steps()
        if steps > 1:
            decoding = core.decoding()
            context = sum(computed for _, computed in decoding) + len(decoding)
            first_s, growth_s = self._runner.cost.decode_seconds(len(decoding), context)
            self._run = _Run(now, first_s, growth_s, steps)
            self._runs += 1
            self._clock.at(now + self._run.seconds(steps), self._end_run, self._runs)
            return
        outputs = core.step(now)
        self._clock.at(now + self._runner.seconds, self._end_step, now, outputs)

    def _end_step(self, began_s: float, outputs: list[Output]) -> None:
        now = self._clock.now
        step = len(self.ends_s)
        self.ends_s.append(now)
        self.busy_s += now - began_s
        self._speed.observe(self.core.last_work, began_s, now)
        for output in outputs:
            if output.token_ids:
                self._on_token(output.request_id, step, 1)
            if output.finish_reason:
                self._on_end(output)
        self._tell()
        self._next()

    def _shorten(self, run: _Run) -> None:
        """End the run with the step that is going on now."""
        steps = run.steps_until(self._clock.now)
        if steps < run.steps:
            run.steps = steps
            self._runs += 1
            self._clock.at(run.began_s + run.seconds(steps), self._end_run, self._runs)

    def _end_run(self, number: int) -> None:
        run = self._run
        if run is None or number != self._runs:
            return  # it was ended before
        self._run = None
        first, steps = len(self.ends_s), run.steps
        ends = run.ends_s()
        self.ends_s.extend(ends)
        self.busy_s += ends[-1] - run.began_s
        decoding = self.core.decoding()
        tokens = array("I", [OUTPUT_TOKEN]) * steps
        self.core.advance(
            steps, repeat(tokens, len(decoding)), ends[-2] if steps > 1 else run.began_s
        )
        self._speed.observe(StepWork(0, 0, len(decoding), synced=True), run.began_s, ends[0])
        for request_id, _ in decoding:
            self._on_token(request_id, first, steps)
        self._next()

    def _tell(self) -> None:
        self._reporter.update(self._load(), self.core.take_changes())

    def _load(self) -> Load:
        speed = self._speed.speed
        return msgspec.structs.replace(
            self.core.load(),
            prefill_s_per_token=speed.s_per_token,
            prefill_s_per_pair=speed.s_per_pair,
        )


class _Run:
    """Steps of which each takes `growth_s` longer than the one before."""

    __slots__ = ("began_s", "first_s", "growth_s", "steps")

    def __init__(self, began_s: float, first_s: float, growth_s: float, steps: int) -> None:
        self.began_s = began_s
        self.first_s = first_s
        self.growth_s = growth_s
        self.steps = steps

    def seconds(self, steps: int) -> float:
        """What so many of them take."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_until(self, now: float) -> int:
        """Steps that have begun by `now`: at least 1, at most all."""
        left = now - self.began_s
        if self.growth_s > 1e-12 * self.first_s:
            linear = self.first_s - self.growth_s / 2
            steps = (sqrt(linear * linear + 2 * self.growth_s * left) - linear) / self.growth_s
        else:
            steps = left / self.first_s if self.first_s else float(self.steps)
        whole = min(self.steps, max(1, ceil(steps)))
        # the root is rounded: the step that ends at or after `now` is meant
        while whole > 1 and self.began_s + self.seconds(whole - 1) >= now:
            whole -= 1
        while whole < self.steps and self.began_s + self.seconds(whole) < now:
            whole += 1
        return whole

    def ends_s(self) -> list[float]:
        """When each of them ends."""
        number = np.arange(1, self.steps + 1)
        ends: list[float] = (
            self.began_s + number * self.first_s + self.growth_s * (number * (number - 1) / 2)
        ).tolist()
        return ends
