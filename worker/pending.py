"""Total prefill that all sequences still need."""

from __future__ import annotations

from collections.abc import Iterable

from worker.block_pool import InvariantError
from worker.sequence import Sequence


class PendingPrefill:
    """Owns the sequences' `pending_tokens` and their sums.

    tokens  sum of the pending tokens
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._squares = 0  # twice the pairs: integers, so that the sum is exact

    @property
    def pairs(self) -> int:
        """Query-key pairs in the attention of the pending tokens."""
        return self._squares // 2

    def set(self, sequence: Sequence, tokens: int) -> None:
        """Set how many of the sequence's last tokens are pending."""
        self.tokens += tokens - sequence.pending_tokens
        self._squares -= _squares(sequence)
        sequence.pending_tokens = tokens
        self._squares += _squares(sequence)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises InvariantError unless the sums agree with all sequences."""
        everybody = list(sequences)
        tokens = sum(sequence.pending_tokens for sequence in everybody)
        squares = sum(map(_squares, everybody))
        if (self.tokens, self._squares) != (tokens, squares):
            raise InvariantError(
                f"{self.tokens} pending prefill tokens, {self._squares} squares; counted {tokens}, "
                f"{squares}"
            )


def _squares(sequence: Sequence) -> int:
    """Twice the query-key pairs of a sequence's pending tokens, which are its last ones."""
    total = len(sequence.tokens)
    first = total - sequence.pending_tokens
    return total * total - first * first
