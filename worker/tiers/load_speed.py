"""How long it takes to load blocks from a tier: measured, never assumed."""

from __future__ import annotations

from collections import deque

import numpy as np

from worker.prefill_speed import fit_step_time

WINDOW_LOADS = 64
"""Latest loads that are looked at."""


class LoadSpeed:
    """`fixed_s + s_per_block × blocks`, fitted to the latest loads as prefill steps are."""

    def __init__(self) -> None:
        self.fixed_s = 0.0
        self.s_per_block = 0.0
        self._loads: deque[tuple[float, float, float, float, float]] = deque(maxlen=WINDOW_LOADS)

    @property
    def known(self) -> bool:
        """Whether anything was measured yet."""
        return bool(self._loads)

    def observe(self, blocks: int, seconds: float) -> None:
        """A load of so many blocks took so long."""
        if blocks < 1 or seconds <= 0:
            return
        self._loads.append((1.0, float(blocks), 0.0, 0.0, seconds))
        rows = np.array(self._loads)
        self.fixed_s, self.s_per_block = fit_step_time(rows[:, :4], rows[:, 4])[:2].tolist()

    def seconds(self, blocks: int) -> float:
        """Estimate for a load of so many blocks."""
        return self.fixed_s + self.s_per_block * blocks if blocks else 0.0
