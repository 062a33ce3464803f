"""What the gateway counts, for Prometheus. Every gateway has its own registry.

Gauges of fleet and bus are read from their owners when they are scraped, so they cannot drift.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cluster.bus_status import BusStatus
from router.encoding import EncoderInfo
from router.fleet import Fleet
from router.readiness import disagreeing, index_view
from router.shadow import Shadows

DECISION_BUCKETS_S = (25e-6, 50e-6, 100e-6, 200e-6, 400e-6, 1e-3, 4e-3, 16e-3, 0.1)
FIRST_BYTE_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0)


class Metrics:
    """Counters and histograms of one gateway, with the prefix `stemroute_`."""

    def __init__(
        self, fleet: Fleet, bus: Callable[[], BusStatus], shadows: Shadows | None = None
    ) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = RequestCounts()
        registry.register(self.requests)
        self.retries = Counter(
            "stemroute_retries",
            "Attempts at a worker that failed before anything was sent to the client",
            ["reason"],
            registry=registry,
        )
        self.broken_streams = Counter(
            "stemroute_broken_streams",
            "Streams that a worker broke off after their first bytes",
            registry=registry,
        )
        self.connections = ConnectionCounts()
        registry.register(self.connections)
        self.answers = Answers()
        registry.register(self.answers)
        self.decisions = Decisions()
        registry.register(self.decisions)
        registry.register(_Live(fleet, bus))
        if shadows is not None and shadows.arms:
            registry.register(_ShadowMetrics(shadows))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class RequestCounts(Collector):
    """Requests by endpoint and HTTP status: plain numbers until they are scraped, as all that
    every request counts. The library's locked counters would take several times as long."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}

    def note(self, endpoint: str, status: int) -> None:
        """A request was answered."""
        key = endpoint, status
        self._counts[key] = self._counts.get(key, 0) + 1

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        counts = CounterMetricFamily(
            "stemroute_requests",
            "Requests answered, by endpoint and HTTP status; 499: the client went away",
            labels=["endpoint", "status"],
        )
        for (endpoint, status), count in self._counts.items():
            counts.add_metric([endpoint, str(status)], count)
        yield counts


class ConnectionCounts(Collector):
    """Connections of clients that were not served to their end.

    refused   turned away because too many were open
    stalled   cut off because the client took nothing of its answer
    """

    def __init__(self) -> None:
        self.refused = self.stalled = 0

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "stemroute_refused_connections",
            "Connections turned away because gateway.max_connections were open",
            value=self.refused,
        )
        yield CounterMetricFamily(
            "stemroute_stalled_connections",
            "Connections cut off because their clients took nothing of an answer for "
            "gateway.write_timeout_s",
            value=self.stalled,
        )


class Answers(Collector):
    """Tokens of answered requests, and when their answers began."""

    def __init__(self) -> None:
        self._prompt = self._predicted = self._hit = self._regret = self._overestimated = 0
        self._first_bytes = _Durations(FIRST_BYTE_BUCKETS_S)

    def note(
        self, *, first_byte_s: float, prompt: int, predicted: int, hit: int, best_hit: int
    ) -> None:
        """A worker began to answer. Tokens of the prompt, of those expected in its cache and
        really found there, and of the most expected at any worker."""
        self._first_bytes.note(first_byte_s)
        self._prompt += prompt
        self._predicted += predicted
        self._hit += hit
        self._regret += max(0, best_hit - hit)
        self._overestimated += max(0, predicted - hit)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "stemroute_prompt_tokens", "Prompt tokens of answered requests", value=self._prompt
        )
        yield CounterMetricFamily(
            "stemroute_predicted_hit_tokens",
            "Prompt tokens of answered requests that were expected in the worker's cache",
            value=self._predicted,
        )
        yield CounterMetricFamily(
            "stemroute_hit_tokens",
            "Prompt tokens of answered requests that the worker really reused",
            value=self._hit,
        )
        yield CounterMetricFamily(
            "stemroute_regret_tokens",
            "Prompt tokens of answered requests that the worker computed although another was "
            "expected to hold them: the price of balance, or of a wrong prediction",
            value=self._regret,
        )
        yield CounterMetricFamily(
            "stemroute_overestimated_tokens",
            "Prompt tokens of answered requests that were expected in the worker's cache, but "
            "were not there",
            value=self._overestimated,
        )
        yield self._first_bytes.metric(
            "stemroute_first_byte_seconds",
            "Time from a request's arrival to the first byte of a worker's answer",
        )


