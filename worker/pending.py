"""How much prefill lies ahead of all sequences together."""

from __future__ import annotations

from collections.abc import Iterable

from worker.block_pool import InvariantError
from worker.sequence import Sequence


class PendingPrefill:
    """Owner of the sequences' `pending_tokens`, whose sums it keeps.

    tokens  sum of the pending tokens
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._squares = 0  # twice the pairs: whole numbers that add up exactly

    @property
    def pairs(self) -> int:
        """Query-key pairs of the pending tokens' attention."""
        return self._squares // 2

    def set(self, sequence: Sequence, tokens: int) -> None:
        """So many of the sequence's last tokens are pending now."""
        self.tokens += tokens - sequence.pending_tokens
        self._squares -= _squares(sequence)
        sequence.pending_tokens = tokens
        self._squares += _squares(sequence)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises InvariantError unless the sums are those of all sequences."""
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
