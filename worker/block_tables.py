"""The block tables of the running sequences, kept between steps as rows of one array."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class _Row:
    """The row of one sequence's table.

    table    the sequence's live list: identifies the row, read only while it is in a step
    settled  blocks that were full before its last step; these never change
    filled   entries that are not 0
    step     number of the last step that used the row
    """

    __slots__ = ("filled", "index", "settled", "step", "table")

    def __init__(self, index: int, table: list[int]) -> None:
        self.index = index
        self.table = table
        self.settled = self.filled = self.step = 0


class BlockTables:
    """One row per live list of blocks. A step writes only the entries that are new.

    Between steps a list may grow, and a block that has become full may be replaced (if an equal
    block was cached already). A sequence that starts again, after a preemption for example, must
    use a new list or begin the step in an earlier block than its last one. Rows of ended sequences
    are reused when no free row is left.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = np.zeros((8, 64), dtype=np.int64)
        # Keyed by the list's id, which is unique while the row keeps the list alive.
        self._rows: dict[int, _Row] = {}
        self._free = list(range(8))
        self._step = 0

    def begin(self, widest: int) -> None:
        """Begin a step whose longest sequence has `widest` blocks."""
        self._step += 1
        rows, width = self._blocks.shape
        if widest > width:
            self._resize(rows, max(widest, 2 * width))

    def update(self, table: list[int], start: int, used: int) -> int:
        """Bring the row of `table` up to date and return its index.

        start  tokens of the sequence computed before this step
        used   blocks in use when it ends; at most `widest` of the step
        """
        row = self._rows.get(id(table))
        if row is None:
            row = self._add(table)
        full = start // self._block_size
        # The block of the last step cannot have become full since.
        first = row.filled if full == row.settled else row.settled if full > row.settled else 0
        if first < used:
            self._blocks[row.index, first:used] = table[first:used]
        if used < row.filled:
            self._blocks[row.index, used : row.filled] = 0
        row.filled, row.settled, row.step = used, full, self._step
        return row.index

    def take(self, rows: list[int], widest: int) -> npt.NDArray[np.int64]:
        """Rows `[len(rows), widest]`, padded with block 0."""
        return self._blocks[rows, :widest]

    def __len__(self) -> int:
        """Rows in use."""
        return len(self._rows)

    def _add(self, table: list[int]) -> _Row:
        if not self._free:
            self._drop_idle()
        row = _Row(self._free.pop(), table)
        self._rows[id(table)] = row
        return row

    def _drop_idle(self) -> None:
        """Free the rows that this step has not used; if there are none, double the rows."""
        for key, row in list(self._rows.items()):
            if row.step != self._step:
                del self._rows[key]
                self._blocks[row.index, : row.filled] = 0
                self._free.append(row.index)
        if not self._free:
            rows, width = self._blocks.shape
            self._resize(2 * rows, width)
            self._free.extend(range(rows, 2 * rows))

    def _resize(self, rows: int, width: int) -> None:
        grown = np.zeros((rows, width), dtype=np.int64)
        grown[: self._blocks.shape[0], : self._blocks.shape[1]] = self._blocks
        self._blocks = grown
