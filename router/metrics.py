"""The metrics of a gateway: their definitions, and how they are read at a scrape.

Each number is read from the object that owns it, so it cannot drift.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from cluster.bus_status import BusStatus
from cluster.metric_definition import MetricDefinition, Section, exposition
from router.counts import (
    AnswerCounts,
    AttemptCounts,
    ConnectionCounts,
    DecisionCounts,
    RequestCounts,
)
from router.encoding import EncoderInfo
from router.fleet import Fleet
from router.readiness import disagreeing, index_view
from router.shadow import Shadows

PREFIX = "stemroute_gateway_"

_requests = Section("Requests", PREFIX)
REQUESTS = _requests.counter(
    "stemroute_gateway_requests_total",
    "Answered requests by endpoint and HTTP status. Status 499: the client disconnected. "
    "Endpoint none: no such path or method",
    *("endpoint", "status"),
)
QUEUED_REQUESTS = _requests.gauge(
    "stemroute_gateway_queued_requests",
    "Requests in the admission queue: they wait for a worker that is ready and has room",
)
OVERLOAD_REFUSALS = _requests.counter(
    "stemroute_gateway_overload_refused_requests_total",
    "Requests refused with status 429, by error code. overloaded: the expected wait is too long "
    "(gateway.max_wait_s). no_room: no worker has room, and the admission queue is full or its "
    "time is up. deadline_unreachable: no worker is expected to have the first token in time",
    "code",
)
IN_FLIGHT_REQUESTS = _requests.gauge(
    "stemroute_gateway_in_flight_requests",
    "Requests that have been assigned to a worker and have not ended",
)
FAILED_ATTEMPTS = _requests.counter(
    "stemroute_gateway_failed_attempts_total",
    "Attempts that failed, by reason. connect: no connection to the worker. full: status 429. "
    "unavailable: status 503. failed: another status, or an error in the response. dropped: the "
    "connection ended early. stalled: the worker gave no sign of life. timeout: no response began "
    "in time",
    "reason",
)
MIGRATIONS = _requests.counter(
    "stemroute_gateway_migrations_total",
    "Responses with which another worker went on after one had failed",
)
BROKEN_STREAMS = _requests.counter(
    "stemroute_gateway_broken_streams_total",
    "Streams that ended with an error event: their worker failed, and no other could go on",
)
ENCODER_INFO = _requests.gauge(
    "stemroute_gateway_encoder_info",
    "Always 1: the library that encodes prompts for a tokenizer in use. tokenizers encodes where "
    "fastokens is not exact, and is many times slower",
    *("model", "tokenizer", "library", "version"),
)
TIME_TO_FIRST_BYTE = _requests.histogram(
    "stemroute_gateway_time_to_first_byte_seconds",
    "Time from the arrival of a request to the first byte of the worker's answer",
)

_connections = Section("Connections of clients", PREFIX)
OPEN_CONNECTIONS = _connections.gauge(
    "stemroute_gateway_open_connections", "Open connections of clients"
)
REFUSED_CONNECTIONS = _connections.counter(
    "stemroute_gateway_refused_connections_total",
    "Connections refused because gateway.max_connections were open",
)
STALLED_CONNECTIONS = _connections.counter(
    "stemroute_gateway_stalled_connections_total",
    "Connections closed because the client read nothing of its answer for gateway.write_timeout_s",
)

_routing = Section("Routing", PREFIX)
DECISIONS = _routing.counter(
    "stemroute_gateway_decisions_total",
    "Routing decisions by policy and reason. only: there was one candidate. cold: no worker held "
    "any of the prefix. hit: no worker held more of the prefix than the chosen one. load: another "
    "worker held more, but cost more or was excluded by the policy. guard: the hotspot guard "
    "excluded the holders",
    *("policy", "reason"),
)
DECISION_DURATION = _routing.histogram(
    "stemroute_gateway_decision_duration_seconds",
    "Time to look up hits, score the candidates, choose one and book the request there",
)
PROMPT_TOKENS = _routing.counter(
    "stemroute_gateway_prompt_tokens_total", "Prompt tokens of answered requests"
)
PREDICTED_HIT_TOKENS = _routing.counter(
    "stemroute_gateway_predicted_hit_tokens_total",
    "Prompt tokens that the gateway expected the chosen worker to reuse",
)
HIT_TOKENS = _routing.counter(
    "stemroute_gateway_hit_tokens_total", "Prompt tokens that the chosen worker reused"
)
REGRET_TOKENS = _routing.counter(
    "stemroute_gateway_regret_tokens_total",
    "Prompt tokens that were computed although another worker was expected to hold them: the "
    "price of balance, or of a wrong prediction",
)
OVERESTIMATED_TOKENS = _routing.counter(
    "stemroute_gateway_overestimated_tokens_total",
    "Prompt tokens that the gateway expected the chosen worker to reuse, but that it computed",
)

_workers = Section("Workers, as the gateway sees them", PREFIX)
WORKERS = _workers.gauge(
    "stemroute_gateway_workers",
    "Workers by model and state. State refused: the gateway does not use the worker",
    *("model", "state"),
)
REFUSED_WORKERS = _workers.gauge(
    "stemroute_gateway_refused_workers",
    "Workers that the gateway does not use because they do not match the pool; /ready says why",
)
AVOIDED_WORKERS = _workers.gauge(
    "stemroute_gateway_avoided_workers",
    "Ready workers that get no requests because too many failed there, or because they give no "
    "sign of life; /ready says why",
)
WORKER_PENDING_PREFILL_TOKENS = _workers.gauge(
    "stemroute_gateway_worker_pending_prefill_tokens",
    "Prompt tokens that the worker has not computed yet, cached ones excluded: those in its last "
    "report, and those of requests that this gateway has sent since",
    "worker",
)
WORKER_WAIT = _workers.gauge(
    "stemroute_gateway_worker_wait_seconds",
    "Expected time until a new request would start at the worker; 0 if nothing waits there",
    "worker",
)
WORKER_BATCH_REQUESTS = _workers.gauge(
    "stemroute_gateway_worker_batch_requests",
    "Requests running plus requests waiting at the worker: those in its last report, and those "
    "that this gateway has sent since",
    "worker",
)
WORKER_REPORT_AGE = _workers.gauge(
    "stemroute_gateway_worker_report_age_seconds", "Time since the worker's last report", "worker"
)

_index = Section("Prefix index", PREFIX)
INDEXED_BLOCKS = _index.gauge(
    "stemroute_gateway_indexed_blocks", "Distinct blocks in the prefix index"
)
WORKER_INDEXED_BLOCKS = _index.gauge(
    "stemroute_gateway_worker_indexed_blocks", "Blocks of the worker in the prefix index", "worker"
)
INDEX_DROPPED_BLOCKS = _index.gauge(
    "stemroute_gateway_index_dropped_blocks",
    "Cached blocks that are left out of the prefix index because it is full "
    "(gateway.index_max_pairs), counted once for each worker that holds them",
)
COMING_BLOCKS = _index.gauge(
    "stemroute_gateway_coming_blocks",
    "Distinct blocks that requests in flight will store at their workers",
)
INDEX_STALE = _index.gauge(
    "stemroute_gateway_index_stale",
    "1 if the prefix index may be out of date or a worker disagrees with it, otherwise 0; /ready "
    "says why",
)
INDEX_DISAGREEMENTS = _index.counter(
    "stemroute_gateway_index_disagreements_total",
    "Reports that stated another number of cached blocks than the prefix index held after them",
)
DISAGREEING_WORKERS = _index.gauge(
    "stemroute_gateway_disagreeing_workers",
    "Workers whose reports still disagree with the prefix index after their whole set was read "
    "several times",
)

_bus = Section("Bus", PREFIX)
BUS_UP = _bus.gauge(
    "stemroute_gateway_bus_up", "1 if the last read of Redis succeeded, otherwise 0"
)
KEPT_WORKERS = _bus.gauge(
    "stemroute_gateway_kept_workers",
    "Workers that do not report and whose lease has expired, kept because they answer directly",
)
BUS_LAST_REPORT_AGE = _bus.gauge(
    "stemroute_gateway_bus_last_report_age_seconds",
    "Time since the last report of any worker; absent before the first",
)
BUS_REPORTS = _bus.counter("stemroute_gateway_bus_reports_total", "Reports applied to the index")
BUS_GAPS = _bus.counter("stemroute_gateway_bus_gaps_total", "Gaps in the sequences of reports")
BUS_REPAIRS = _bus.counter(
    "stemroute_gateway_bus_repairs_total",
    "Whole sets read to correct the index after a gap, a disagreement or a loss of Redis",
)
BUS_UNREADABLE_MESSAGES = _bus.counter(
    "stemroute_gateway_bus_unreadable_messages_total", "Messages that could not be decoded"
)

_shadow = Section("Shadow policies (gateway.shadow)", PREFIX)
SHADOW_REQUESTS = _shadow.counter(
    "stemroute_gateway_shadow_requests_total", "Requests that the policy decided on", "policy"
)
SHADOW_AGREED_REQUESTS = _shadow.counter(
    "stemroute_gateway_shadow_agreed_requests_total",
    "Requests that the policy would have sent to the worker that got them",
    "policy",
)
SHADOW_PROMPT_TOKENS = _shadow.counter(
    "stemroute_gateway_shadow_prompt_tokens_total",
    "Prompt tokens of the requests that the policy decided on",
    "policy",
)
SHADOW_HIT_TOKENS = _shadow.counter(
    "stemroute_gateway_shadow_hit_tokens_total",
    "Prompt tokens that would have been reused with the policy's own choices. The policy live "
    "stands for the real decisions",
    "policy",
)
SHADOW_IMBALANCE = _shadow.gauge(
    "stemroute_gateway_shadow_imbalance_ratio",
    "The most prompt tokens that one worker would have computed, divided by the mean",
    "policy",
)

Samples = float | Mapping[tuple[str, ...], float]
"""A number, or label values -> number."""

SECTIONS = (_requests, _connections, _routing, _workers, _index, _bus, _shadow)


class Metrics:
    """The counts and metrics of one gateway."""

    def __init__(
        self, fleet: Fleet, bus: Callable[[], BusStatus], shadows: Shadows | None = None
    ) -> None:
        self.requests = RequestCounts()
        self.connections = ConnectionCounts()
        self.attempts = AttemptCounts()
        self.answers = AnswerCounts()
        self.decisions = DecisionCounts()
        self._fleet = fleet
        self._bus = bus
        self._shadows = shadows
        self._gauges: dict[MetricDefinition, Callable[[], Samples]] = {}

    def expose(self, gauge: MetricDefinition, read: Callable[[], Samples]) -> None:
        """Export what `read` returns at each scrape, for a number whose owner is created later."""
        self._gauges[gauge] = read

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return exposition(self.collect())

    def collect(self) -> Iterator[Metric]:
        """All metrics now."""
        yield from self._request_metrics()
        yield from self._routing_metrics()
        for gauge, read in self._gauges.items():
            yield gauge.family(read())
        yield from self._worker_metrics()
        yield from self._index_and_bus_metrics()
        if self._shadows is not None and self._shadows.arms:
            yield from _shadow_metrics(self._shadows)

    def _request_metrics(self) -> Iterator[Metric]:
        answered, first_byte = self.requests.answered, self.answers.first_byte
        yield REQUESTS.family(
            {(endpoint, str(status)): count for (endpoint, status), count in answered.items()}
        )
        yield IN_FLIGHT_REQUESTS.family(self._fleet.in_flight)
        yield FAILED_ATTEMPTS.family({(why,): n for why, n in self.attempts.failed.items()})
        yield MIGRATIONS.family(self.attempts.migrations)
        yield BROKEN_STREAMS.family(self.attempts.broken_streams)
        yield TIME_TO_FIRST_BYTE.histogram(first_byte.bounds_s, first_byte.counts, first_byte.sum_s)
        yield REFUSED_CONNECTIONS.family(self.connections.refused)
        yield STALLED_CONNECTIONS.family(self.connections.stalled)

    def _routing_metrics(self) -> Iterator[Metric]:
        answers, durations = self.answers, self.decisions.durations
        yield DECISIONS.family(self.decisions.made)
        yield DECISION_DURATION.histogram(durations.bounds_s, durations.counts, durations.sum_s)
        yield PROMPT_TOKENS.family(answers.prompt)
        yield PREDICTED_HIT_TOKENS.family(answers.predicted)
        yield HIT_TOKENS.family(answers.hit)
        yield REGRET_TOKENS.family(answers.regret)
        yield OVERESTIMATED_TOKENS.family(answers.overestimated)

    def _worker_metrics(self) -> Iterator[Metric]:
        fleet, status = self._fleet, self._bus()
        members = {(member.card.worker,): member for member in fleet.members()}
        loads = {worker: fleet.load_of(member) for worker, member in members.items()}
        states = Tally(
            (m.card.model, "refused" if m.refused else m.state) for m in members.values()
        )
        yield WORKERS.family(states)
        yield REFUSED_WORKERS.family(len(status.refused.keys() | fleet.refused().keys()))
        yield AVOIDED_WORKERS.family(sum(bool(m.left_out) for m in members.values()))
        yield WORKER_PENDING_PREFILL_TOKENS.family(
            {worker: load.pending_prefill_tokens for worker, load in loads.items()}
        )
        yield WORKER_BATCH_REQUESTS.family({worker: load.batch for worker, load in loads.items()})
        yield WORKER_WAIT.family({w: fleet.wait_of(member) for w, member in members.items()})
        yield WORKER_REPORT_AGE.family({(w,): age for w, age in status.report_ages_s.items()})
        yield WORKER_INDEXED_BLOCKS.family(
            {worker: fleet.index.count(member.slot) for worker, member in members.items()}
        )

    def _index_and_bus_metrics(self) -> Iterator[Metric]:
        fleet, status = self._fleet, self._bus()
        yield INDEXED_BLOCKS.family(len(fleet.index))
        yield INDEX_DROPPED_BLOCKS.family(fleet.index.dropped_pairs)
        yield COMING_BLOCKS.family(len(fleet.coming))
        yield INDEX_STALE.family(int(index_view(fleet, status).stale))
        yield INDEX_DISAGREEMENTS.family(status.disagreements)
        yield DISAGREEING_WORKERS.family(len(disagreeing(fleet, status)))
        yield BUS_UP.family(int(status.connected))
        yield KEPT_WORKERS.family(len(status.kept))
        if fleet.last_report_at is not None:
            age_s = time.monotonic() - fleet.last_report_at
            yield BUS_LAST_REPORT_AGE.family(max(0.0, age_s))
        yield BUS_REPORTS.family(status.reports)
        yield BUS_GAPS.family(status.gaps)
        yield BUS_REPAIRS.family(status.repairs)
        yield BUS_UNREADABLE_MESSAGES.family(status.unreadable)


def _shadow_metrics(shadows: Shadows) -> Iterator[Metric]:
    views = {(view.policy,): view for view in shadows.views()}
    yield SHADOW_REQUESTS.family({policy: view.requests for policy, view in views.items()})
    yield SHADOW_AGREED_REQUESTS.family({policy: view.agreed for policy, view in views.items()})
    yield SHADOW_PROMPT_TOKENS.family(
        {policy: view.prompt_tokens for policy, view in views.items()}
    )
    yield SHADOW_HIT_TOKENS.family({policy: view.hit_tokens for policy, view in views.items()})
    yield SHADOW_IMBALANCE.family({policy: view.imbalance for policy, view in views.items()})


def encoder_samples(infos: Iterable[EncoderInfo]) -> Samples:
    """Of `ENCODER_INFO`."""
    return {(info.model, info.tokenizer, info.library, info.version): 1 for info in infos}
