"""The decoding sequences and their part of the batch, kept from step to step.

Each step computes one token of each. The set changes rarely, and from one step to the next only a
sequence's newest token and its position change. So a step updates the previous step's items in
place, and looks at a sequence only when it is *due*: its last block is full, or its answer has
reached its limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from worker.batch import BatchItem
from worker.block_pool import InvariantError
from worker.sequence import Sequence


class Decodes:
    """Owns the batch's decodes. All columns are in the order in which the sequences joined.

    sequences    the sequences
    items        their batch items in the next step
    request_ids  their ids
    hit_tokens   prompt tokens that each reused
    full         sequences whose block table is full, so that the next token needs a block
    steps        steps taken so far
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.sequences: list[Sequence] = []
        self.items: list[BatchItem] = []
        self.request_ids: list[str] = []
        self.hit_tokens: list[int] = []
        self.full: list[Sequence] = []
        self.steps = 0
        self._appends: list[Callable[[int], None]] = []
        self._columns: tuple[list[Any], ...] = (
            self.sequences,
            self.items,
            self.request_ids,
            self.hit_tokens,
            self._appends,
        )
        self._due: dict[int, list[Sequence]] = {}  # by the step after which they are due

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequence: Sequence) -> None:
        """Add a sequence. All its tokens except the newest must be computed."""
        start = sequence.computed_tokens
        self.sequences.append(sequence)
        self.items.append(
            BatchItem(
                sequence.request_id,
                [sequence.tokens[start]],
                start,
                sequence.block_table,
                True,
                sequence.sampling,
                sequence.output_tokens,
            )
        )
        self.request_ids.append(sequence.request_id)
        self.hit_tokens.append(sequence.hit_tokens or 0)
        self._appends.append(sequence.tokens.append)
        if start == len(sequence.block_table) * self._block_size:
            self.full.append(sequence)
        self.wait(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence, if present."""
        if not sequence.due:
            return
        index = self.sequences.index(sequence)
        for column in self._columns:
            del column[index]
        if sequence in self.full:
            self.full.remove(sequence)
        waiting = self._due.get(sequence.due, [])
        if sequence in waiting:
            waiting.remove(sequence)
            if not waiting:
                del self._due[sequence.due]
        sequence.due = 0

    def wait(self, sequence: Sequence) -> None:
        """Make the sequence due when its block is full or its answer is at its limit."""
        length = len(sequence.tokens)
        block_size = self._block_size
        room = block_size - (length - 1) % block_size
        sequence.due = self.steps + min(room, sequence.limit_tokens - length)
        self._due.setdefault(sequence.due, []).append(sequence)

    def advance(self, sampled: list[list[int]]) -> list[Sequence]:
        """A step has computed a token of each and sampled one more, given in a list of its own.
        Returns the sequences due now; each must `wait` again or leave."""
        for item, append, token_ids in zip(self.items, self._appends, sampled, strict=True):
            append(token_ids[0])
            item.token_ids = token_ids
            item.start += 1
            item.output_index += 1
        self.steps += 1
        return self._due.pop(self.steps, [])

    def leap(self, steps: int, sampled: Iterable[Iterable[int]]) -> None:
        """Take several steps at once, at most `steps_alone()`, with the tokens sampled for each."""
        for sequence, item, tokens in zip(self.sequences, self.items, sampled, strict=True):
            sequence.tokens.extend(tokens)
            item.token_ids = [sequence.tokens[-1]]
            item.start += steps
            item.output_index += steps
        self.steps += steps

    def steps_alone(self) -> int:
        """Number of coming steps in which no decode is due or needs a block; 0 without any."""
        return 0 if self.full or not self._due else min(self._due) - self.steps - 1

    def check(self) -> None:
        """Raises InvariantError unless the columns agree with the sequences. O(decodes)."""
        rows = {len(column) for column in self._columns}
        if len(rows) != 1:
            raise InvariantError(f"columns of {sorted(rows)} rows")
        for sequence, item in zip(self.sequences, self.items, strict=True):
            computed = sequence.computed_tokens
            told = item.start, item.token_ids, item.output_index
            if told != (computed, [sequence.tokens[-1]], sequence.output_tokens):
                raise InvariantError(
                    f"{sequence.request_id} has the columns {told}, but {computed} computed "
                    f"tokens and the last output {sequence.output_tokens}, {sequence.tokens[-1]}"
                )
            table = sequence.block_table
            if item.block_table is not table:
                raise InvariantError(f"{sequence.request_id} has a different block table")
            if (computed == len(table) * self._block_size) != (sequence in self.full):
                raise InvariantError(
                    f"{sequence.request_id} has {computed} tokens in {len(table)} blocks, `full` "
                    "is wrong"
                )
            left = self._block_size - computed % self._block_size
            if sequence.due - self.steps != min(left, sequence.limit_tokens - computed - 1):
                raise InvariantError(
                    f"{sequence.request_id} is due in {sequence.due - self.steps} steps, "
                    f"at {computed} of {sequence.limit_tokens} tokens"
                )
        due = [(s.due, s) for step, waiting in self._due.items() for s in waiting if s.due == step]
        if len(due) != len(self) or {s for _, s in due} != set(self.sequences):
            raise InvariantError(f"{len(due)} of {len(self)} decodes have a due step")
