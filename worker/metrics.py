"""What a worker tells of itself: metrics for Prometheus, and a view of its cache for people."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from cluster.protocol import CacheView, Load, TierView
from worker.messages import EvictionAges, TierStats
from worker.service import WorkerService

PREFIX = "stemroute_worker_"
GAUGES_OF_STATS = frozenset(
    {
        "pinned_blocks",
        "cpu_blocks",
        "disk_blocks",
        "cpu_capacity_blocks",
        "disk_capacity_blocks",
    }
)


async def render_metrics(service: WorkerService) -> bytes:
    """Text exposition of what is true now. Raises EngineDead where the engine does not answer."""
    answer = await service.engine.stats()
    registry = CollectorRegistry()
    labels = {"worker": service.name, "model": service.info.model.model}

    def gauge(name: str, text: str, value: float) -> None:
        Gauge(PREFIX + name, text, list(labels), registry=registry).labels(**labels).set(value)

    def counter(name: str, text: str, value: float) -> None:
        Counter(PREFIX + name, text, list(labels), registry=registry).labels(**labels).inc(value)

    load, info = service.publisher.load, service.info
    for field in Load.__struct_fields__:
        gauge(field, f"{field.replace('_', ' ')} now", getattr(load, field))
    gauge("capacity_blocks", "usable KV blocks", info.capacity_blocks)
    gauge("pool_use", "share of the KV blocks that requests use now", _pool_use(service))
    gauge("kv_bytes_a_token", "keys and values of one token, bytes", info.kv_bytes_a_token)
    gauge("epoch", "life of the cache that is published now", service.epoch)
    counts = msgspec.structs.asdict(answer.stats)
    if answer.tiers is not None:
        counts |= msgspec.structs.asdict(answer.tiers)
    for field, value in counts.items():
        text = field.replace("_", " ")
        if field in GAUGES_OF_STATS:
            gauge(field, f"{text} now", value)
        else:
            counter(field, f"{text} since the start", value)
    registry.register(_Ages(labels, answer.ages))
    status = service.publisher.status
    gauge("bus_connected", "1 while reports reach Redis", status.connected)
    counter("reports", "reports published", status.reports)
    counter("whole_sets", "times the whole block set was published", status.whole_sets)
    return generate_latest(registry)


async def cache_view(service: WorkerService) -> CacheView:
    """What the cache holds, reuses and evicts. Raises EngineDead where the engine is silent."""
    answer = await service.engine.stats()
    stats, load, info = answer.stats, service.publisher.load, service.info
    evicted = sum(answer.ages.counts)
    return CacheView(
        worker=service.name,
        epoch=service.epoch,
        hits=stats.hits,
        partial_hits=stats.partial_hits,
        misses=stats.misses,
        reused_tokens=stats.reused_tokens,
        computed_prompt_tokens=stats.computed_prompt_tokens,
        evictions_for_space=stats.evictions_for_space,
        evictions_over_share=stats.evictions_over_share,
        evictions_expired=stats.evictions_expired,
        flushed_blocks=stats.flushed_blocks,
        mean_eviction_age_s=answer.ages.sum_s / evicted if evicted else None,
        preemptions=stats.preemptions,
        collisions=stats.collisions,
        capacity_blocks=info.capacity_blocks,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        pinned_blocks=stats.pinned_blocks,
        pool_use=_pool_use(service),
        kv_bytes_a_token=info.kv_bytes_a_token,
        block_size=info.model.namespace.block_size,
        eviction=service.settings.worker.eviction,
        tiers=None if answer.tiers is None else _tier_view(answer.tiers),
    )


def _tier_view(tiers: TierStats) -> TierView:
    return TierView(**{name: getattr(tiers, name) for name in TierView.__struct_fields__})


def _pool_use(service: WorkerService) -> float:
    capacity = service.info.capacity_blocks
    return (capacity - service.publisher.load.free_blocks) / capacity


class _Ages(Collector):
    """The histogram of ages at eviction, counted in the engine."""

    def __init__(self, labels: dict[str, str], ages: EvictionAges) -> None:
        self._labels = labels
        self._ages = ages

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Prometheus's form: cumulative counts by upper bound."""
        family = HistogramMetricFamily(
            PREFIX + "eviction_age_seconds",
            "time from a block's last use to its eviction",
            labels=list(self._labels),
        )
        total = 0
        buckets = []
        bounds = [*map(str, self._ages.bounds_s), "+Inf"]
        for bound, count in zip(bounds, self._ages.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(list(self._labels.values()), buckets, self._ages.sum_s)
        yield family
