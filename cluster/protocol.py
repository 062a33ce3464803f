"""The messages between workers and routers: typed, versioned, parsed once at the edge.

`WorkerCard` and `Report` travel over the bus; `GenerateRequest` is what a gateway posts to a
worker's `/generate`; `ModelInfo` is what it fetches from a worker's `/model`.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from cluster.blocks import Namespace

PROTOCOL_VERSION = 1
"""A router refuses, and names, a worker of another version."""

HEADER_REQUEST_ID = "x-stemroute-request-id"
HEADER_WORKER = "x-stemroute-worker"
HEADER_POLICY = "x-stemroute-policy"
HEADER_PROMPT_TOKENS = "x-stemroute-prompt-tokens"
HEADER_IGNORED_FIELDS = "x-stemroute-ignored-fields"
HEADER_HIT_TOKENS = "x-stemroute-hit-tokens"
"""Prompt tokens that the worker really reused."""
HEADER_MIGRATIONS = "x-stemroute-migrations"
"""How often another worker has gone on with the response, if any did before its headers were
sent."""
HEADER_PROGRESS = "x-stemroute-progress"
"""Of a worker's response: "1" if its body is in frames."""
HEADER_PREDICTED_HIT_TOKENS = "x-stemroute-predicted-hit-tokens"
HEADER_EXPLAIN = "x-stemroute-explain"
HEADER_TIMEOUT = "x-request-timeout-ms"
"""Of a request: "1" has the gateway keep its decision for `/admin/decisions/{request id}`."""


def pool_token(secret: str) -> str:
    """What gateways send to workers as a bearer token; "" where the pool has no secret.

    It is derived one way, so that a worker's log or a proxy that sees it does not learn the secret.
    """
    if not secret:
        return ""
    return hashlib.sha256(b"stemroute/worker-api/1" + secret.encode()).hexdigest()


