"""The result of a run or a comparison: what `summary.json` holds."""

from __future__ import annotations

import msgspec

from loadgen.ideal import Ideal
from loadgen.measures import ArmMeasures, Slo
from loadgen.paired import Paired
from loadgen.plan import RequestSource

SUMMARY_VERSION = 1


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the fleet; the capacity of its cache in tokens."""

    worker: str
    device: str
    capacity_tokens: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of `loadgen run` or `loadgen compare`; times in milliseconds.

    repeats   how often every arm was replayed
    max_concurrency   bound of a closed loop; None is an open loop
    arms      by policy, in the order they ran first; the first is the base of `paired`
    paired    the other arms against the first
    verdicts  one sentence an arm of `paired`
    ideal     bound on the cached-token ratio, None where no answer told its tokens
    emulated  whether any worker is an emulated accelerator: then times are a model's
    """

    command: str
    url: str
    started: str
    source: RequestSource
    fleet: list[WorkerFacts]
    emulated: bool
    slo: Slo
    arms: dict[str, ArmMeasures]
    paired: dict[str, Paired]
    ideal: Ideal | None
    valid: bool
    reasons: list[str]
    repeats: int = 1
    max_concurrency: int | None = None
    verdicts: list[str] = msgspec.field(default_factory=list)
    version: int = SUMMARY_VERSION


def encode_summary(summary: Summary) -> bytes:
    """`summary.json`, indented."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
