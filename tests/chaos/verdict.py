"""What came of a load: each request is compared with the answer of an undisturbed run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.load import Outcome

SILENCE_S = 3.5
"""A stream that sends nothing for longer hangs: 3 s, and half a second for the first token at
another worker."""


@dataclass(frozen=True)
class Reference:
    """The right answer to a request, and how long it took on an undisturbed pool."""

    text: str
    completion_tokens: int | None
    elapsed_s: float


References = Mapping[int, Sequence[Reference]]
"""Request number -> its right answers: more than one where the weights were changed."""


@dataclass
class Tally:
    """Counts of requests.

    accepted   answered with status 200
    refused    status 429, or one that the fault expects
    failed     any other status, or no answer
    broken     accepted, but ended before its end
    wrong      text or token count differs from the undisturbed answer
    hung       silent for longer than allowed; counted beside the others
    bad_at     when the last request was sent that failed, broke, was wrong or hung
    reasons    what was said, how often
    """

    sent: int = 0
    accepted: int = 0
    refused: int = 0
    failed: int = 0
    broken: int = 0
    wrong: int = 0
    hung: int = 0
    slowest_s: float = 0.0
    silence_s: float = 0.0
    bad_at: float | None = None
    reasons: Counter[str] = field(default_factory=Counter)


def judge(
    outcomes: Iterable[Outcome],
    references: References,
    *,
    allowed_silence_s: float = SILENCE_S,
    refusals: frozenset[int] = frozenset({429}),
) -> Tally:
    """Count the outcomes. `refusals` are the statuses that count as refused."""
    tally = Tally()
    for outcome in outcomes:
        tally.sent += 1
        right = references[outcome.ask]
        before = (tally.failed, tally.broken, tally.wrong, tally.hung)
        if outcome.status == 200:
            tally.accepted += 1
            _judge_answer(tally, outcome, right)
        elif outcome.status in refusals:
            tally.refused += 1
        else:
            tally.failed += 1
            tally.reasons[f"{outcome.status or 'no status'}: {outcome.error}"] += 1
        silence_s = _silence_s(outcome, right)
        tally.silence_s = max(tally.silence_s, silence_s)
        tally.slowest_s = max(tally.slowest_s, outcome.elapsed_s)
        tally.hung += silence_s > allowed_silence_s
        if (tally.failed, tally.broken, tally.wrong, tally.hung) != before:
            tally.bad_at = max(tally.bad_at or 0.0, outcome.sent_at)
    return tally


def _judge_answer(tally: Tally, outcome: Outcome, right: Sequence[Reference]) -> None:
    if not outcome.finished:
        tally.broken += 1
        tally.reasons[outcome.error] += 1
        tally.wrong += not any(each.text.startswith(outcome.text) for each in right)
    elif not any(_equal(outcome, each) for each in right):
        tally.wrong += 1
        closest = max(right, key=lambda each: _same(outcome.text, each.text))
        tally.reasons[_difference(outcome, closest)] += 1


def _equal(outcome: Outcome, right: Reference) -> bool:
    return (outcome.text, outcome.completion_tokens) == (right.text, right.completion_tokens)


def _difference(outcome: Outcome, right: Reference) -> str:
    same = _same(outcome.text, right.text)
    if same == len(outcome.text) == len(right.text):
        return f"usage says {outcome.completion_tokens} tokens instead of {right.completion_tokens}"
    got, wanted = (text[same : same + 20] for text in (outcome.text, right.text))
    return (
        f"the text differs from the undisturbed answer after {same} of {len(right.text)} "
        f"characters: {got!r} instead of {wanted!r}"
    )


def _same(text: str, other: str) -> int:
    """Leading characters in which they agree."""
    same = 0
    for one, another in zip(text, other, strict=False):
        if one != another:
            break
        same += 1
    return same


def _silence_s(outcome: Outcome, right: Sequence[Reference]) -> float:
    """Of a whole answer, which is silent until it is ready, what it took longer than usual."""
    if outcome.stream:
        return outcome.silence_s
    return max(0.0, outcome.silence_s - max(each.elapsed_s for each in right))
