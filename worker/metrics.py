"""The metrics of a worker: definitions, and values at a scrape. `cache_view` returns the figures of
the cache as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from cluster.metric_definition import MetricDefinition, Section, exposition, with_labels
from cluster.protocol import CacheView, Load, TierView
from worker.messages import EngineStats, EvictionAges, TierStats
from worker.service import WorkerService

PREFIX = "stemroute_worker_"
NS_PER_S = 1e9

_load = Section("Load", PREFIX)
PENDING_PREFILL_TOKENS = _load.gauge(
    "stemroute_worker_pending_prefill_tokens",
    "Prompt tokens of accepted requests that are not computed yet, cached ones excluded",
)
PENDING_PREFILL_PAIRS = _load.gauge(
    "stemroute_worker_pending_prefill_pairs",
    "Query-key pairs in the attention of the pending prompt tokens",
)
RUNNING_REQUESTS = _load.gauge(
    "stemroute_worker_running_requests", "Requests that the scheduler has admitted"
)
WAITING_REQUESTS = _load.gauge(
    "stemroute_worker_waiting_requests", "Requests that the scheduler has not admitted yet"
)
PREFILL_SECONDS_PER_TOKEN = _load.gauge(
    "stemroute_worker_prefill_seconds_per_token",
    "Measured time to prefill a token without its attention; 0: not measured yet",
)
PREFILL_SECONDS_PER_PAIR = _load.gauge(
    "stemroute_worker_prefill_seconds_per_pair",
    "Measured time of a query-key pair in the attention of a prefill; 0: not measured yet",
)
START_INTERVAL = _load.gauge(
    "stemroute_worker_start_interval_seconds",
    "Measured time from one start of a waiting request to the next; 0: none has had to wait yet",
)

_engine = Section("Engine", PREFIX)
STEPS = _engine.counter("stemroute_worker_steps_total", "Steps that the engine has run")
FAILED_STEPS = _engine.counter(
    "stemroute_worker_failed_steps_total", "Steps in which the model runner failed"
)
COMPUTED_PROMPT_TOKENS = _engine.counter(
    "stemroute_worker_computed_prompt_tokens_total",
    "Tokens computed by prefill, recomputation after preemption included",
)
GENERATED_TOKENS = _engine.counter("stemroute_worker_generated_tokens_total", "Tokens generated")
PREEMPTIONS = _engine.counter(
    "stemroute_worker_preemptions_total", "Times that a running request lost its blocks to others"
)
RESUMED_TOKENS = _engine.counter(
    "stemroute_worker_resumed_tokens_total",
    "Tokens of preempted requests that were still cached when the requests were resumed",
)
HELD_REQUESTS = _engine.counter(
    "stemroute_worker_held_requests_total",
    "Times that a request waited because another request was computing its prefix",
)

_cache = Section("KV pool and prefix cache", PREFIX)
CAPACITY_BLOCKS = _cache.gauge("stemroute_worker_capacity_blocks", "Usable blocks of the KV pool")
FREE_BLOCKS = _cache.gauge(
    "stemroute_worker_free_blocks",
    "Blocks that no request references, cached ones that can be evicted included",
)
CACHED_BLOCKS = _cache.gauge("stemroute_worker_cached_blocks", "Blocks in the prefix cache")
PINNED_BLOCKS = _cache.gauge(
    "stemroute_worker_pinned_blocks", "Cached blocks that are protected from eviction"
)
POOL_USED = _cache.gauge(
    "stemroute_worker_pool_used_ratio",
    "Share of the KV pool that requests and pins reference, from 0 to 1",
)
KV_BYTES_PER_TOKEN = _cache.gauge(
    "stemroute_worker_kv_bytes_per_token", "Size of the keys and values of one token in all layers"
)
EPOCH_START_TIME = _cache.gauge(
    "stemroute_worker_epoch_start_time_seconds",
    "Unix time at which the epoch of the cache began: at a start, a flush or new weights",
)
HITS = _cache.counter(
    "stemroute_worker_hits_total", "Requests that reused all of their prompt that can be reused"
)
PARTIAL_HITS = _cache.counter(
    "stemroute_worker_partial_hits_total", "Requests that reused less of their prompt than possible"
)
MISSES = _cache.counter(
    "stemroute_worker_misses_total", "Requests that reused nothing of their prompt"
)
REUSED_TOKENS = _cache.counter(
    "stemroute_worker_reused_tokens_total",
    "Prompt tokens that were reused when their requests were first admitted",
)
EVICTED_BLOCKS = _cache.counter(
    "stemroute_worker_evicted_blocks_total",
    "Cached blocks evicted, by reason. space: another request needed the block. share: the cache "
    "exceeded worker.cache_share. expired: the block was not used for too long (eviction ttl)",
    "reason",
)
EVICTION_AGE = _cache.histogram(
    "stemroute_worker_eviction_age_seconds",
    "Time from the last use of a cached block to its eviction",
)
FLUSHED_BLOCKS = _cache.counter(
    "stemroute_worker_flushed_blocks_total", "Cached blocks dropped by flushes and new weights"
)
DUPLICATE_BLOCKS = _cache.counter(
    "stemroute_worker_duplicate_blocks_total",
    "Blocks that were computed although another request had cached them meanwhile",
)
COLLISIONS = _cache.counter(
    "stemroute_worker_collisions_total", "Equal hashes of different tokens; each is a miss"
)

_tiers = Section("Cold tiers (host memory and disk), if there are any", PREFIX)
TIER_BLOCKS = _tiers.gauge("stemroute_worker_tier_blocks", "Blocks in the tier: cpu, disk", "tier")
TIER_CAPACITY_BLOCKS = _tiers.gauge(
    "stemroute_worker_tier_capacity_blocks", "Blocks that the tier can hold", "tier"
)
TIER_LOADED_BLOCKS = _tiers.counter(
    "stemroute_worker_tier_loaded_blocks_total",
    "Blocks loaded from the tier instead of being computed",
    "tier",
)
TIER_EVICTED_BLOCKS = _tiers.counter(
    "stemroute_worker_tier_evicted_blocks_total",
    "Blocks that the tier evicted to make room for others",
    "tier",
)
TIER_LOADS = _tiers.counter("stemroute_worker_tier_loads_total", "Loads that have ended")
TIER_FAILED_LOADS = _tiers.counter(
    "stemroute_worker_tier_failed_loads_total",
    "Loads that ended early at an invalid block; the rest was computed",
)
TIER_DECLINED_LOADS = _tiers.counter(
    "stemroute_worker_tier_declined_loads_total",
    "Loads not started because computing was estimated to be faster",
)
TIER_LOADED_BYTES = _tiers.counter(
    "stemroute_worker_tier_loaded_bytes_total", "KV copied back to the device"
)
TIER_DEMOTED_BLOCKS = _tiers.counter(
    "stemroute_worker_tier_demoted_blocks_total", "Evicted blocks copied to host memory"
)
TIER_REFUSED_BLOCKS = _tiers.counter(
    "stemroute_worker_tier_refused_blocks_total",
    "Blocks that a tier did not store because all of its blocks were in use",
)
TIER_WRITTEN_BLOCKS = _tiers.counter(
    "stemroute_worker_tier_written_blocks_total", "Blocks written to disk"
)
TIER_WRITTEN_BYTES = _tiers.counter(
    "stemroute_worker_tier_written_bytes_total", "KV written to disk"
)
TIER_FAILED_WRITES = _tiers.counter(
    "stemroute_worker_tier_failed_writes_total", "Blocks that could not be written to disk"
)
TIER_ORPHANED_FILES = _tiers.counter(
    "stemroute_worker_tier_orphaned_files_total",
    "Files removed at the start because the block before theirs was missing",
)
TIER_UNUSABLE_FILES = _tiers.counter(
    "stemroute_worker_tier_unusable_files_total",
    "Files ignored at the start because they hold no block of this model",
)
TIER_COLLISIONS = _tiers.counter(
    "stemroute_worker_tier_collisions_total", "Equal hashes of different tokens in a tier"
)

_bus = Section("Bus", PREFIX)
BUS_UP = _bus.gauge("stemroute_worker_bus_up", "1 if the last report reached Redis, otherwise 0")
PUBLISHED_REPORTS = _bus.counter("stemroute_worker_published_reports_total", "Reports published")
PUBLISHED_WHOLE_SETS = _bus.counter(
    "stemroute_worker_published_whole_sets_total", "Times that the whole set was published"
)

SECTIONS = (_load, _engine, _cache, _tiers, _bus)
LABELS = ("model", "worker")
"""Labels that all metrics of a worker have, in addition to their own."""


async def render_metrics(service: WorkerService) -> bytes:
    """All metrics in Prometheus' text format. Raises EngineDead if the engine does not respond."""
    answer = await service.engine.stats()
    labels = dict(zip(LABELS, (service.info.model.model, service.name), strict=True))
    families = [
        *load_metrics(service.publisher.load),
        *engine_metrics(answer.stats, answer.ages),
        *_service_metrics(service),
    ]
    if answer.tiers is not None:
        families += tier_metrics(answer.tiers)
    return exposition(with_labels(families, labels))


