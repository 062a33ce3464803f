"""The requests to send: a given file, or one generated from a workload or a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from loadgen.arrivals import Arrival, Arrivals, arrange
from loadgen.blocktext import ID_WORDS
from loadgen.bodies import Writer
from loadgen.requests import Request, decode_requests, digest, encode_requests, read_request_file
from loadgen.traces import TraceError, TraceOptions, TraceRequest, read_trace, trace_format
from loadgen.workloads import AnyWorkload, SharedPrefix

WORKLOAD_FILE = "workload.jsonl"

MOST_CONFUSED = 0.01
"""Share of a trace's blocks that may look like another one: more would make up sharing."""


class TraceSource(msgspec.Struct, frozen=True, kw_only=True):
    """A trace to replay: its files, its format, and what is taken of it."""

    files: tuple[str, ...]
    format: str
    options: TraceOptions = TraceOptions()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be sent.

    requests   a request file to replay as it is
    trace      else a trace to replay
    workload   else a workload to make
    arrivals   when; None: a trace by its own times, a workload at 2 requests a second
    seed       of texts and times
    """

    requests: Path | None = None
    trace: TraceSource | None = None
    workload: AnyWorkload = SharedPrefix()
    arrivals: Arrivals | None = None
    seed: int = 0


class RequestSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where the requests came from.

    file          the request file that was replayed
    sha256        of its bytes
    offered_rate  requests a second, by its intended times; 0 where all are sent at once
    workload      its parameters where it was made for this run, None where it was given
    trace         likewise
    arrivals      the process that made the times, None where they were given
    notes         what was changed or assumed, in sentences
    """

    file: str
    sha256: str
    requests: int
    offered_rate: float
    seed: int
    workload: AnyWorkload | None
    trace: TraceSource | None = None
    arrivals: Arrivals | None = None
    notes: list[str] = msgspec.field(default_factory=list)


class Plan(NamedTuple):
    """The requests, as every arm replays them, and where they came from."""

    requests: list[Request]
    source: RequestSource


class ModelProbe(Protocol):
    """What has to be known of the model that answers."""

    async def model(self) -> str:
        """Its name."""

    async def tokens_per_word(self, model: str) -> float:
        """Tokens that it makes of one word of `loadgen.blocktext`."""


async def make_plan(load: Load, probe: ModelProbe, model: str, out: Path | None) -> Plan:
    """The requests, read back from the bytes of their file; written to `out` where it is given.

    `model` is the name to ask for, "" takes the first served. Raises RequestFileError,
    TraceError, WorkloadError or ArrivalError where they cannot be made.
    """
    if load.requests is not None:
        requests, sha256 = read_request_file(load.requests)
        return Plan(requests, _source(load, str(load.requests), sha256, requests, []))
    notes: list[str] = []
    if load.trace is not None:
        made = await _replay(load, load.trace, probe, model, notes)
    else:
        made = await _workload(load, probe, model, notes)
    data = encode_requests(made)
    requests = decode_requests(data)
    if out is not None:
        _write(out, data)
    return Plan(requests, _source(load, WORKLOAD_FILE, digest(data), requests, notes))


def _write(out: Path, data: bytes) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / WORKLOAD_FILE).write_bytes(data)


async def _workload(load: Load, probe: ModelProbe, model: str, notes: list[str]) -> list[Request]:
    arranged = arrange(load.workload, load.arrivals or Arrivals(), load.seed)
    model = model or await probe.model()
    made_text = any(not segment.text for segment in arranged[0].asked.prompt)
    writer = await _writer(probe, model, notes) if made_text else Writer(model)
    return [_chat(arrival, writer) for arrival in arranged]


async def _replay(
    load: Load, source: TraceSource, probe: ModelProbe, model: str, notes: list[str]
) -> list[Request]:
    trace = read_trace(
        [Path(file) for file in source.files], trace_format(source.format), source.options
    )
    notes += trace.notes
    times = [request.arrival_s for request in trace.requests]
    if load.arrivals is not None:
        notes.append("the trace's own times are not used")
        times = _times(load.arrivals, len(times), load.seed)
    model = model or await probe.model()
    made_text = any(request.text is None for request in trace.requests)
    writer = await _writer(probe, model, notes) if made_text else Writer(model)
    _check_texts(writer, trace.requests, source.options.input_scale, notes)
    return [
        _completion(index, time, request, writer)
        for index, (time, request) in enumerate(zip(times, trace.requests, strict=True))
    ]


def _check_texts(
    writer: Writer, requests: Sequence[TraceRequest], input_scale: float, notes: list[str]
) -> None:
    """Note blocks whose made texts are equal though they differ. Raises TraceError for many."""
    blocks, confused = writer.confusion(requests)
    if not confused:
        return
    tokens = requests[0].block_tokens
    words = writer.words(tokens)
    told = (
        f"blocks of {tokens} tokens are made of {words} word{'s' if words > 1 else ''} each, too "
        f"few to tell all apart: {confused:,} of {blocks:,} different ones look like another"
    )
    if confused > MOST_CONFUSED * blocks:
        enough = math.ceil(100 * input_scale * writer.block_tokens_needed / tokens) / 100
        raise TraceError(
            f"{told}, and would be found in a cache that never held them: set --input-scale to "
            f"{enough:g} or more, at which blocks have {ID_WORDS} words"
        )
    notes.append(told)


async def _writer(probe: ModelProbe, model: str, notes: list[str]) -> Writer:
    tokens_per_word = await probe.tokens_per_word(model)
    notes.append(
        f"texts are made of words that are {tokens_per_word:.3g} tokens each for {model} (measured)"
    )
    return Writer(model, tokens_per_word)


def _times(arrivals: Arrivals, count: int, seed: int) -> list[float]:
    clock_us = 0
    times = []
    for gap_s in arrivals.gaps_s(count, seed):
        clock_us += round(gap_s * 1e6)
        times.append(clock_us / 1e6)
    return times


def _chat(arrival: Arrival, writer: Writer) -> Request:
    conversation = arrival.conversation
    return Request(
        id=f"{conversation.session}-t{arrival.turn}",
        intended_at_s=arrival.at_s,
        session=conversation.session,
        turn=arrival.turn,
        group=conversation.group,
        body=msgspec.Raw(writer.chat(arrival.asked)),
    )


def _completion(index: int, time_s: float, request: TraceRequest, writer: Writer) -> Request:
    return Request(
        id=f"r{index}",
        intended_at_s=time_s,
        session=request.session,
        turn=request.turn,
        group=request.kind or "trace",
        kind="completion",
        body=msgspec.Raw(writer.completion(request)),
    )


def _source(
    load: Load, file: str, sha256: str, requests: Sequence[Request], notes: list[str]
) -> RequestSource:
    span_s = requests[-1].intended_at_s
    made = load.requests is None
    is_trace = made and load.trace is not None
    return RequestSource(
        file=file,
        sha256=sha256,
        requests=len(requests),
        offered_rate=len(requests) / span_s if span_s else 0.0,
        seed=load.seed,
        workload=load.workload if made and not is_trace else None,
        trace=load.trace if is_trace else None,
        arrivals=None if not made else load.arrivals or (None if is_trace else Arrivals()),
        notes=notes,
    )
