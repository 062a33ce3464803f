"""Time to load blocks from a tier, measured and never assumed."""

from __future__ import annotations

from collections import deque

import numpy as np

from worker.prefill_speed import fit_step_time

WINDOW_LOADS = 64
"""Window of latest loads."""


class LoadSpeed:
    """`fixed_s + s_per_block × blocks`, fitted to the latest loads like prefill steps."""

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self.s_per_block = 0.0
        self._loads: deque[tuple[float, float, float, float, float]] = deque(maxlen=WINDOW_LOADS)

    @property
    def known(self) -> bool:
        """Whether any load was measured."""
        return bool(self._loads)

    def observe(self, blocks: int, seconds: float) -> None:
        """Add the time of a load of this many blocks."""
        if blocks < 1 or seconds <= 0:
            return
        self._loads.append((1.0, float(blocks), 0.0, 0.0, seconds))
        rows = np.array(self._loads)
        self.fixed_s, self.s_per_block = fit_step_time(rows[:, :4], rows[:, 4])[:2].tolist()

    def seconds(self, blocks: int) -> float:
        """Estimated seconds of a load of this many blocks."""
        return self.fixed_s + self.s_per_block * blocks if blocks else 0.0