def load_metrics(load: Load) -> Iterator[Metric]:
    """Values of the load that the worker publishes."""
    yield PENDING_PREFILL_TOKENS.family(load.pending_prefill_tokens)
    yield PENDING_PREFILL_PAIRS.family(load.pending_prefill_pairs)
    yield RUNNING_REQUESTS.family(load.running)
    yield WAITING_REQUESTS.family(load.waiting)
    yield PREFILL_SECONDS_PER_TOKEN.family(load.prefill_s_per_token)
    yield PREFILL_SECONDS_PER_PAIR.family(load.prefill_s_per_pair)
    yield START_INTERVAL.family(load.start_interval_s)
    yield FREE_BLOCKS.family(load.free_blocks)
    yield CACHED_BLOCKS.family(load.cached_blocks)


def engine_metrics(stats: EngineStats, ages: EvictionAges) -> Iterator[Metric]:
    """Values of the engine's counts."""
    yield STEPS.family(stats.steps)
    yield FAILED_STEPS.family(stats.failed_steps)
    yield COMPUTED_PROMPT_TOKENS.family(stats.computed_prompt_tokens)
    yield GENERATED_TOKENS.family(stats.generated_tokens)
    yield PREEMPTIONS.family(stats.preemptions)
    yield RESUMED_TOKENS.family(stats.resumed_tokens)
    yield HELD_REQUESTS.family(stats.held_requests)
    yield PINNED_BLOCKS.family(stats.pinned_blocks)
    yield HITS.family(stats.hits)
    yield PARTIAL_HITS.family(stats.partial_hits)
    yield MISSES.family(stats.misses)
    yield REUSED_TOKENS.family(stats.reused_tokens)
    evicted = {
        ("space",): stats.evictions_for_space,
        ("share",): stats.evictions_over_share,
        ("expired",): stats.evictions_expired,
    }
    yield EVICTED_BLOCKS.family(evicted)
    yield EVICTION_AGE.histogram(ages.bounds_s, ages.counts, ages.sum_s)
    yield FLUSHED_BLOCKS.family(stats.flushed_blocks)
    yield DUPLICATE_BLOCKS.family(stats.duplicates)
    yield COLLISIONS.family(stats.collisions)


