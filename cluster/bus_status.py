"""Status of a bus follower."""

from __future__ import annotations

import msgspec


class BusStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State and counters of a follower.

    connected   the last read of Redis succeeded
    stale       the index may be out of date, for `reason`: Redis cannot be read, or no worker
                reports
    reports     applied since the start
    gaps        holes found in a worker's sequence
    disagreements   reports of another number of blocks than was known after them
    disagreeing     worker -> whole sets read in a row that did not help
    repairs     whole sets read to correct either, or after an outage of Redis
    unreadable  messages that could not be decoded
    refused     worker -> why it is not used
    report_ages_s   worker -> seconds since its last report
    kept        workers whose lease has lapsed but which answer health checks
    warning     a problem that threatens the bus; "": none
    """

    connected: bool
    stale: bool
    reason: str
    reports: int
    gaps: int
    disagreements: int
    disagreeing: dict[str, int]
    repairs: int
    unreadable: int
    refused: dict[str, str]
    report_ages_s: dict[str, float]
    kept: list[str]
    warning: str
