"""Reasons that make a run invalid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from loadgen.admin import FleetView
from loadgen.measures import spread
from loadgen.observer import Observations
from loadgen.outcomes import Outcome


class ArmEvidence(NamedTuple):
    """What was seen around one replay of one arm.

    policy    the gateway's name for the arm's policy
    before    the fleet after the flush, right before the first request
    after     the fleet after the last request, once quiet (or when waiting for that ended)
    flushed   whether caches were flushed before it
    seen      the gateway while it was replayed
    """

    policy: str
    outcomes: Sequence[Outcome]
    before: FleetView
    after: FleetView
    flushed: bool
    seen: Observations


def reasons(
    arms: Mapping[str, Sequence[ArmEvidence]],
    requests: int,
    max_client_lag_ms: float,
    *,
    errors_count: bool = True,
) -> list[str]:
    """Why the run is invalid; empty where it is valid.

    arms                the repeats of each arm, by policy
    requests            how many the request file holds
    max_client_lag_ms   bound on the 99th percentile of sent − intended
    errors_count        whether failed and unfinished requests make it invalid; where overload is
                        what is looked for, they do not
    """
    found = []
    for name, repeats in arms.items():
        for number, arm in enumerate(repeats, start=1):
            label = name if len(repeats) == 1 else f"{name}, repeat {number}"
            why = _arm_reasons(arm, requests, max_client_lag_ms, errors_count)
            found += [f"{label}: {text}" for text in why]
    return found + _unequal(arms)


def _unequal(arms: Mapping[str, Sequence[ArmEvidence]]) -> list[str]:
    """What differs between arms that should differ in their policy alone."""
    found = []
    for what, sizes in (
        ("requests", {name: sum(len(a.outcomes) for a in r) for name, r in arms.items()}),
        ("repeats", {name: len(repeats) for name, repeats in arms.items()}),
        ("workers", {name: _workers(repeats) for name, repeats in arms.items()}),
    ):
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            found.append(f"the arms are of unequal size: {listed} {what}")
    tokens: dict[str, set[int]] = {}
    for repeats in arms.values():
        for arm in repeats:
            for outcome in arm.outcomes:
                if outcome.prompt_tokens is not None:
                    tokens.setdefault(outcome.id, set()).add(outcome.prompt_tokens)
    changed = sum(len(counts) > 1 for counts in tokens.values())
    if changed:
        found.append(f"{changed} prompts had other token counts from one replay to another")
    return found


def _workers(repeats: Sequence[ArmEvidence]) -> str:
    """How many workers the replays of an arm had, such as "4" or "3 to 4"."""
    counts = sorted({len(arm.before.workers) for arm in repeats})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _arm_reasons(
    arm: ArmEvidence, requests: int, max_client_lag_ms: float, errors_count: bool
) -> list[str]:
    found = []
    outcomes = arm.outcomes
    sent = sum(outcome.sent_s is not None for outcome in outcomes)
    if sent != requests:
        found.append(f"{sent} of the file's {requests} requests were sent")
    lag_ms = spread(outcome.lag_ms for outcome in outcomes).p99
    if lag_ms is not None and lag_ms > max_client_lag_ms:
        found.append(
            f"the client lagged: 1 % of the requests went out {lag_ms:.0f} ms or more after "
            f"their intended time (limit {max_client_lag_ms:g} ms); use a quieter machine or a "
            "lower rate"
        )
    for status in ("failed", "unfinished") if errors_count else ():
        bad = [outcome for outcome in outcomes if outcome.status == status]
        if bad:
            verb = "failed" if status == "failed" else "did not finish"
            found.append(f"{len(bad)} requests {verb}, mostly: {_usual(bad)}")
    unknown = sum(
        outcome.status == "ok" and (outcome.prompt_tokens is None or outcome.cached_tokens is None)
        for outcome in outcomes
    )
    if unknown:
        found.append(f"{unknown} answers carried no usage, so their token counts are unknown")
    return found + _fleet_reasons(arm, sent, errors_count)


def _fleet_reasons(arm: ArmEvidence, sent: int, errors_count: bool) -> list[str]:
    found = []
    before, after = arm.before, arm.after
    if arm.flushed and before.blocks:
        found.append(f"caches were not empty at its start: {before.blocks} blocks were left")
    routed = after.requests_total - before.requests_total
    if routed > sent:
        found.append(f"the gateway routed {routed - sent} requests that were not ours")
    elif routed < sent and errors_count:
        found.append(f"the gateway routed only {routed} of our {sent} requests")
    strangers = Counter(
        outcome.policy for outcome in arm.outcomes if outcome.policy not in ("", arm.policy)
    )
    if strangers:
        listed = ", ".join(f"{count} by {name}" for name, count in sorted(strangers.items()))
        found.append(f"the policy was changed while it ran: {listed}")
    if not before.quiet:
        found.append("other requests were running at its start")
    if not after.quiet:
        found.append("requests were still running after its end")
    lives = [{(worker.worker, worker.epoch) for worker in view.workers} for view in (before, after)]
    if lives[0] != lives[1]:
        changed = sorted({worker for worker, _ in lives[0] ^ lives[1]})
        found.append(f"workers came, went or lost their cache: {', '.join(changed)}")
    stale = next((view.bus for view in (before, after) if view.bus.stale), None)
    if stale is not None:
        found.append(f"the gateway's index was stale: {stale.reason or 'no reason given'}")
    return found


def _usual(outcomes: Sequence[Outcome]) -> str:
    return Counter(outcome.error for outcome in outcomes).most_common(1)[0][0] or "no reason given"