def tier_metrics(tiers: TierStats) -> Iterator[Metric]:
    """Values of the cold tiers' counts."""

    def of_each(definition: MetricDefinition, cpu: float, disk: float) -> Metric:
        return definition.family({("cpu",): cpu, ("disk",): disk})

    yield of_each(TIER_BLOCKS, tiers.cpu_blocks, tiers.disk_blocks)
    yield of_each(TIER_CAPACITY_BLOCKS, tiers.cpu_capacity_blocks, tiers.disk_capacity_blocks)
    yield of_each(TIER_LOADED_BLOCKS, tiers.cpu_loaded_blocks, tiers.disk_loaded_blocks)
    yield of_each(TIER_EVICTED_BLOCKS, tiers.cpu_evictions, tiers.disk_evictions)
    yield TIER_LOADS.family(tiers.loads)
    yield TIER_FAILED_LOADS.family(tiers.failed_loads)
    yield TIER_DECLINED_LOADS.family(tiers.declined_loads)
    yield TIER_LOADED_BYTES.family(tiers.loaded_bytes)
    yield TIER_DEMOTED_BLOCKS.family(tiers.demoted_blocks)
    yield TIER_REFUSED_BLOCKS.family(tiers.refused_blocks)
    yield TIER_WRITTEN_BLOCKS.family(tiers.written_blocks)
    yield TIER_WRITTEN_BYTES.family(tiers.written_bytes)
    yield TIER_FAILED_WRITES.family(tiers.failed_writes)
    yield TIER_ORPHANED_FILES.family(tiers.orphaned_files)
    yield TIER_UNUSABLE_FILES.family(tiers.unusable_files)
    yield TIER_COLLISIONS.family(tiers.tier_collisions)


def _service_metrics(service: WorkerService) -> Iterator[Metric]:
    info, status = service.info, service.publisher.status
    yield CAPACITY_BLOCKS.family(info.capacity_blocks)
    yield POOL_USED.family(_pool_use(service))
    yield KV_BYTES_PER_TOKEN.family(info.kv_bytes_a_token)
    yield EPOCH_START_TIME.family(service.epoch / NS_PER_S)
    yield BUS_UP.family(int(status.connected))
    yield PUBLISHED_REPORTS.family(status.reports)
    yield PUBLISHED_WHOLE_SETS.family(status.whole_sets)


async def cache_view(service: WorkerService) -> CacheView:
    """What the cache holds, reuses and evicts. Raises EngineDead if the engine does not respond."""
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
