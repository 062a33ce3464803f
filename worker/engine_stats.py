"""What an engine counts since it began."""

from __future__ import annotations

import msgspec


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the engine began.

    hits, partial_hits, misses   first admissions that reused all they could, some, nothing
    reused_tokens                prompt tokens not computed, at first admissions
    resumed_tokens               tokens not computed again, when preempted ones came back
    computed_prompt_tokens       prefill tokens computed, recomputation after preemption included
    held_requests                times that a request was held back for another's prefix
    evictions                    cached blocks given up, for one of three reasons:
    evictions_for_space          their room was needed
    evictions_over_share         the cache held more than its share of the pool
    evictions_expired            they had been of no use for too long (policy `ttl`)
    flushed_blocks               cached blocks dropped by flushes and new weights
    pinned_blocks                blocks pinned now
    duplicates                   blocks computed though another had cached them meanwhile
    collisions                   equal hashes of unequal content seen, on a look-up or a commit
    failed_steps                 steps in which the runner failed
    """

    hits: int
    partial_hits: int
    misses: int
    reused_tokens: int
    resumed_tokens: int
    computed_prompt_tokens: int
    generated_tokens: int
    evictions: int
    evictions_for_space: int
    evictions_over_share: int
    evictions_expired: int
    flushed_blocks: int
    pinned_blocks: int
    duplicates: int
    preemptions: int
    held_requests: int
    collisions: int
    steps: int
    failed_steps: int


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """The cold tiers: counts since the engine began, and what is occupied now.

    cpu_blocks, disk_blocks   blocks that host memory and disk hold now
    …_capacity_blocks         room of each
    …_loaded_blocks           blocks that came back from each
    loads, failed_loads       loads that have ended; of these, those cut short by a block that was
                              not as it should be, which was then computed
    declined_loads            times that computing was estimated to be quicker than loading
    loaded_bytes              KV copied back to the device
    demoted_blocks            evicted blocks copied to host memory
    refused_blocks            blocks that a tier did not take: all of it was in use just then
    cpu_evictions, disk_evictions   blocks that each gave up for others
    written_blocks, written_bytes   blocks written to disk, and their KV
    failed_writes             blocks that could not be written
    orphaned_files            files found at the start without the block before them: removed
    unusable_files            files found at the start that are no block of this model: not used
    tier_collisions           equal hashes of unequal content
    """

    cpu_blocks: int
    disk_blocks: int
    cpu_capacity_blocks: int
    disk_capacity_blocks: int
    cpu_loaded_blocks: int
    disk_loaded_blocks: int
    loads: int
    failed_loads: int
    declined_loads: int
    loaded_bytes: int
    demoted_blocks: int
    refused_blocks: int
    cpu_evictions: int
    disk_evictions: int
    written_blocks: int
    written_bytes: int
    failed_writes: int
    orphaned_files: int
    unusable_files: int
    tier_collisions: int


class EvictionAges(msgspec.Struct, frozen=True, kw_only=True):
    """Time from a block's last use to its eviction.

    bounds_s   upper bounds of the classes
    counts     evictions in each class, and one count more for what was older
    sum_s      of all ages
    """

    bounds_s: list[float]
    counts: list[int]
    sum_s: float