class _Durations:
    """A histogram in plain numbers. `bounds_s`: upper bounds of its buckets."""

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._in_bucket = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def note(self, seconds: float) -> None:
        """Count one."""
        self._in_bucket[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def metric(self, name: str, meaning: str) -> Metric:
        """As a metric."""
        bounds = [*map(floatToGoString, self._bounds_s), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._in_bucket), strict=True))
        return HistogramMetricFamily(name, meaning, buckets=buckets, sum_value=self._sum_s)


class Decisions(Collector):
    """Decisions by policy and reason, and what they took."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._took = _Durations(DECISION_BUCKETS_S)

    def note(self, policy: str, reason: str, seconds: float) -> None:
        """A decision by `policy` took `seconds`."""
        key = policy, reason
        self._counts[key] = self._counts.get(key, 0) + 1
        self._took.note(seconds)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        counts = CounterMetricFamily(
            "stemroute_decisions",
            "Routing decisions by policy and reason; only: one candidate; cold: nobody holds the "
            "prefix; hit: nobody holds more of it; load: one that holds more costs more or is left "
            "out by the policy; guard: the hotspot guard left those that hold it out",
            labels=["policy", "reason"],
        )
        for labels, count in self._counts.items():
            counts.add_metric(labels, count)
        yield counts
        yield self._took.metric(
            "stemroute_decision_seconds", "Time to look up, score, choose and book"
        )


class _Live(Collector):
    """Reads fleet and bus when scraped."""

    def __init__(self, fleet: Fleet, bus: Callable[[], BusStatus]) -> None:
        self._fleet = fleet
        self._bus = bus

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield from self._fleet_metrics()
        yield from self._bus_metrics()

    def _fleet_metrics(self) -> Iterable[Metric]:
        fleet = self._fleet
        states = GaugeMetricFamily(
            "stemroute_workers", "Workers, by model and state", labels=["model", "state"]
        )
        pending = GaugeMetricFamily(
            "stemroute_worker_pending_prefill_tokens",
            "Prompt tokens still to compute, as this gateway sees it",
            labels=["worker"],
        )
        batch = GaugeMetricFamily(
            "stemroute_worker_batch", "Requests running plus waiting", labels=["worker"]
        )
        blocks = GaugeMetricFamily(
            "stemroute_worker_indexed_blocks", "Blocks in the prefix index", labels=["worker"]
        )
        tally = Tally((m.card.model, "refused" if m.refused else m.state) for m in fleet.members())
        for (model, state), count in tally.items():
            states.add_metric([model, state], count)
        for member in fleet.members():
            name, load = member.card.worker, fleet.load_of(member)
            pending.add_metric([name], load.pending_prefill_tokens)
            batch.add_metric([name], load.batch)
            blocks.add_metric([name], fleet.index.count(member.slot))
        yield from (states, pending, batch, blocks)
        yield GaugeMetricFamily(
            "stemroute_indexed_blocks",
            "Different blocks in the prefix index",
            value=len(fleet.index),
        )
        yield GaugeMetricFamily(
            "stemroute_coming_blocks",
            "Blocks that requests in flight will make their workers hold",
            value=len(fleet.coming),
        )
        yield GaugeMetricFamily(
            "stemroute_requests_in_flight", "Requests at workers", value=fleet.in_flight
        )

    def _bus_metrics(self) -> Iterable[Metric]:
        status = self._bus()
        yield GaugeMetricFamily(
            "stemroute_bus_connected", "1 while Redis can be read", value=int(status.connected)
        )
        yield GaugeMetricFamily(
            "stemroute_bus_stale",
            "1 while the index may be out of date, or a worker disagrees with it",
            value=int(index_view(self._fleet, status).stale),
        )
        if self._fleet.last_report_at is not None:
            yield GaugeMetricFamily(
                "stemroute_bus_last_report_age_seconds",
                "Time since any worker's last report",
                value=max(0.0, time.monotonic() - self._fleet.last_report_at),
            )
        ages = GaugeMetricFamily(
            "stemroute_worker_report_age_seconds",
            "Time since a worker's last report: how old the index of it may be",
            labels=["worker"],
        )
        for worker, age_s in status.report_ages_s.items():
            ages.add_metric([worker], age_s)
        yield ages
        yield CounterMetricFamily("stemroute_bus_reports", "Reports applied", value=status.reports)
        yield CounterMetricFamily(
            "stemroute_bus_gaps", "Holes found in the sequences of reports", value=status.gaps
        )
        yield CounterMetricFamily(
            "stemroute_index_disagreements",
            "Reports of another number of cached blocks than the index holds after them",
            value=status.disagreements,
        )
        yield GaugeMetricFamily(
            "stemroute_disagreeing_workers",
            "Workers whose reports disagree with the index however often their set is read",
            value=len(disagreeing(self._fleet, status)),
        )
        yield CounterMetricFamily(
            "stemroute_bus_repairs", "Whole block sets read to mend", value=status.repairs
        )
        yield CounterMetricFamily(
            "stemroute_bus_unreadable", "Reports that cannot be decoded", value=status.unreadable
        )
        yield GaugeMetricFamily(
            "stemroute_refused_workers",
            "Workers that are not used because they do not match",
            value=len(status.refused.keys() | self._fleet.refused().keys()),
        )


class _ShadowMetrics(Collector):
    """What shadow policies would have done, read when scraped; compare with the arm `live`."""

    def __init__(self, shadows: Shadows) -> None:
        self._shadows = shadows

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        labels = ["policy"]
        requests = CounterMetricFamily(
            "stemroute_shadow_requests", "Requests that the policy judged", labels=labels
        )
        agreed = CounterMetricFamily(
            "stemroute_shadow_agreed",
            "Requests that the policy would have sent where they went",
            labels=labels,
        )
        prompt = CounterMetricFamily(
            "stemroute_shadow_prompt_tokens", "Prompt tokens of these requests", labels=labels
        )
        hits = CounterMetricFamily(
            "stemroute_shadow_hit_tokens",
            "Prompt tokens that the policy would have found cached, with its own choices",
            labels=labels,
        )
        imbalance = GaugeMetricFamily(
            "stemroute_shadow_imbalance",
            "Most prompt tokens computed by a worker / mean, had the policy chosen",
            labels=labels,
        )
        for view in self._shadows.views():
            name = [view.policy]
            requests.add_metric(name, view.requests)
            agreed.add_metric(name, view.agreed)
            prompt.add_metric(name, view.prompt_tokens)
            hits.add_metric(name, view.hit_tokens)
            imbalance.add_metric(name, view.imbalance)
        yield from (requests, agreed, prompt, hits, imbalance)


class EncoderMetrics(Collector):
    """Which library encodes prompts, read when scraped."""

    def __init__(self, encoders: Callable[[], list[EncoderInfo]]) -> None:
        self._encoders = encoders

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        infos = GaugeMetricFamily(
            "stemroute_gateway_encoder_info",
            "1 for each tokenizer in use, with the library that encodes for it; `tokenizers` is "
            "many times slower than `fastokens`, and serves what that does not encode exactly",
            labels=["model", "tokenizer", "library", "version"],
        )
        for info in self._encoders():
            infos.add_metric([info.model, info.tokenizer, info.library, info.version], 1)
        yield infos
