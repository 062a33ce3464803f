"""The interface between the engine's core and a runner: what to compute in one step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from cluster.protocol import Sampling
from worker.block_pool import InvariantError


@dataclass(slots=True)
class BatchItem:
    """One sequence's part of a step. Valid during the step only: the next step may change it.

    token_ids     tokens to compute in this step; their KV is written
    start         position of token_ids[0]; the KV of positions [0, start) is in the pool
    block_table   covers positions [0, start + len(token_ids)), may be longer; position p is in
                  block_table[p // block_size]. The live list
    sample        sample one token after the last of token_ids
    output_index  index of that token among the sequence's outputs. Draw it from
                  f(sampling.seed, output_index): a preempted and resumed request then draws
                  the same tokens
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_table: list[int]
    sample: bool
    sampling: Sampling
    output_index: int


NOT_FINITE = -1
"""Returned by a runner instead of a token if the logits are NaN or infinite."""


class Runner(Protocol):
    """Computes batches. Keeps no state per sequence except the KV in its pool."""

    def execute(self, batch: list[BatchItem]) -> list[int | None]:
        """One entry per item: its sampled token or NOT_FINITE if `sample` is set, else None.

        Items of one batch write disjoint slots and read none that another item writes. Slots that
        an item does not read have no effect on it, even if they hold NaN. After an exception the
        same items may be computed again. Raises MemoryError if the batch does not fit in memory.
        """
        ...


def check_sampled(batch: list[BatchItem], sampled: list[int | None], decodes: int) -> None:
    """Raises InvariantError unless the runner sampled for exactly the items with `sample`, which
    include the first `decodes` ones."""
    wanted = [item.sample for item in islice(batch, decodes, None)]
    got = [token is not None for token in islice(sampled, decodes, None)]
    if len(batch) != len(sampled) or wanted != got or None in sampled[:decodes]:
        raise InvariantError(
            f"the runner sampled {sum(token is not None for token in sampled)} tokens for "
            f"{sum(item.sample for item in batch)} of {len(batch)} items"
        )
