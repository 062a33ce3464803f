"""The scheduler's plan of one step, and the batch that the runner gets for it."""

from __future__ import annotations

from typing import NamedTuple

from worker.batch import BatchItem
from worker.decodes import Decodes
from worker.prefill_speed import StepWork
from worker.sequence import Sequence


class Plan(NamedTuple):
    """One step: one token per decode, and a number of tokens per prefill."""

    decodes: Decodes
    prefills: dict[Sequence, int]

    def sequences(self) -> list[Sequence]:
        """The planned sequences, in batch order."""
        return [*self.decodes.sequences, *self.prefills]

    def without(
        self, left: set[int], sequences: list[Sequence], sampled: list[int | None]
    ) -> list[int | None]:
        """Remove sequences, by index, that are no longer running.

        `sequences` is the list before that. Returns the remaining entries of `sampled`.
        """
        for index in left:
            self.prefills.pop(sequences[index], None)
        return [token for index, token in enumerate(sampled) if index not in left]


def batch_of(plan: Plan) -> tuple[list[BatchItem], StepWork]:
    """The runner's batch, and the work in it."""
    batch = plan.decodes.items.copy()
    decodes = len(batch)
    prefill_tokens = prefill_squares = 0
    samples = decodes > 0
    for sequence, count in plan.prefills.items():
        start = sequence.computed_tokens
        end = start + count
        sample = end == len(sequence.tokens)
        batch.append(
            BatchItem(
                sequence.request_id,
                sequence.tokens[start:end].tolist(),
                start,
                sequence.block_table,
                sample,
                sequence.sampling,
                sequence.output_tokens,
            )
        )
        prefill_tokens += count
        prefill_squares += end * end - start * start
        samples = samples or sample
    return batch, StepWork(prefill_tokens, prefill_squares // 2, decodes, samples)
