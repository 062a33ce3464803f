"""A worker's metrics for Prometheus: load, pool, cache and engine counts, publishing."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from cluster.protocol import Load
from worker.engine import EngineStats
from worker.service import WorkerService

PREFIX = "stemroute_worker_"


async def render_metrics(service: WorkerService) -> bytes:
    """Text exposition of what is true now. Raises EngineDead where the engine does not answer."""
    stats = await service.engine.stats()
    registry = CollectorRegistry()
    labels = {"worker": service.name, "model": service.info.model.model}

    def gauge(name: str, text: str, value: float) -> None:
        Gauge(PREFIX + name, text, list(labels), registry=registry).labels(**labels).set(value)

    def counter(name: str, text: str, value: float) -> None:
        Counter(PREFIX + name, text, list(labels), registry=registry).labels(**labels).inc(value)

    load = service.publisher.load
    for field in Load.__struct_fields__:
        gauge(field, f"{field.replace('_', ' ')} now", getattr(load, field))
    gauge("capacity_blocks", "usable KV blocks", service.info.capacity_blocks)
    gauge("epoch", "life of the cache that is published now", service.epoch)
    for field in EngineStats.__struct_fields__:
        counter(field, f"{field.replace('_', ' ')} since the start", getattr(stats, field))
    status = service.publisher.status
    gauge("bus_connected", "1 while reports reach Redis", status.connected)
    counter("reports", "reports published", status.reports)
    counter("whole_sets", "times the whole block set was published", status.whole_sets)
    return generate_latest(registry)
