"""Messages between a worker's server and its engine process, as msgpack over one socket.

The order of messages matters and is preserved: `Stepped` messages report changes of the cache in
the order in which they happened, and `Flushed` separates those before the flush from those after
it.
"""

from __future__ import annotations

import msgspec

from cluster.protocol import ColdReport, Load, ModelInfo, Sampling
from cluster.settings import WorkerSettings
from worker.prefill_speed import UNKNOWN, Speed


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request from the server to the engine.

    token_ids       the prompt, `pack_tokens`
    output_ids      tokens of the response generated before, elsewhere; packed likewise
    namespace_root  32 bytes, `Namespace.for_request(adapter, salt).root(secret)`
    sampling        the server draws `seed` if the client gave none; it also handles stop strings
                    (by cancelling), the engine knows end tokens and limits only
    block_hashes    joined hashes of the prompt's full blocks; b"" lets the engine compute them
    arrival         time of arrival, seconds on the caller's clock
    request_type    kind of work, for eviction by class; "": unknown
    turn            1, 2, … in a conversation, for the same; 0: unknown
    priority        lower ones start first; of equal ones the earlier
    """

    request_id: str
    token_ids: bytes
    namespace_root: bytes
    sampling: Sampling
    block_hashes: bytes = b""
    arrival: float = 0.0
    request_type: str = ""
    turn: int = 0
    priority: int = 0
    output_ids: bytes = b""


class Output(msgspec.Struct, gc=False):
    """Progress of one request.

    token_ids      new tokens, the end token included; the next step reads the list too
    finish_reason  "" while it runs; then "stop" (end token), "length" (max_tokens or the end of
                   the context), or "error". Exactly one output of a request has one, none if it was
                   cancelled
    hit_tokens     prompt tokens reused when it was first admitted
    error          what went wrong, for "error"
    """

    request_id: str
    token_ids: list[int]
    finish_reason: str = ""
    hit_tokens: int = 0
    error: str = ""


class Changes(msgspec.Struct, kw_only=True):
    """Net change since the last one: `stored` and `evicted` are disjoint, parents come first in
    `stored`, and a hash both stored and evicted in between is in neither.

    received   ids of the requests added since the last change
    cold       the same for the cold tiers, if any; `stored` and `evicted` are of the device
    """

    stored: list[bytes]
    evicted: list[bytes]
    received: list[str]
    cold: ColdReport | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the engine started.

    hits, partial_hits, misses   first admissions that reused all they could, a part, nothing
    reused_tokens                prompt tokens not computed, at first admissions
    resumed_tokens               tokens not computed again when preempted requests were resumed
    computed_prompt_tokens       prefill tokens computed, recomputation after preemption included
    held_requests                times that a request waited because another was computing its
                                 prefix
    evictions                    cached blocks evicted, the sum of three reasons:
    evictions_for_space          another request needed the block
    evictions_over_share         the cache exceeded its share of the pool
    evictions_expired            the block was not used for too long (policy `ttl`)
    flushed_blocks               cached blocks dropped by flushes and new weights, or because a
                                 request that used them computed NaN or infinity
    pinned_blocks                blocks pinned now
    duplicates                   blocks computed although another request had cached them meanwhile
    collisions                   equal hashes of different contents seen, at a look-up or a commit
    failed_steps                 steps that failed and were computed again in parts
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
    """The cold tiers: counts since the engine started, and occupancy now.

    cpu_blocks, disk_blocks   blocks in host memory and on disk now
    …_capacity_blocks         blocks that each can hold
    …_loaded_blocks           blocks loaded from each
    loads, failed_loads       loads that have ended; of these, those that ended early at an invalid
                              block, after which the rest was computed
    declined_loads            loads not started because computing was estimated to be faster
    loaded_bytes              KV copied back to the device
    demoted_blocks            evicted blocks copied to host memory
    refused_blocks            blocks that a tier did not store because all of its blocks were in use
    cpu_evictions, disk_evictions   blocks that each evicted to make room for others
    written_blocks, written_bytes   blocks written to disk, and bytes of their KV
    failed_writes             blocks that could not be written
    orphaned_files            files removed at the start because the block before theirs was missing
    unusable_files            files ignored at the start because they hold no block of this model
    tier_collisions           equal hashes of different contents
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
    counts     evictions per class, and last a count of older ones
    sum_s      of all ages
    """

    bounds_s: list[float]
    counts: list[int]
    sum_s: float


class StartEngine(msgspec.Struct, frozen=True, kw_only=True):
    """First line of the engine process's standard input, as JSON: how to build the engine."""

    socket: str
    settings: WorkerSettings


class Add(msgspec.Struct, frozen=True, tag=True):
    """Queue a request."""

    request: EngineRequest


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancel a request. Unknown ids are ignored, since the request may have just ended."""

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
    """Protect the cached blocks of a prompt from eviction until the next flush."""

    ticket: int
    namespace_root: bytes
    token_ids: bytes


class PrepareWeights(msgspec.Struct, frozen=True, tag=True):
    """Read another model of the same architecture into memory while requests run."""

    ticket: int
    model: str


class ApplyWeights(msgspec.Struct, frozen=True, tag=True):
    """End all requests, then switch to the model that was prepared last."""

    ticket: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


ToEngine = Add | Cancel | Flush | GetBlocks | GetStats | Pin | PrepareWeights | ApplyWeights | Stop


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the engine after its model was loaded.

    kv_bytes_a_token   bytes of keys and values of one token in all layers
    prefill            prefill speed before the first request
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
    """The model is loaded and the engine accepts requests."""

    info: EngineInfo


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the engine rejected: the fields of a RequestError."""

    request_id: str
    message: str
    status: int
    type: str
    param: str | None
    code: str | None


class Stepped(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Events since the last message. Sent at least every 0.5 s, as a heartbeat."""

    outputs: list[Output]
    refused: list[Refused]
    changes: Changes
    load: Load


class Flushed(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The cache was emptied; changes after this belong to a new epoch."""

    ticket: int
    received: list[str]
    load: Load


class Blocks(msgspec.Struct, frozen=True, tag=True):
    """Answer to GetBlocks: joined hashes of the device and of the cold tiers."""

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
    """Answer to PrepareWeights: the weights can be used."""

    ticket: int


class WeightsLoaded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to ApplyWeights: later messages are of the new model and a new epoch."""

    ticket: int
    info: EngineInfo
    received: list[str]
    load: Load


class NotDone(msgspec.Struct, frozen=True, tag=True):
    """Answer to a command that failed without effect."""

    ticket: int
    reason: str


class Died(msgspec.Struct, frozen=True, tag=True):
    """Last message of an engine process that cannot continue."""

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
