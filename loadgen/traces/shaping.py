"""Turns a trace file into requests to replay (order, times, lengths); records every change."""

from __future__ import annotations

import bisect
import itertools
import lzma
import random
import statistics
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec

from loadgen.traces import azure, bailian, lmcache, mooncake
from loadgen.traces.files import Line, read_lines
from loadgen.traces.records import TraceError, TraceRequest

TraceFormat = Literal["mooncake", "bailian", "lmcache", "azure"]
READERS: dict[TraceFormat, Callable[[Sequence[Line]], list[TraceRequest]]] = {
    "mooncake": mooncake.read,
    "bailian": bailian.read,
    "lmcache": lmcache.read,
    "azure": azure.read,
}


class TraceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is taken of a trace, and how it is stretched.

    num_prompts        the first so many requests by arrival; None takes all
    speed_up           2 sends in half the time
    spread_timestamps  spread requests of one quantised timestamp evenly at random over the time
                       to the next; False sends them together, as the file says
    input_scale        all prompts and their blocks are that much longer or shorter; sharing stays
    output_scale       all answers are that much longer or shorter
    max_input_tokens   longer prompts are cut to their first so many tokens
    max_output_tokens  longer answers are cut
    seed               of the spread
    """

    num_prompts: int | None = None
    speed_up: float = 1.0
    spread_timestamps: bool = True
    input_scale: float = 1.0
    output_scale: float = 1.0
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raises TraceError for what cannot be done."""
        for name in ("speed_up", "input_scale", "output_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise TraceError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("num_prompts", "max_input_tokens", "max_output_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise TraceError(f"{name} must be at least 1, got {value}")


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by arrival, the first at second 0.

    notes   what was changed or assumed, in sentences
    sha256  of the contents read
    """

    format: TraceFormat
    requests: list[TraceRequest]
    notes: list[str]
    sha256: str


def trace_format(name: str) -> TraceFormat:
    """The format of that name. Raises TraceError."""
    if name not in get_args(TraceFormat):
        raise TraceError(f"unknown trace format {name!r}; available: {', '.join(READERS)}")
    return cast(TraceFormat, name)


def read_trace(
    paths: Sequence[Path], format: TraceFormat, options: TraceOptions | None = None
) -> Trace:
    """Read files (plain, .gz, .xz, .tar.*, or folders of them) as one trace. Raises TraceError."""
    options = options or TraceOptions()
    options.check()
    try:
        lines, sha256 = read_lines(paths)
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        listed = ", ".join(str(path) for path in paths)
        raise TraceError(f"cannot read the trace {listed}: {error}") from error
    recorded = sorted(READERS[format](lines), key=lambda request: request.arrival_s)
    if not recorded:
        raise TraceError(f"the trace {', '.join(map(str, paths))} holds no requests")
    notes: list[str] = []
    requests = _timed(recorded, options, notes)
    requests = _sized(_covered(requests), options, notes)
    return Trace(format=format, requests=requests, notes=notes, sha256=sha256)


def spread_arrivals(arrivals_s: Sequence[float], seed: int) -> tuple[list[float], float | None]:
    """Arrivals in order, with those of one timestamp spread until the next, and the quantum.

    Times count as quantised where they have at most half as many values as there are requests;
    the quantum (None where they are not) is the median gap of those values, and nothing is moved
    by more than it. Order is kept.
    """
    stamps = sorted(set(arrivals_s))
    if len(stamps) < 2 or 2 * len(stamps) > len(arrivals_s):
        return list(arrivals_s), None
    quantum = statistics.median(b - a for a, b in itertools.pairwise(stamps))
    rng = random.Random(f"spread/{seed}")
    spread: list[float] = []
    for index, stamp in enumerate(stamps):
        count = bisect.bisect_right(arrivals_s, stamp) - bisect.bisect_left(arrivals_s, stamp)
        room = min(quantum, stamps[index + 1] - stamp if index + 1 < len(stamps) else quantum)
        spread += sorted(stamp + rng.random() * room for _ in range(count))
    return spread, quantum


def _timed(
    recorded: list[TraceRequest], options: TraceOptions, notes: list[str]
) -> list[TraceRequest]:
    arrivals = [request.arrival_s for request in recorded]
    spread, quantum = spread_arrivals(arrivals, options.seed)
    if quantum is not None and options.spread_timestamps:
        arrivals = spread
        notes.append(
            f"the trace's timestamps come in steps of {quantum:.3g} s; arrivals are spread at "
            f"random within a step (seed {options.seed})"
        )
    elif quantum is not None:
        notes.append(
            f"the trace's timestamps come in steps of {quantum:.3g} s; requests of a step are "
            "sent together"
        )
    if options.num_prompts is not None and options.num_prompts < len(recorded):
        notes.append(f"the first {options.num_prompts:,} of the trace's {len(recorded):,} requests")
    if options.speed_up != 1:
        notes.append(f"trace times run {options.speed_up:g} times as fast")
    return [
        msgspec.structs.replace(request, arrival_s=(arrival - arrivals[0]) / options.speed_up)
        for request, arrival in zip(
            recorded[: options.num_prompts], arrivals[: options.num_prompts], strict=True
        )
    ]


def _covered(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Give a partial last block that has no id one of its own, and every answer a token."""
    unused = itertools.count(1 + max((max(r.hash_ids, default=0) for r in requests), default=0))
    covered = []
    for request in requests:
        ids = request.hash_ids
        if len(ids) * request.block_tokens < request.prompt_tokens:
            ids = (*ids, next(unused))
        covered.append(
            msgspec.structs.replace(
                request, hash_ids=ids, output_tokens=max(1, request.output_tokens)
            )
        )
    return covered


def _sized(
    requests: list[TraceRequest], options: TraceOptions, notes: list[str]
) -> list[TraceRequest]:
    if any(request.text is not None for request in requests):
        notes.append(
            "the trace holds texts, not tokens: lengths are estimated at "
            f"{lmcache.CHARACTERS_PER_TOKEN} characters a token"
        )
        if options.input_scale != 1:
            raise TraceError(
                "texts cannot be scaled: truncate them with --max-input-tokens instead"
            )
    if (options.input_scale, options.output_scale) != (1, 1):
        notes.append(
            f"prompts × {options.input_scale:g}, answers × {options.output_scale:g} in tokens"
        )
    scaled = [_scaled(r, options.input_scale, options.output_scale) for r in requests]
    sized = [_cut(r, options.max_input_tokens, options.max_output_tokens) for r in scaled]
    for name, length in (("prompts", "prompt_tokens"), ("answers", "output_tokens")):
        cut = sum(
            getattr(a, length) != getattr(b, length) for a, b in zip(scaled, sized, strict=True)
        )
        if cut:
            bound = options.max_input_tokens if name == "prompts" else options.max_output_tokens
            notes.append(f"{cut:,} of {len(sized):,} {name} were cut to {bound:,} tokens")
    return sized


def _scaled(request: TraceRequest, input_scale: float, output_scale: float) -> TraceRequest:
    """Blocks are scaled and counted anew, so that the ids go on meaning what they meant."""
    block = max(1, round(request.block_tokens * input_scale))
    last = request.prompt_tokens - (len(request.hash_ids) - 1) * request.block_tokens
    last = min(block, max(1, round(last * input_scale)))
    return msgspec.structs.replace(
        request,
        block_tokens=block,
        prompt_tokens=(len(request.hash_ids) - 1) * block + last,
        output_tokens=max(1, round(request.output_tokens * output_scale)),
    )


def _cut(
    request: TraceRequest, max_input_tokens: int | None, max_output_tokens: int | None
) -> TraceRequest:
    prompt = min(request.prompt_tokens, max_input_tokens or request.prompt_tokens)
    text = request.text
    if text is not None and prompt < request.prompt_tokens:
        text = text[: prompt * lmcache.CHARACTERS_PER_TOKEN]
    return msgspec.structs.replace(
        request,
        prompt_tokens=prompt,
        hash_ids=request.hash_ids[: -(-prompt // request.block_tokens)],
        output_tokens=min(request.output_tokens, max_output_tokens or request.output_tokens),
        text=text,
    )
