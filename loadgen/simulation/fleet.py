"""A gateway and its workers in virtual time: requests in, outcomes out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

import msgspec
import numpy as np

from cluster.blocks import join_hashes
from cluster.protocol import RequestError, Sampling, WorkerCard
from cluster.settings import GatewaySettings
from loadgen.admin import Explanation
from loadgen.observer import LoadSample
from loadgen.outcomes import Outcome
from loadgen.simulation.events import Clock
from loadgen.simulation.prompts import Asked, simulated_namespace
from loadgen.simulation.reporting import Pace, Reporter
from loadgen.simulation.worker import SimulatedWorker
from loadgen.slowest import Slowest
from router.admission import Admission, Ticket, Told
from router.dispatch import Dispatcher, Placement
from router.fleet import Fleet
from router.metrics import Metrics
from router.policies import Policy
from router.recent_decisions import RecentDecisions
from router.tokenization import Prompt
from worker.emulated_profiles import Profile
from worker.engine_config import EngineConfig
from worker.messages import EngineRequest, EngineStats, Output

MODEL = "simulated"
EPOCH = 1
GATEWAY = GatewaySettings()


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """What a request's way takes beside the engine; seconds.

    to_gateway_s   from the client to the decision: transport, parsing, tokenising
    to_worker_s    from the decision to the engine's queue
    to_client_s    from the engine back to the client
    """

    to_gateway_s: float = 0.0
    to_worker_s: float = 0.0
    to_client_s: float = 0.0


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet of equal workers.

    kv_tokens        tokens that a worker's KV pool holds; 0 takes the profile's
    queue            requests that may wait at the gateway until a worker has room (`gateway.queue`)
    queue_timeout_s  longest wait there, then the request fails (`gateway.queue_timeout_s`)
    max_wait_s       longest expected wait of a request (`gateway.max_wait_s`); 0: no limit
    The others are as in the settings of worker and bus.
    """

    workers: int
    profile: Profile
    profile_name: str
    kv_tokens: int = 0
    block_size: int = 16
    max_batch_size: int = 256
    token_budget: int = 8192
    chunk_tokens: int = 0
    max_waiting: int = 1024
    eviction: str = "lru"
    cache_share: float = 1.0
    queue: int = 0
    queue_timeout_s: float = GATEWAY.queue_timeout_s
    max_wait_s: float = 0.0
    pace: Pace = Pace()
    latency: Latency = Latency()

    @property
    def capacity_blocks(self) -> int:
        """KV blocks of a worker."""
        return (self.kv_tokens or self.profile.kv_tokens) // self.block_size

    def engine(self) -> EngineConfig:
        """Sizes of a worker's engine. Raises ValueError where they cannot work."""
        return EngineConfig(
            block_size=self.block_size,
            capacity_blocks=self.capacity_blocks,
            context_tokens=self.profile.context_tokens,
            max_batch_size=self.max_batch_size,
            token_budget=self.token_budget,
            chunk_tokens=self.chunk_tokens,
            max_waiting=self.max_waiting,
            cache_share=self.cache_share,
        )


class _InFlight:
    """A request that has arrived. `steps` are runs [first, end) of its worker's steps that gave it
    a token each."""

    __slots__ = ("asked", "outcome", "steps", "ticket")

    def __init__(self, asked: Asked, outcome: Outcome, ticket: Ticket) -> None:
        self.asked = asked
        self.outcome = outcome
        self.ticket = ticket
        self.steps: list[list[int]] = []


