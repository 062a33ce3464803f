"""How gateway and worker define their metrics, and how definitions become Prometheus' text.

Names follow https://prometheus.io/docs/practices/naming: one prefix per process, base units, and
`_total` at the end of counters. A definition that breaks these rules cannot be made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Literal, TypeVar

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of `exposition`."""

Kind = Literal["counter", "gauge", "histogram"]

UNITS: Mapping[str, str] = MappingProxyType(
    {
        "seconds_per_token": "seconds per token",
        "seconds_per_pair": "seconds per query-key pair",
        "bytes_per_token": "bytes per token",
        "up": "0 or 1",
        "stale": "0 or 1",
        "info": "always 1",
    }
    | {
        unit: unit
        for unit in (
            *("seconds", "bytes", "ratio"),
            *("requests", "connections", "attempts", "streams", "decisions", "workers"),
            *("tokens", "pairs", "blocks", "hits", "misses", "steps", "preemptions", "migrations"),
            *("collisions", "loads", "writes", "files"),
            *("reports", "messages", "gaps", "disagreements", "repairs", "sets"),
        )
    }
)
"""The ends of names -> the unit in words. What is counted is a unit, too."""

_Values = TypeVar("_Values", bound=tuple[str, ...])


class MetricDefinition(msgspec.Struct, frozen=True):
    """One metric.

    labels   names of labels, each of few values: those of a worker or a policy, not of a request
    """

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """The end of the name, in words. Raises ValueError if it is no unit."""
        name = self.name.removesuffix("_total")
        for end, unit in UNITS.items():
            if name.endswith(f"_{end}"):
                return unit
        raise ValueError(f"the metric {self.name} ends in no unit: end it in one of UNITS")

    def family(self, samples: float | Mapping[_Values, float]) -> Metric:
        """A counter or gauge with its samples: a number, or label values -> number.

        Raises ValueError for wrong labels.
        """
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.name, self.meaning, labels=self.labels)
        for values, number in samples.items() if isinstance(samples, Mapping) else [((), samples)]:
            if len(values) != len(self.labels):
                raise ValueError(f"{self.name} has the labels {self.labels}, not {values}")
            family.add_metric(values, number)
        return family

    def histogram(self, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
        """A histogram.

        bounds   upper bounds of the buckets
        counts   observations in each bucket, and one count more for those above all bounds
        total    sum of all observations
        """
        ends = [*map(floatToGoString, bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(counts), strict=True))
        return HistogramMetricFamily(self.name, self.meaning, buckets, total)


def with_labels(families: Iterable[Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    """Add `labels` to all samples. Changes the families."""
    for family in families:
        family.samples = [
            sample._replace(labels={**labels, **sample.labels}) for sample in family.samples
        ]
        yield family


class Section(msgspec.Struct, frozen=True):
    """A group of definitions under a heading. Its methods define a metric and return it.

    Raise ValueError for a name that breaks the rules.
    """

    title: str
    prefix: str
    definitions: list[MetricDefinition] = []

    def counter(self, name: str, meaning: str, *labels: str) -> MetricDefinition:
        """A number that only grows."""
        return self._define(MetricDefinition(name, "counter", meaning, labels))

    def gauge(self, name: str, meaning: str, *labels: str) -> MetricDefinition:
        """A number as it is now."""
        return self._define(MetricDefinition(name, "gauge", meaning, labels))

    def histogram(self, name: str, meaning: str) -> MetricDefinition:
        """A distribution."""
        return self._define(MetricDefinition(name, "histogram", meaning))

    def _define(self, definition: MetricDefinition) -> MetricDefinition:
        name, _ = definition.name, definition.unit
        if not name.startswith(self.prefix):
            raise ValueError(f"the metric {name} must begin with {self.prefix}")
        if name.endswith("_total") != (definition.kind == "counter"):
            raise ValueError(f"the metric {name}: counters, and only they, end in _total")
        self.definitions.append(definition)
        return definition


class _Scrape(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(families: Iterable[Metric]) -> bytes:
    """Prometheus' text format, version 0.0.4."""
    return generate_latest(_Scrape(families))  # type: ignore[arg-type, unused-ignore]
