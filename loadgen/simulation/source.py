"""What a simulation sends: a trace, a workload or a request file, as block ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from cluster.blocks import pack_tokens
from cluster.protocol import ModelInfo, RequestError
from cluster.settings import GatewaySettings
from loadgen.arrivals import Arrivals, arrange
from loadgen.plan import Load, RequestSource
from loadgen.requests import Request, RequestFileError, digest, read_request_file
from loadgen.simulation.prompts import simulated_namespace
from loadgen.token_level import trace_of
from loadgen.traces import TraceRequest, read_trace, trace_format
from router.openai_api import parse_either
from router.tokenization import Encoder
from worker.emulated_text import CHAT_TEMPLATE, END, byte_tokenizer

BLOCK_TOKENS = 16
"""Where the trace does not say."""

DEFAULT_MAX_TOKENS = GatewaySettings().default_max_tokens


class Sent(NamedTuple):
    """The requests, and where they came from.

    block_tokens   tokens of the blocks that their ids name
    """

    requests: list[TraceRequest]
    block_tokens: int
    source: RequestSource


def sent_of(load: Load, block_tokens: int = 0) -> Sent:
    """The requests that `load` asks for. `block_tokens` 0 takes the trace's own, or 16.

    Raises TraceError, WorkloadError, ArrivalError or RequestFileError.
    """
    notes = ["simulated in virtual time: no request was sent anywhere"]
    size = block_tokens or BLOCK_TOKENS
    if load.requests is not None:
        file, _ = read_request_file(load.requests)
        requests, name = of_request_file(file, size), str(load.requests)
        notes.append("prompts are read with the emulated model's tokenizer: a token a byte")
    elif load.trace is not None:
        paths = [Path(path) for path in load.trace.files]
        trace = read_trace(paths, trace_format(load.trace.format), load.trace.options)
        requests, name = trace.requests, ", ".join(load.trace.files)
        notes += trace.notes
        size = block_tokens or requests[0].block_tokens
        if load.arrivals is not None:
            requests = retimed(requests, load.arrivals, load.seed)
            notes.append("the trace's own times are not used")
    else:
        arranged = arrange(load.workload, load.arrivals or Arrivals(), load.seed)
        requests, name = trace_of(arranged, size), "workload"
    return Sent(requests, size, _source(load, name, requests, notes))


def retimed(requests: Sequence[TraceRequest], arrivals: Arrivals, seed: int) -> list[TraceRequest]:
    """The requests in their order, at the times of `arrivals`."""
    now_s = 0.0
    retimed = []
    for request, gap_s in zip(requests, arrivals.gaps_s(len(requests), seed), strict=True):
        now_s += gap_s
        retimed.append(msgspec.structs.replace(request, arrival_s=now_s))
    return retimed


def of_request_file(requests: Sequence[Request], block_tokens: int) -> list[TraceRequest]:
    """The requests as an emulated worker gets them, token by token; answers run to their limit.

    Raises RequestFileError for a body that a gateway would refuse.
    """
    encoder = Encoder(_model_info(block_tokens))
    ids: dict[tuple[int, bytes], int] = {}
    read = []
    for request in requests:
        try:
            asked = parse_either(bytes(request.body))
            packed = (
                pack_tokens(asked.token_ids)
                if asked.token_ids
                else encoder.encode(asked.text or encoder.render(asked), bos=True)
            )
        except RequestError as error:
            raise RequestFileError(f"request {request.id}: {error.message}") from error
        parent, chain = -1, []
        for begin in range(0, len(packed), 4 * block_tokens):
            key = (parent, packed[begin : begin + 4 * block_tokens])
            parent = ids.setdefault(key, len(ids))
            chain.append(parent)
        read.append(
            TraceRequest(
                arrival_s=request.intended_at_s,
                session=request.session,
                turn=request.turn,
                prompt_tokens=len(packed) // 4,
                output_tokens=asked.max_tokens or DEFAULT_MAX_TOKENS,
                hash_ids=tuple(chain),
                block_tokens=block_tokens,
                kind=request.group,
            )
        )
    return read


def _model_info(block_tokens: int) -> ModelInfo:
    return ModelInfo(
        model="simulated",
        namespace=simulated_namespace(block_tokens),
        tokenizer_json=byte_tokenizer().to_str(),
        chat_template=CHAT_TEMPLATE,
        special_tokens={"eos_token": END},
        context_tokens=1 << 30,
    )


def _source(
    load: Load, file: str, requests: Sequence[TraceRequest], notes: list[str]
) -> RequestSource:
    span_s = max(request.arrival_s for request in requests)
    is_trace = load.trace is not None
    made = load.requests is None and not is_trace
    return RequestSource(
        file=file,
        sha256=digest(msgspec.json.encode(requests)),
        requests=len(requests),
        offered_rate=len(requests) / span_s if span_s else 0.0,
        seed=load.seed,
        workload=load.workload if made else None,
        trace=load.trace,
        arrivals=load.arrivals or (Arrivals() if made else None),
        notes=notes,
    )
