"""How long an engine has been silent, and for how long it may be."""

from __future__ import annotations

from math import exp
from pathlib import Path

from cluster.protocol import Load

MEMORY_S = 60.0
"""The weight of the longest step falls by the factor e in this time."""

SLACK = 2.0
"""A step may take so many times as long as its prediction."""

MEASURED_STEPS = 16
UNMEASURED_S = 60.0
"""Longest silence before so many steps have been measured, because the first ones compile kernels,
and while weights are loaded."""


class Silence:
    """The silence of one engine. Waits are added as its server measures them, so the time in which
    the server itself was stopped does not count.

    timeout_s        longest silence of an engine that is not inside a step
    token_budget     most prompt tokens of a step
    context_tokens   longest prompt + output
    """

    def __init__(self, timeout_s: float, token_budget: int, context_tokens: int) -> None:
        self.silent_s = 0.0
        self._timeout_s = timeout_s
        self._tokens = token_budget
        self._pairs = token_budget * context_tokens
        self._prefill_s = 0.0  # predicted for the longest prefill step
        self._longest_s = 0.0  # of the measured steps
        self._steps = 0
        self._step_s = 0.0  # since the last message, or since the engine has work

    def waited(self, seconds: float, *, busy: bool) -> None:
        """The server waited for a message. `busy`: requests are in flight."""
        self.silent_s += seconds
        self._step_s = self._step_s + seconds if busy else 0.0
        self._longest_s *= exp(-seconds / MEMORY_S)

    def heard(self, load: Load | None, *, stalled: bool = False) -> None:
        """A message came, with the engine's load if it was a report.

        `stalled`: the silence before it was too long, so it says nothing about steps.
        """
        if load is not None:
            self._prefill_s = (
                self._tokens * load.prefill_s_per_token + self._pairs * load.prefill_s_per_pair
            )
        if self._step_s and not stalled:
            self._longest_s = max(self._longest_s, self._step_s)
            self._steps += 1
        self.silent_s = self._step_s = 0.0

    def limit_s(self, *, busy: bool, loading: bool) -> float:
        """The longest silence now. `loading`: weights are being loaded."""
        limit_s = self._timeout_s
        if busy:
            limit_s += SLACK * max(self._longest_s, self._prefill_s)
        if loading or (busy and self._steps < MEASURED_STEPS):
            limit_s = max(limit_s, UNMEASURED_S)
        return limit_s

    def problem(self, pid: int, *, busy: bool, loading: bool) -> str:
        """Why the engine is stalled; "" if it is not. `pid`: of its process."""
        if self.silent_s <= self._timeout_s:
            return ""
        if is_stopped(pid):
            return f"the engine process {pid} is stopped (SIGSTOP or a debugger)"
        limit_s = self.limit_s(busy=busy, loading=loading)
        if self.silent_s <= limit_s:
            return ""
        silent = f"the engine has sent nothing for {self.silent_s:.1f} s"
        return f"{silent}; at most {limit_s:.1f} s were expected"


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process. False where /proc does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])
