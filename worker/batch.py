"""The contract between the engine's core and a runner: what is to be computed in one step."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from cluster.protocol import Sampling
from worker.block_pool import InvariantError
from worker.prefill_speed import StepWork
from worker.scheduler import Plan


class BatchItem(NamedTuple):
    """One sequence's part of a step.

    token_ids     tokens to compute in this step; their KV is written
    start         position of token_ids[0]; the KV of positions [0, start) is in the pool
    block_table   covers positions [0, start + len(token_ids)), may be longer; position p lies
                  in block_table[p // block_size]. The live list: read it, never keep it
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


class Runner(Protocol):
    """Computes batches. Keeps no state of a sequence but the KV in its pool."""

    def execute(self, batch: list[BatchItem]) -> list[int | None]:
        """One entry for each item: its sampled token where `sample` is set, else None.

        Items of one batch write disjoint slots and read none that another item writes.
        """
        ...


def batch_of(plan: Plan) -> tuple[list[BatchItem], StepWork]:
    """The runner's batch, and how much work it is."""
    new = tuple.__new__  # without the named tuple's own, which only passes its arguments on
    batch = []
    prefill_tokens = prefill_squares = prefills = 0
    for sequence, count in plan.items():
        tokens, start = sequence.tokens, sequence.computed_tokens
        if sequence.pending_tokens:
            length, end = len(tokens), start + count
            token_ids, sample = tokens[start:end].tolist(), end == length
            prefills += 1
            prefill_tokens += count
            prefill_squares += end * end - start * start
        else:  # a decode: its newest token is the only one to come
            length = start + 1
            token_ids, sample = [tokens[start]], True
        fields = (
            sequence.request_id,
            token_ids,
            start,
            sequence.block_table,
            sample,
            sequence.sampling,
            length - sequence.prompt_tokens,
        )
        batch.append(new(BatchItem, fields))
    decodes = len(batch) - prefills
    samples = decodes > 0 or any(item.sample for item in batch)
    return batch, StepWork(prefill_tokens, prefill_squares // 2, decodes, samples)


def check_sampled(batch: list[BatchItem], sampled: list[int | None]) -> None:
    """Raises InvariantError unless the runner sampled for exactly the items that ask for it."""
    if [token is not None for token in sampled] != [item.sample for item in batch]:
        raise InvariantError(
            f"the runner sampled {sum(token is not None for token in sampled)} tokens for "
            f"{sum(item.sample for item in batch)} of {len(batch)} items"
        )
