"""Validate a request before it enters the engine."""

from __future__ import annotations

import numpy as np

from cluster.protocol import RequestError
from worker.engine_config import EngineConfig
from worker.messages import EngineRequest
from worker.sequence import Sequence

ROOT_BYTES = 32
"""Size of a namespace root. Longer than a hash, so no content of depth 0 equals a deeper one."""


def sequence_of(request: EngineRequest, order: int, config: EngineConfig) -> Sequence:
    """The request as a new sequence, the `order`-th to arrive.

    Raises RequestError: 400 if it can never run (empty, too long, an unknown token), 500 if the
    worker's own server made it invalid.
    """
    if request.sampling.max_tokens < 1:
        raise RequestError(
            f"max_tokens must be at least 1, got {request.sampling.max_tokens}",
            param="max_tokens",
        )
    if len(request.namespace_root) != ROOT_BYTES:
        raise _internal(f"its namespace root has {len(request.namespace_root)} bytes")
    try:
        sequence = Sequence(request, order, config.sequence_limit)
    except ValueError as error:
        raise _internal(str(error)) from error
    if not sequence.prompt_tokens:
        raise RequestError("the prompt is empty; send at least one token", param="prompt")
    if sequence.prompt_tokens >= config.sequence_limit:
        raise RequestError(
            f"the prompt has {sequence.prompt_tokens} tokens; with at least 1 to generate, "
            f"this worker takes {config.sequence_limit - 1} at most. Shorten it",
            param="prompt",
            code="context_length_exceeded",
        )
    if len(sequence.tokens) >= sequence.limit_tokens:
        raise RequestError(
            f"nothing is left to generate: of at most {sequence.limit_tokens} tokens of prompt and "
            f"output, {len(sequence.tokens)} are there already",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if config.embedding_rows:
        greatest = int(np.frombuffer(request.token_ids + request.output_ids, "<u4").max())
        if greatest >= config.embedding_rows:
            raise RequestError(
                f"the prompt has the token id {greatest}; this model's ids end at "
                f"{config.embedding_rows - 1}",
                param="prompt",
            )
    full_blocks = sequence.prompt_tokens // config.block_size
    if sequence.hashes and len(sequence.hashes) != full_blocks:
        raise _internal(f"{len(sequence.hashes)} block hashes for {full_blocks} full blocks")
    return sequence


def _internal(what: str) -> RequestError:
    return RequestError(
        f"the worker's server passed an invalid request to the engine ({what}); this is a fault "
        "of the worker, not of the request",
        status=500,
        type="server_error",
    )
