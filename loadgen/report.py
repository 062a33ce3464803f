"""The results on disk: `summary.json`, `requests.jsonl` and a report to show to others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import jinja2
import msgspec
from markupsafe import Markup

from loadgen import plots, wording
from loadgen.outcomes import Outcome, outcome_line
from loadgen.requests import Body, Request
from loadgen.summary import Summary, encode_summary

SUMMARY_FILE = "summary.json"
OUTCOMES_FILE = "requests.jsonl"
REPORT_FILE = "report.html"
EXAMPLES = 6
QUESTION_CHARACTERS = 400


class Answer(NamedTuple):
    """One arm's answer to an example."""

    arm: str
    colour: int
    worker: str
    ttft: str
    reused: str
    text: str


class Example(NamedTuple):
    """A request and what each arm answered."""

    id: str
    question: str
    answers: list[Answer]


def write_results(
    folder: Path, summary: Summary, outcomes: Sequence[Outcome], requests: Sequence[Request]
) -> None:
    """Write the three files into `folder`, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY_FILE).write_bytes(encode_summary(summary))
    (folder / OUTCOMES_FILE).write_bytes(b"".join(outcome_line(outcome) for outcome in outcomes))
    (folder / REPORT_FILE).write_text(render_report(summary, outcomes, requests), encoding="utf-8")


def render_report(
    summary: Summary, outcomes: Sequence[Outcome], requests: Sequence[Request]
) -> str:
    """One HTML page that needs nothing else: no network, no script."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(
        files("loadgen").joinpath("report_template.html").read_text(encoding="utf-8")
    )
    good = {
        name: [outcome for outcome in outcomes if outcome.arm == name and outcome.status == "ok"]
        for name in summary.arms
    }
    ideal = summary.ideal.cached_token_ratio if summary.ideal else None
    drawings = {
        "cdf": plots.cumulative(
            {name: _known(outcome.ttft_ms for outcome in arm) for name, arm in good.items()},
            "time to first token",
        ),
        "ratios": plots.ratio_bars(
            {name: arm.cached_token_ratio for name, arm in summary.arms.items()}, ideal
        ),
        "time": plots.over_time(
            {
                name: [
                    (outcome.intended_s, outcome.ttft_ms)
                    for outcome in arm
                    if outcome.ttft_ms is not None
                ]
                for name, arm in good.items()
            },
            "Time to first token",
        ),
        "work": plots.work_bars({name: arm.workers for name, arm in summary.arms.items()}),
    }
    return template.render(
        summary=summary,
        columns=wording.COLUMNS,
        rows=[wording.cells(name, arm) for name, arm in summary.arms.items()],
        lines=[wording.ratio_line(name, paired) for name, paired in summary.paired.items()],
        size_line=wording.size_line(summary),
        colours=plots.COLOURS,
        plots={name: Markup(drawing) for name, drawing in drawings.items()},
        examples=_examples(summary, outcomes, requests),
        percent=wording.percent,
        milliseconds=wording.milliseconds,
    )


def _examples(
    summary: Summary, outcomes: Sequence[Outcome], requests: Sequence[Request]
) -> list[Example]:
    """A few requests that every arm answered, evenly spread over the run."""
    answers: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.status == "ok":
            answers.setdefault(outcome.id, []).append(outcome)
    complete = [r for r in requests if len(answers.get(r.id, ())) == len(summary.arms)]
    step = max(1, len(complete) // EXAMPLES)
    colours = {name: index % plots.COLOURS for index, name in enumerate(summary.arms)}
    return [
        Example(
            request.id,
            question(request),
            [
                Answer(
                    outcome.arm,
                    colours[outcome.arm],
                    outcome.worker,
                    wording.milliseconds(outcome.ttft_ms),
                    f"{outcome.cached_tokens or 0:,} of {outcome.prompt_tokens or 0:,}",
                    outcome.text,
                )
                for outcome in answers[request.id]
            ],
        )
        for request in complete[::step][:EXAMPLES]
    ]


def question(request: Request) -> str:
    """What the user says last; of a completion, the end of its prompt."""
    body = msgspec.json.decode(request.body, type=Body)
    raw = body.messages[-1].content if body.messages else body.prompt
    content = msgspec.json.decode(raw)
    text = content if isinstance(content, str) else bytes(raw).decode()
    return text[-QUESTION_CHARACTERS:]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