class SimulatedFleet:
    """One run over some requests: made for one `replay`, with a policy that is fresh as well."""

    def __init__(self, options: FleetOptions, policy: Policy, seed: int) -> None:
        self._options = options
        self._clock = clock = Clock()
        self.router = Fleet(clock=lambda: clock.now)
        self._dispatcher = Dispatcher(
            self.router,
            policy,
            Metrics(self.router, _no_bus),
            random.Random(f"simulate/{seed}"),
            recent=RecentDecisions(most=0),  # in flight only
            holds_back=options.queue > 0,
        )
        self._admission = Admission(
            self._dispatcher, clock, options.queue, options.queue_timeout_s, options.max_wait_s
        )
        self._namespace = simulated_namespace(options.block_size)
        self._root = self._namespace.root()
        self._flights: dict[str, _InFlight] = {}
        self._on_ended: Callable[[Outcome], None] = _ignore
        self._slowest: Slowest | None = None
        self._explanations: dict[str, Explanation] = {}
        self._open = 0
        self.workers = {
            (card := self._card(number)).worker: self._worker(card)
            for number in range(options.workers)
        }

    def replay(
        self,
        asked: Sequence[Asked],
        arm: str,
        on_ended: Callable[[Outcome], None] | None = None,
    ) -> list[Outcome]:
        """Outcomes of the requests, in their order. `on_ended` may take of an outcome what it
        needs before it is kept."""
        self._on_ended = on_ended or _ignore
        to_gateway_s = self._options.latency.to_gateway_s
        outcomes = []
        for request in asked:
            trace = request.trace
            outcome = Outcome(
                arm=arm,
                id=request.id,
                session=trace.session,
                turn=trace.turn,
                group=trace.kind,
                intended_s=request.arrival_s,
                sent_s=request.arrival_s,
            )
            outcomes.append(outcome)
            self._clock.at(request.arrival_s + to_gateway_s, self._arrive, request, outcome)
        self._open = len(asked)
        self._clock.run()
        return outcomes

    def sample_load(self, interval_s: float) -> list[LoadSample]:
        """A list that fills while requests are replayed: every worker's load, as the router
        believes it, each `interval_s`; 0 samples nothing."""
        samples: list[LoadSample] = []
        if interval_s > 0:
            self._clock.at(0.0, self._sample, interval_s, samples)
        return samples

    def _sample(self, interval_s: float, samples: list[LoadSample]) -> None:
        block_size, now = self._options.block_size, self._clock.now
        for member in self.router.members():
            load = self.router.load_of(member)
            samples.append(
                LoadSample(
                    at_s=now,
                    worker=member.card.worker,
                    pending_prefill_tokens=load.pending_prefill_tokens,
                    running=load.running,
                    waiting=load.waiting,
                    cached_tokens=self.router.index.count(member.slot) * block_size,
                )
            )
        if self._open:
            self._clock.at(now + interval_s, self._sample, interval_s, samples)

    def explain_slowest(self) -> dict[str, Explanation]:
        """A dictionary that fills while requests are replayed: the decisions on the slowest."""
        self._slowest = Slowest()
        return self._explanations

    def stats(self) -> dict[str, EngineStats]:
        """Each worker's counts."""
        return {name: worker.core.stats() for name, worker in self.workers.items()}

    def check(self) -> None:
        """Raises where router or engines contradict themselves."""
        self.router.check()
        for worker in self.workers.values():
            worker.core.check()

    # The gateway

    def _arrive(self, asked: Asked, outcome: Outcome) -> None:
        if self._slowest is not None:
            self._dispatcher.recent.want(asked.id, "completion")
        flight = _InFlight(asked, outcome, self._admission.ticket(MODEL, asked.id))
        prompt = Prompt(asked.packed(), asked.chain, self._namespace)
        flight.ticket.place(prompt, partial(self._told, flight, prompt))

    def _told(self, flight: _InFlight, prompt: Prompt, told: Told) -> None:
        assert told is not None, "workers never leave a simulation"
        if isinstance(told, RequestError):
            self._fail(flight, told)
        else:
            self._send(flight, prompt, told)

    def _send(self, flight: _InFlight, prompt: Prompt, placement: Placement) -> None:
        asked, outcome = flight.asked, flight.outcome
        outcome.worker, outcome.policy = placement.worker, placement.policy
        outcome.predicted_hit_tokens = placement.predicted_hit_tokens
        self._flights[asked.id] = flight
        request = EngineRequest(
            request_id=asked.id,
            token_ids=prompt.token_ids,
            namespace_root=self._root,
            sampling=Sampling(max_tokens=asked.trace.output_tokens, seed=0, ignore_eos=True),
            block_hashes=join_hashes(asked.chain),
            request_type=asked.trace.kind,
            turn=asked.trace.turn + 1,
        )
        arrives_s = self._clock.now + self._options.latency.to_worker_s
        self._clock.at(arrives_s, self.workers[placement.worker].receive, request)

    # What workers tell

    def _token(self, request_id: str, step: int, count: int) -> None:
        steps = self._flights[request_id].steps
        if steps and steps[-1][1] == step:
            steps[-1][1] += count
        else:
            steps.append([step, step + count])

    def _end(self, output: Output) -> None:
        flight = self._flights.pop(output.request_id)
        outcome = flight.outcome
        back_s = self._options.latency.to_client_s
        ends = self.workers[outcome.worker].ends_s
        tokens_s = np.concatenate([np.asarray(ends[first:end]) for first, end in flight.steps])
        outcome.status, outcome.http_status = "ok", 200
        outcome.finish_reason = output.finish_reason
        outcome.first_token_s = float(tokens_s[0]) + back_s
        outcome.end_s = float(tokens_s[-1]) + back_s
        outcome.prompt_tokens = flight.asked.trace.prompt_tokens
        outcome.cached_tokens = outcome.hit_tokens = output.hit_tokens
        outcome.completion_tokens = len(tokens_s)
        outcome.itl_ms = (np.diff(tokens_s) * 1e3).tolist()
        self._ended(outcome)
        self._clock.at(self._clock.now + back_s, flight.ticket.close)

    def _refused(self, request_id: str, error: RequestError) -> None:
        self._fail(self._flights.pop(request_id), error)

    def _fail(self, flight: _InFlight, error: RequestError) -> None:
        outcome = flight.outcome
        outcome.status, outcome.http_status, outcome.error = "failed", error.status, error.message
        outcome.end_s = self._clock.now + self._options.latency.to_client_s
        self._ended(outcome)
        flight.ticket.close()

    def _ended(self, outcome: Outcome) -> None:
        self._open -= 1
        if self._slowest is not None:
            self._explain(outcome, self._slowest)
        self._on_ended(outcome)

    def _explain(self, outcome: Outcome, slowest: Slowest) -> None:
        recent, known = self._dispatcher.recent, self._explanations
        if slowest.add(outcome):
            kept = recent.find(outcome.id)
            if kept is not None:
                known[outcome.id] = msgspec.json.decode(kept, type=Explanation)
            for passed in known.keys() - {one.id for one in slowest}:
                del known[passed]

    # Set-up

    def _card(self, number: int) -> WorkerCard:
        options = self._options
        return WorkerCard(
            worker=worker_name(number),
            epoch=EPOCH,
            address=f"simulated:{number}",
            model=MODEL,
            namespace=self._namespace,
            namespace_check="",
            capacity_blocks=options.capacity_blocks,
            context_tokens=options.profile.context_tokens,
            max_batch_size=options.max_batch_size,
            token_budget=options.token_budget,
            device=f"simulated:{options.profile_name}",
            state="ready",
        )

    def _worker(self, card: WorkerCard) -> SimulatedWorker:
        options = self._options
        self.router.on_card(card)
        slot = self.router.members()[-1].slot  # names are in order
        return SimulatedWorker(
            self._clock,
            options.engine(),
            options.profile.cost,
            options.eviction,
            Reporter(self._clock, self.router, slot, card, options.pace),
            self._token,
            self._end,
            self._refused,
        )


def worker_name(number: int) -> str:
    """Of the worker with that number."""
    return f"w{number:03d}"


def _no_bus() -> NoReturn:
    raise NotImplementedError("nobody scrapes a simulation")


def _ignore(outcome: Outcome) -> None:
    return None
