"""The result of a comparison, one sentence per arm.

Faster or slower is said only where the 95 % interval of the ratio of medians lies on one side of
1. Anything else is "no difference shown", which is not "no difference". One replay of each arm
shows how these two replays differ, not that others would differ so: it is said in those words.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.paired import Difference, Paired


def verdicts(paired: Mapping[str, Paired], *, valid: bool, repeats: int) -> list[str]:
    """A sentence for each arm against the first; none of them where the run is invalid."""
    if not valid:
        return ["no verdict: the run is invalid"] if paired else []
    return [verdict(name, found, repeats) for name, found in paired.items()]


def verdict(arm: str, found: Paired, repeats: int) -> str:
    """Such as "locality is faster than round_robin: TTFT p50 −41 % [−47, −35]"; of one replay
    "in this one run locality was faster than round_robin: …"."""
    once = "in this one run " if repeats == 1 else ""
    named = {
        "TTFT p50": found.ttft_p50_ms,
        "TPOT p50": found.tpot_p50_ms,
        "E2E p50": found.e2e_p50_ms,
    }
    known = {name: one for name, one in named.items() if one is not None and _has_interval(one)}
    if not known:
        return f"{arm} against {found.against}: nothing to compare"
    told: dict[int, list[str]] = {-1: [], 1: [], 0: []}
    for name, one in known.items():
        told[side(one)].append(f"{name} {change(one)}")
    better, worse, unclear = (", ".join(told[which]) for which in (-1, 1, 0))
    if better and worse:
        head = f"{once}{arm} against {found.against}: faster in {better}, slower in {worse}"
    elif better or worse:
        way = "faster" if better else "slower"
        was = "was" if once else "is"
        head = f"{once}{arm} {was} {way} than {found.against}: {better or worse}"
    else:
        return f"{once}{arm} against {found.against}: no difference shown, {unclear}"
    return f"{head}; no difference shown in {unclear}" if unclear else head


def side(found: Difference) -> int:
    """−1 where the whole interval is below the base, 1 above, 0 where it holds it."""
    if found.ratio_high is not None and found.ratio_high < 1:
        return -1
    return int(found.ratio_low is not None and found.ratio_low > 1)


def change(found: Difference) -> str:
    """Such as "−41 % [−47, −35]"."""
    if found.ratio is None or found.ratio_low is None or found.ratio_high is None:
        return "unknown"
    low, high = _percent(found.ratio_low), _percent(found.ratio_high)
    return f"{_percent(found.ratio)} % [{low}, {high}]"


def _has_interval(found: Difference) -> bool:
    return None not in (found.ratio, found.ratio_low, found.ratio_high)


def _percent(ratio: float) -> str:
    text = f"{100 * (ratio - 1):+.0f}"
    return "0" if text in ("+0", "-0") else text.replace("-", "−")
