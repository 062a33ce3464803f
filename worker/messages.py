"""What a worker's server and its engine process tell each other, as msgpack over one socket.

Order matters and is kept: an engine's `Stepped` messages tell its cache's changes in the order
in which they happened, and `Flushed` stands between those before the flush and those after it.
"""

from __future__ import annotations

import msgspec

from cluster.protocol import ColdReport, Load, ModelInfo, Sampling
from cluster.settings import WorkerSettings
from worker.prefill_speed import UNKNOWN, Speed


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the server hands to the engine; travels between their processes as msgpack.

    token_ids       the prompt, `pack_tokens`
    namespace_root  32 bytes, `Namespace.for_request(adapter, salt).root(secret)`
    sampling        `seed` is drawn by the server where the client gave none; stop strings are
                    the server's concern (it cancels), the engine knows end tokens and limits only
    block_hashes    joined hashes of the prompt's full blocks; b"" lets the engine compute them
    arrival         when the request arrived, seconds on the caller's clock
    request_type    kind of work, for eviction by class; "" where nobody said
    turn            1, 2, … in a conversation, for the same; 0 where nobody said
    """

    request_id: str
    token_ids: bytes
    namespace_root: bytes
    sampling: Sampling
    block_hashes: bytes = b""
    arrival: float = 0.0
    request_type: str = ""
    turn: int = 0


class Output(msgspec.Struct, gc=False):
    """News of one request.

    token_ids      new tokens, the end token included; the next step reads the list too
    finish_reason  "" while it runs; else "stop" (end token), "length" (max_tokens or the end of
                   the context), or "error". Exactly one output of a request has one; a
                   cancelled request gets none
    hit_tokens     prompt tokens reused when it was first admitted
    error          what went wrong, for "error"
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str = ""
    hit_tokens: int = 0
    error: str = ""


class Changes(msgspec.Struct, kw_only=True):
    """Net change since the last take: `stored` and `evicted` are disjoint, parents come first in
    `stored`, and a hash both stored and evicted in between is in neither.

    received   ids of the requests added since the last take
    cold       the same of the cold tiers, where there are any; `stored` and `evicted` are of the
               device
    """

    stored: list[bytes]
    evicted: list[bytes]
    received: list[str]
    cold: ColdReport | None = None


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
    flushed_blocks               cached blocks dropped by flushes and new weights, or because a
                                 request that used them computed NaN or infinity
    pinned_blocks                blocks pinned now
    duplicates                   blocks computed though another had cached them meanwhile
    collisions                   equal hashes of unequal content seen, on a look-up or a commit
    failed_steps                 steps that failed and were computed again, item by item if need be
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


class StartEngine(msgspec.Struct, frozen=True, kw_only=True):
    """First line of the engine process's standard input (JSON): how to build the engine."""

    socket: str
    settings: WorkerSettings


class Add(msgspec.Struct, frozen=True, tag=True):
    """Queue a request."""

    request: EngineRequest


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Forget a request. Unknown ones are ignored: they may have ended just now."""

    request_id: str


class Flush(msgspec.Struct, frozen=True, tag=True):
    """Drop all cached blocks."""

    ticket: int


class GetBlocks(msgspec.Struct, frozen=True, tag=True):
    """Ask for the hashes of all cached blocks."""

    ticket: int


class GetStats(msgspec.Struct, frozen=True, tag=True):
    """Ask for the engine's counts."""

    ticket: int


class Pin(msgspec.Struct, frozen=True, tag=True):
    """Keep the cached blocks of a prompt from eviction until the cache is flushed."""

    ticket: int
    namespace_root: bytes
    token_ids: bytes


class PrepareWeights(msgspec.Struct, frozen=True, tag=True):
    """Read another model of the same architecture into memory, and go on computing meanwhile."""

    ticket: int
    model: str


class ApplyWeights(msgspec.Struct, frozen=True, tag=True):
    """End all requests, then compute with the model that was prepared last."""

    ticket: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


ToEngine = Add | Cancel | Flush | GetBlocks | GetStats | Pin | PrepareWeights | ApplyWeights | Stop


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine turned out to be once its model was loaded.

    kv_bytes_a_token   keys and values of one token in all layers
    prefill            its speed before the first request
    """

    model: ModelInfo
    capacity_blocks: int
    context_tokens: int
    max_batch_size: int
    token_budget: int
    device: str
    kv_bytes_a_token: int = 0
    prefill: Speed = UNKNOWN


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; requests may come."""

    info: EngineInfo


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the engine did not take: the fields of a RequestError."""

    request_id: str
    message: str
    status: int
    type: str
    param: str | None
    code: str | None


class Stepped(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What happened since the last message. Sent at least once a second, as a sign of life.

    failure   text of the last step's failure, "" where none failed
    """

    outputs: list[Output]
    refused: list[Refused]
    changes: Changes
    load: Load
    failure: str = ""


class Flushed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The cache was emptied; changes after this belong to a new epoch."""

    ticket: int
    received: list[str]
    load: Load


class Blocks(msgspec.Struct, frozen=True, tag=True):
    """Answer to GetBlocks: joined hashes, and those of the cold tiers."""

    ticket: int
    joined: bytes
    cpu: bytes = b""
    disk: bytes = b""


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Answer to GetStats."""

    ticket: int
    stats: EngineStats
    ages: EvictionAges
    tiers: TierStats | None


class Pinned(msgspec.Struct, frozen=True, tag=True):
    """Answer to Pin: how many leading tokens of the prompt are pinned."""

    ticket: int
    tokens: int


class WeightsPrepared(msgspec.Struct, frozen=True, tag=True):
    """Answer to PrepareWeights: they can be used."""

    ticket: int


class WeightsLoaded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to ApplyWeights: what comes after this is of the new model, and of a new epoch."""

    ticket: int
    info: EngineInfo
    received: list[str]
    load: Load


class NotDone(msgspec.Struct, frozen=True, tag=True):
    """Answer to what could not be done; all is as before."""

    ticket: int
    reason: str


class Died(msgspec.Struct, frozen=True, tag=True):
    """Last words of an engine process that cannot go on."""

    reason: str


FromEngine = (
    Ready
    | Stepped
    | Flushed
    | Blocks
    | Stats
    | Pinned
    | WeightsPrepared
    | WeightsLoaded
    | NotDone
    | Died
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
