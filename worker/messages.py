"""What a worker's server and its engine process say to each other, as msgpack over one socket.

Order matters and is kept: an engine's `Stepped` messages tell its cache's changes in the order
in which they happened, and `Flushed` stands between those before the flush and those after it.
"""

from __future__ import annotations

import msgspec

from cluster.protocol import Load, ModelInfo
from cluster.settings import WorkerSettings
from worker.engine import Changes, EngineRequest, EngineStats, EvictionAges, Output
from worker.engine_stats import TierStats
from worker.prefill_speed import UNKNOWN, Speed


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


class LoadWeights(msgspec.Struct, frozen=True, tag=True):
    """Load another model of the same architecture, then end all requests and compute with it."""

    ticket: int
    model: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


ToEngine = Add | Cancel | Flush | GetBlocks | GetStats | Pin | LoadWeights | Stop


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


class WeightsLoaded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Answer to LoadWeights: what comes after this is of the new model, and of a new epoch."""

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


FromEngine = Ready | Stepped | Flushed | Blocks | Stats | Pinned | WeightsLoaded | NotDone | Died

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
