"""Counters of a gateway: plain numbers, which become Prometheus metrics only at a scrape.

Some change with every request; the locked counters of `prometheus_client` would take several times
as long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

DECISION_BUCKETS_S = (25e-6, 50e-6, 100e-6, 200e-6, 400e-6, 1e-3, 4e-3, 16e-3, 0.1)
FIRST_BYTE_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 60.0)


class Durations:
    """A histogram of times.

    bounds_s   upper bounds of the buckets
    counts     times in each bucket, and one count more for those above all bounds
    sum_s      of all times
    """

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self.bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def note(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds_s, seconds)] += 1
        self.sum_s += seconds


class RequestCounts:
    """Answered requests.

    answered   (endpoint, HTTP status) -> requests
    """

    def __init__(self) -> None:
        self.answered = Counter[tuple[str, int]]()

    def note(self, endpoint: str, status: int) -> None:
        """A request was answered."""
        self.answered[endpoint, status] += 1


class ConnectionCounts:
    """Client connections that the gateway refused or cut.

    refused   too many were open
    stalled   closed because the client read nothing of its response
    """

    def __init__(self) -> None:
        self.refused = self.stalled = 0


class AttemptCounts:
    """Attempts that failed.

    failed           reason -> failed attempts
    migrations       attempts that went on with the response of a failed one
    broken_streams   streams that ended with an error event
    """

    def __init__(self) -> None:
        self.failed = Counter[str]()
        self.migrations = self.broken_streams = 0

    def note(self, reason: str) -> None:
        """An attempt failed."""
        self.failed[reason] += 1


class AnswerCounts:
    """Prompt tokens of answered requests, and the time to their first byte.

    prompt          all prompt tokens
    predicted       those that the gateway expected the chosen worker to reuse
    hit             those that the worker reused
    regret          those computed although another worker was predicted to hold them
    overestimated   those predicted, but not reused
    """

    def __init__(self) -> None:
        self.prompt = self.predicted = self.hit = self.regret = self.overestimated = 0
        self.first_byte = Durations(FIRST_BYTE_BUCKETS_S)

    def note(
        self, *, first_byte_s: float, prompt: int, predicted: int, hit: int, best_hit: int
    ) -> None:
        """A worker began its response.

        `prompt`, `predicted` and `hit` are tokens as above; `best_hit` is the largest predicted
        hit of any candidate.
        """
        self.first_byte.note(first_byte_s)
        self.prompt += prompt
        self.predicted += predicted
        self.hit += hit
        self.regret += max(0, best_hit - hit)
        self.overestimated += max(0, predicted - hit)


class DecisionCounts:
    """Routing decisions.

    made    (policy, reason) -> decisions
    """

    def __init__(self) -> None:
        self.made = Counter[tuple[str, str]]()
        self.durations = Durations(DECISION_BUCKETS_S)

    def note(self, policy: str, reason: str, seconds: float) -> None:
        """A decision by `policy` took `seconds`."""
        self.made[policy, reason] += 1
        self.durations.note(seconds)
