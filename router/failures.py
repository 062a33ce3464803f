"""Workers whose requests fail: avoided, then tried again with one request at a time.

    serving ──rate above AVOID_ABOVE──▶ avoided ──wait is over──▶ on trial, one request at a time
       ▲                                  ▲  └────── it failed: twice the wait ──────┤
       └────────── it succeeded ──────────┼──────────────────────────────────────────┘

The failure rate decays exponentially: each attempt counts `WEIGHT`, those before it the rest. Only
attempts that began while a worker was avoided decide about its return; earlier ones, which may end
much later, count for the rate alone.
"""

from __future__ import annotations

import msgspec

WEIGHT = 0.2
"""Of the latest attempt in a worker's failure rate."""

AVOID_ABOVE = 0.5
"""A worker is avoided above this failure rate: after four failures in a row, or four of five."""

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Time until an avoided worker is tried again; it doubles with each failed trial."""

REMEMBERED = 5
"""Attempts that the words mention."""


class _Record(msgspec.Struct):
    """One worker that has failed.

    last     its latest outcomes, a bit each, 1 for a failure; `known` of them
    wait_s   0 while it serves
    until    the wait is over then
    since    serial of the newest attempt when the wait began
    trial    serial of the attempt that decides; 0 if none is under way
    """

    rate: float = 0.0
    last: int = 0
    known: int = 0
    wait_s: float = 0.0
    until: float = 0.0
    since: int = 0
    trial: int = 0


class Failures:
    """The failures of a fleet's workers. Serials number attempts in the order of their begin."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def __bool__(self) -> bool:
        """Whether any worker has failed lately."""
        return bool(self._records)

    def note(self, worker: str, serial: int, newest: int, now: float, *, failed: bool) -> None:
        """An attempt has ended. `newest`: serial of the newest attempt at any worker."""
        record = self._records.get(worker)
        if record is None:
            if not failed:
                return
            record = self._records[worker] = _Record()
        record.rate += WEIGHT * (failed - record.rate)
        record.last = (record.last << 1 | failed) & (1 << REMEMBERED) - 1
        record.known = min(record.known + 1, REMEMBERED)
        if not record.wait_s:
            if record.rate > AVOID_ABOVE:
                self._avoid(record, FIRST_WAIT_S, newest, now)
            elif not record.last and not failed:
                del self._records[worker]
        elif serial > record.since:
            if failed:
                self._avoid(record, min(2 * record.wait_s, LONGEST_WAIT_S), newest, now)
            else:
                del self._records[worker]

    def at_fault(self, worker: str, newest: int, now: float) -> None:
        """The worker fails whatever it is sent: avoid it at once."""
        record = self._records.setdefault(worker, _Record())
        if not record.wait_s:
            record.rate = 1.0
            self._avoid(record, FIRST_WAIT_S, newest, now)

    def forgive(self, worker: str) -> None:
        """The latest failure was not the worker's fault."""
        record = self._records.get(worker)
        if record is None or not record.last & 1:
            return
        record.rate = max(0.0, (record.rate - WEIGHT) / (1 - WEIGHT))
        record.last, record.known = record.last >> 1, record.known - 1
        if record.rate <= AVOID_ABOVE:
            record.wait_s, record.trial = 0.0, 0
            if not record.last:
                del self._records[worker]

    def began(self, worker: str, serial: int) -> bool:
        """An attempt begins. Returns whether it is a trial."""
        record = self._records.get(worker)
        if record is None or not record.wait_s:
            return False
        record.trial = serial
        return True

    def ended(self, worker: str, serial: int) -> bool:
        """An attempt has ended, whatever came of it. Returns whether it was a trial."""
        record = self._records.get(worker)
        if record is None or record.trial != serial:
            return False
        record.trial = 0
        return True

    def forget(self, worker: str) -> None:
        """The worker has left or begins anew."""
        self._records.pop(worker, None)

    def avoided(self, worker: str, now: float) -> str:
        """Why the worker is avoided now, in words; "" if it is not."""
        record = self._records.get(worker)
        if record is None or not record.wait_s or (now >= record.until and not record.trial):
            return ""
        if not record.last:
            return "it failed the gateway's own request"
        requests = "request" if record.known == 1 else f"{record.known} requests"
        return f"it failed {record.last.bit_count()} of its last {requests}"

    def due(self, now: float) -> list[str]:
        """Avoided workers whose wait is over and that are not on trial."""
        return [w for w, r in self._records.items() if r.wait_s and r.until <= now and not r.trial]

    def rate(self, worker: str) -> float:
        """The worker's failure rate, 0 to 1."""
        record = self._records.get(worker)
        return 0.0 if record is None else record.rate

    def next_return_s(self, now: float) -> float | None:
        """Seconds until the next wait is over; None if there is none."""
        left = [each.until - now for each in self._records.values() if each.wait_s]
        return min((each for each in left if each > 0), default=None)

    @staticmethod
    def _avoid(record: _Record, wait_s: float, newest: int, now: float) -> None:
        record.wait_s, record.until = wait_s, now + wait_s
        record.since, record.trial = newest, 0
