"""Sample the next tokens of a batch.

A token depends only on its row's logits and on (seed, output index), never on the other rows of the
batch: a request draws the same tokens if it is preempted and resumed, or served beside others. The
draw inverts the cumulative distribution at a number hashed from seed and output index.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from cluster.protocol import Sampling
from worker.batch import NOT_FINITE
from worker.staging import upload

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""

NUCLEUS_CANDIDATES = 256
"""On a CPU, top-p first looks at this many of the likeliest tokens, and sorts all tokens only for
rows with a larger nucleus."""


class Draw(NamedTuple):
    """How to sample one token: the request's parameters and the token's output index."""

    sampling: Sampling
    output_index: int


def uniform(seed: int, output_index: int) -> float:
    """In [0, 1), from the top 53 bits of a hash of the two; the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{output_index}".encode(), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def sample(logits: torch.Tensor, draws: Sequence[Draw], likeliest: torch.Tensor) -> torch.Tensor:
    """One token id per row of `logits` `[rows, vocabulary]` (fp32), on its device; NOT_FINITE for a
    row with NaN or positive infinity, or with negative infinity only.

    likeliest  `[rows]`, greatest logit of each row; overwritten with the result

    On CUDA the host does not wait.
    Raises ValueError for a draw that is not greedy and has no seed.
    """
    # The greatest is NaN if any logit is, so it suffices to check it.
    wrong = logits.gather(1, likeliest[:, None])[:, 0].isfinite().logical_not_()
    random = [
        index for index, draw in enumerate(draws) if draw.sampling.temperature >= GREEDY_BELOW
    ]
    if random:
        rows = upload(random, torch.int64, logits.device)
        drawn = _draw(logits.index_select(0, rows), [draws[index] for index in random])
        likeliest.index_copy_(0, rows, drawn)
    return likeliest.masked_fill_(wrong, NOT_FINITE)


def _draw(logits: torch.Tensor, draws: list[Draw]) -> torch.Tensor:
    """Token ids `[rows]`: temperature, then top-k, then top-p of the rest."""
    vocabulary = logits.shape[1]
    columns = upload(
        [
            (
                draw.sampling.temperature,
                _unit_share(draw.sampling.top_p),
                min(draw.sampling.top_k, vocabulary) if draw.sampling.top_k > 0 else vocabulary,
                uniform(_seed(draw), draw.output_index),
            )
            for draw in draws
        ],
        torch.float64,
        logits.device,
    )
    temperature, top_p, top_k, number = columns.unbind(dim=1)
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None].float()
    limits = [draw.sampling.top_k for draw in draws]
    if any(0 < limit < vocabulary for limit in limits):
        scaled = _keep_top_k(scaled, top_k.long(), max(limits))
    weights = scaled.exp_()
    if any(draw.sampling.top_p < 1.0 for draw in draws):
        weights = _keep_top_p(weights, top_p)
    # Sum in the order of the vocabulary, in double, so that ties cannot change the order.
    cumulative = weights.double().cumsum(dim=-1)
    total = cumulative[:, -1]
    target = torch.minimum(number * total, torch.nextafter(total, torch.zeros_like(total)))
    # Logits that are not finite must not yield a token outside the vocabulary.
    drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return drawn.clamp(max=vocabulary - 1)


def _keep_top_k(scaled: torch.Tensor, top_k: torch.Tensor, most: int) -> torch.Tensor:
    """-inf below each row's k-th greatest value; values equal to it are all kept."""
    vocabulary = scaled.shape[1]
    most = min(most, vocabulary)
    greatest = scaled.topk(most, dim=-1).values
    threshold = greatest.gather(1, (top_k.clamp(max=most) - 1)[:, None])
    limited = (top_k < vocabulary)[:, None]
    return scaled.masked_fill(limited & (scaled < threshold), -math.inf)


def _keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """0 below the weight that completes each row's share `top_p`; equal weights are all kept."""
    wanted = top_p * weights.double().sum(dim=-1)
    limited = top_p < 1.0
    candidates = min(NUCLEUS_CANDIDATES, weights.shape[1])
    if weights.device.type != "cpu":
        candidates = weights.shape[1]  # deciding by the mass would make the host wait
    threshold, complete = _nucleus_threshold(weights.topk(candidates, dim=-1).values, wanted)
    if candidates < weights.shape[1] and (limited & ~complete).any():
        open_rows = (limited & ~complete).nonzero()[:, 0]
        everything = weights.index_select(0, open_rows).sort(dim=-1, descending=True).values
        rest, _ = _nucleus_threshold(everything, wanted.index_select(0, open_rows))
        threshold.index_copy_(0, open_rows, rest)
    return weights.masked_fill(limited[:, None] & (weights < threshold[:, None]), 0.0)


def _nucleus_threshold(
    descending: torch.Tensor, wanted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Least weight of each row's nucleus, and whether these candidates reach the wanted mass."""
    cumulative = descending.double().cumsum(dim=-1)
    count = (cumulative < wanted[:, None]).sum(dim=-1)
    last = count.clamp(max=descending.shape[1] - 1)
    return descending.gather(1, last[:, None])[:, 0], count < descending.shape[1]


def _unit_share(top_p: float) -> float:
    return min(max(top_p, 0.0), 1.0)


def _seed(draw: Draw) -> int:
    if draw.sampling.seed is None:
        raise ValueError("a request that samples needs a seed before it reaches the engine")
    return draw.sampling.seed