WorkerState = Literal["starting", "ready", "draining", "failed", "gone"]


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True):
    """Who a worker is. Written when an epoch begins and when its state changes.

    epoch              one life of this worker's cache; later epochs have larger numbers
    address            base URL of the worker's server, such as "http://10.0.0.7:41235"
    model              name under which clients ask for the model
    namespace          the fields that all requests share (adapter and tenant empty)
    namespace_check    `Namespace.check` with the pool's secret
    capacity_blocks    usable KV blocks (the reserved block 0 not counted)
    context_tokens     longest prompt + output of one sequence
    max_batch_size     sequences that may run at once
    token_budget       tokens computed in one step at most
    device             such as "cpu", "cuda:0 NVIDIA H200", "emulated:steady-25ms"
    """

    worker: str
    epoch: int
    address: str
    model: str
    namespace: Namespace
    namespace_check: str
    capacity_blocks: int
    context_tokens: int
    max_batch_size: int
    token_budget: int
    device: str
    state: WorkerState = "starting"
    version: int = PROTOCOL_VERSION


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's load now, in absolute numbers.

    pending_prefill_tokens   prompt tokens still to compute, cached ones excluded
    running, waiting         requests admitted / not yet admitted
    free_blocks              blocks that no sequence references (evictable cached ones included)
    cached_blocks            blocks in the prefix cache
    pending_prefill_pairs    query-key pairs of the pending tokens' attention (`prefill_pairs`)
    prefill_s_per_token      measured seconds to prefill a token; 0: not measured yet
    prefill_s_per_pair       seconds on top for each query-key pair
    waiting_by_priority      (priority, waiting requests of it), lower first; empty if all have 0
    start_interval_s         measured seconds from one start of a waiting request to the next,
                             whatever limits them; 0: none has had to wait yet
    """

    pending_prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    pending_prefill_pairs: int = 0
    prefill_s_per_token: float = 0.0
    prefill_s_per_pair: float = 0.0
    waiting_by_priority: tuple[tuple[int, int], ...] = ()
    start_interval_s: float = 0.0

    @property
    def batch(self) -> int:
        """Requests running plus requests waiting."""
        return self.running + self.waiting


def prefill_pairs(start: int, end: int) -> int:
    """Query-key pairs of causal attention for the tokens `[start, end)`: about the half square."""
    return (end * end - start * start) // 2


class ColdReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker with cold tiers says of them. Hashes are joined, parents first.

    cpu_…, disk_…      the tier: host memory, disk. A block may be in several, and on the device
                       as well; each tier is prefix-closed by itself
    …_stored, …_evicted   change since the last report, disjoint
    …_blocks           blocks in the tier now
    …_s_per_token      measured seconds to load a token's KV; 0: not measured yet
    """

    cpu_stored: bytes = b""
    cpu_evicted: bytes = b""
    disk_stored: bytes = b""
    disk_evicted: bytes = b""
    cpu_blocks: int = 0
    disk_blocks: int = 0
    cpu_s_per_token: float = 0.0
    disk_s_per_token: float = 0.0

    def without_changes(self) -> ColdReport:
        """The figures alone."""
        return msgspec.structs.replace(
            self, cpu_stored=b"", cpu_evicted=b"", disk_stored=b"", disk_evicted=b""
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself: the change of its cache since the last report, its load now.

    sequence   1, 2, 3, … within an epoch; a hole means that a report was lost
    stored     hashes cached since the last report, joined (16 bytes each), parents first
    evicted    hashes dropped since the last report, joined; disjoint from `stored`
    received   ids of the requests received since the last report; `load` includes them
    cold       of a worker with cold tiers; `stored` and `evicted` are of its device. Others
               send nothing of it
    resync     `stored` and `evicted` do not tell all: read this worker's block set again
    """

    worker: str
    epoch: int
    sequence: int
    load: Load
    stored: bytes = b""
    evicted: bytes = b""
    received: list[str] = msgspec.field(default_factory=list)
    state: WorkerState = "ready"
    resync: bool = False
    cold: ColdReport | msgspec.UnsetType = msgspec.UNSET
    version: int = PROTOCOL_VERSION


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to pick tokens, and when to stop.

    temperature 0 is greedy; top_k 0 and top_p 1.0 are off; `seed` None draws one;
    `stop` holds strings that end the answer and are not part of it; `ignore_eos` goes on to
    `max_tokens` (for load tests).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] = msgspec.field(default_factory=list)
    ignore_eos: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body (msgpack) of a gateway's `POST /generate` to a worker.

    The worker answers with the client's bytes: the OpenAI JSON object of `kind`, or its server
    sent events where `stream` is set. Response headers come with the first token and say what
    was reused.

    token_ids        the prompt, `pack_tokens`
    cache_salt       tenant of the request's namespace
    request_type     kind of work, a hint for the worker's cache; "" says nothing
    turn             1, 2, … in a conversation, a hint as well; 0 says nothing
    priority         lower ones start first; of equal ones the earlier
    include_usage    stream a last chunk with `usage`
    continuous_usage every streamed chunk carries the `usage` so far
    created          time of the response, in seconds since 1970; 0: now
    progress         the body is in frames (`cluster.frames`), so that another worker can go on
    output_ids       tokens that other workers have generated, `pack_tokens`: the response goes on
                     after their text
    hit_tokens       prompt tokens that the first of those workers reused, for `usage`
    """

    request_id: str
    model: str
    kind: Literal["chat", "completion"]
    token_ids: bytes
    sampling: Sampling
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    cache_salt: str = ""
    adapter: str = ""
    request_type: str = ""
    turn: int = 0
    priority: int = 0
    created: int = 0
    progress: bool = False
    output_ids: bytes = b""
    hit_tokens: int = 0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Answer (JSON) of a worker's `GET /model`: all that a gateway needs to make tokens of text.

    tokenizer_json   contents of `tokenizer.json`
    chat_template    Jinja source, "" where the model has none
    tool_chat_template   for chats with tools, "" where `chat_template` serves these too
    special_tokens   such as {"bos_token": "<s>", "eos_token": "</s>"}, given to the template
    add_bos          whether completions (not chats) begin with the bos token
    embedding_rows   token ids are below this; 0: not known, the tokenizer's vocabulary counts
    """

    model: str
    namespace: Namespace
    tokenizer_json: str
    chat_template: str
    special_tokens: dict[str, str]
    context_tokens: int
    add_bos: bool = False
    tool_chat_template: str = ""
    embedding_rows: int = 0


class BlockList(msgspec.Struct, frozen=True, kw_only=True):
    """Answer (msgpack) of a worker's `GET /blocks`: the cached set, to compare an index with.

    cpu, disk   those of its cold tiers
    """

    worker: str
    epoch: int
    blocks: bytes
    cpu: bytes = b""
    disk: bytes = b""


class TierView(msgspec.Struct, frozen=True, kw_only=True):
    """The cold tiers in a CacheView: blocks held and room in each, and what came back.

    …_loaded_blocks   blocks loaded instead of computed
    loads             loads that have ended; of these `failed_loads` were cut short by a bad block
    declined_loads    times that computing was estimated to be quicker
    """

    cpu_blocks: int
    cpu_capacity_blocks: int
    cpu_loaded_blocks: int
    cpu_evictions: int
    disk_blocks: int
    disk_capacity_blocks: int
    disk_loaded_blocks: int
    disk_evictions: int
    loads: int
    failed_loads: int
    declined_loads: int
    loaded_bytes: int


class CacheView(msgspec.Struct, frozen=True, kw_only=True):
    """Answer (JSON) of a worker's `GET /stats`: what its cache holds, reuses and evicts.

    hits, partial_hits, misses   requests that reused all they could, some, nothing
    reused_tokens                prompt tokens that these did not compute
    evictions_…                  blocks given up for room, over the cache's share, or out of use
    mean_eviction_age_s          mean time from last use to eviction; None before the first
    pool_use                     share of the blocks that requests (and pins) use now
    kv_bytes_a_token             keys and values of one token in all layers
    eviction                     the policy, as settings spell it
    tiers                        its cold tiers, None where it has none
    """

    worker: str
    epoch: int
    hits: int
    partial_hits: int
    misses: int
    reused_tokens: int
    computed_prompt_tokens: int
    evictions_for_space: int
    evictions_over_share: int
    evictions_expired: int
    flushed_blocks: int
    mean_eviction_age_s: float | None
    preemptions: int
    collisions: int
    capacity_blocks: int
    free_blocks: int
    cached_blocks: int
    pinned_blocks: int
    pool_use: float
    kv_bytes_a_token: int
    block_size: int
    eviction: str
    tiers: TierView | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The OpenAI error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Body (JSON) of every answer that is no success."""

    error: ErrorBody


SERVICE_UNAVAILABLE = "service_unavailable"
"""The error type of answers with status 503."""


class RequestError(Exception):
    """A request that cannot be served as it is. Its text tells the client what to change.

    status   HTTP status of the answer
    type     OpenAI's error type, such as "invalid_request_error"
    param    the field at fault, None where it is none
    code     machine-readable reason, such as "context_length_exceeded"
    retry_after_s   seconds after which to send it again, at least 1; None: 1 where that may help
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        """The OpenAI error object as JSON."""
        return msgspec.json.encode(
            ErrorAnswer(
                error=ErrorBody(
                    message=self.message, type=self.type, param=self.param, code=self.code
                )
            )
        )
