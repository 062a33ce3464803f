"""The result of a run or a comparison: what `summary.json` holds."""

from __future__ import annotations

import msgspec

from loadgen.ideal import Ideal
from loadgen.measures import ArmMeasures, Slo
from loadgen.paired import Paired
from loadgen.workloads import SharedPrefix

SUMMARY_VERSION = 1


class RequestSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where the requests came from.

    file          the request file that was replayed
    sha256        of its bytes
    offered_rate  requests a second, by its intended times
    workload      its parameters where it was made for this run, None where it was given
    """

    file: str
    sha256: str
    requests: int
    offered_rate: float
    seed: int
    workload: SharedPrefix | None


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of the fleet; the capacity of its cache in tokens."""

    worker: str
    device: str
    capacity_tokens: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of `loadgen run` or `loadgen compare`; times in milliseconds.

    arms      by policy, in the order they ran; the first is the base of `paired`
    paired    the other arms against the first
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
    version: int = SUMMARY_VERSION


def encode_summary(summary: Summary) -> bytes:
    """`summary.json`, indented."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"
