"""Writes the results: JSON, CSV and an HTML report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from markupsafe import Markup

from loadgen import plots, plots_time, wording
from loadgen.observer import LoadSample, Observations
from loadgen.outcomes import Outcome, outcome_line
from loadgen.pages import page
from loadgen.plan import RequestSource
from loadgen.requests import Body, Request
from loadgen.summary import Summary, encode_summary
from loadgen.tables import arms_csv, load_csv, requests_csv
from loadgen.worst import worst_requests

SUMMARY_FILE = "summary.json"
OUTCOMES_FILE = "requests.jsonl"
REPORT_FILE = "report.html"
EXAMPLES = 4
TEXT_CHARACTERS = 400


class Evidence(NamedTuple):
    """What a summary was made of; `seen` holds the repeats of each arm."""

    outcomes: Sequence[Outcome]
    requests: Sequence[Request]
    seen: Mapping[str, Sequence[Observations]]


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


class LoadPlot(NamedTuple):
    """The load of an arm's workers over time; a worker's colour is its place in `workers`."""

    arm: str
    colour: int
    workers: list[str]
    batch: Markup
    pending: Markup


def write_results(folder: Path, summary: Summary, evidence: Evidence) -> None:
    """Write all files into `folder`, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = evidence.outcomes
    (folder / SUMMARY_FILE).write_bytes(encode_summary(summary))
    (folder / OUTCOMES_FILE).write_bytes(b"".join(outcome_line(outcome) for outcome in outcomes))
    for name, text in (
        ("arms.csv", arms_csv(summary)),
        ("requests.csv", requests_csv(outcomes)),
        ("load.csv", load_csv(evidence.seen)),
        (REPORT_FILE, render_report(summary, evidence)),
    ):
        (folder / name).write_text(text, encoding="utf-8")


def render_report(summary: Summary, evidence: Evidence) -> str:
    """One HTML page that needs nothing else: no network, no script."""
    return page(
        "report_page.html",
        summary=summary,
        columns=wording.COLUMNS,
        rows=[wording.cells(name, arm, summary.ideal) for name, arm in summary.arms.items()],
        lines=[wording.ratio_line(name, paired) for name, paired in summary.paired.items()],
        size_line=wording.size_line(summary),
        load_lines=wording.load_lines(summary),
        slo=wording.slo_text(summary.slo),
        arrivals=wording.arrivals_text(summary.source.arrivals),
        parameters=parameters(summary.source),
        colour_of={name: index % plots.COLOURS for index, name in enumerate(summary.arms)},
        plots={name: Markup(drawing) for name, drawing in _drawings(summary, evidence).items()},
        load_plots=_load_plots(summary, evidence),
        worst=worst_requests(evidence.outcomes, evidence.seen),
        examples=_examples(summary, evidence),
    )


def _drawings(summary: Summary, evidence: Evidence) -> dict[str, str]:
    good = {
        name: [o for o in evidence.outcomes if o.arm == name and o.status == "ok"]
        for name in summary.arms
    }
    ideal = summary.ideal.cached_token_ratio if summary.ideal else None
    return {
        "ttft": plots.cumulative(
            {name: _known(outcome.ttft_ms for outcome in arm) for name, arm in good.items()},
            "time to first token",
        ),
        "tpot": plots.cumulative(
            {name: _known(outcome.tpot_ms for outcome in arm) for name, arm in good.items()},
            "time per output token",
        ),
        "ratios": plots.ratio_bars(
            {name: arm.cached_token_ratio for name, arm in summary.arms.items()}, ideal
        ),
        "hits": plots_time.hits_over_time(
            {
                name: [(o.intended_s, o.prompt_tokens or 0, o.cached_tokens or 0) for o in arm]
                for name, arm in good.items()
            }
        ),
        "time": plots_time.over_time(
            {
                name: [(o.intended_s, o.ttft_ms) for o in arm if o.ttft_ms is not None]
                for name, arm in good.items()
            },
            "Time to first token",
        ),
        "work": plots.work_bars({name: arm.workers for name, arm in summary.arms.items()}),
    }


def _load_plots(summary: Summary, evidence: Evidence) -> list[LoadPlot]:
    """Of each arm's first replay; all arms on one scale."""
    samples = {name: evidence.seen[name][0].samples for name in summary.arms}
    everything = [sample for of_arm in samples.values() for sample in of_arm]
    if not everything:
        return []
    top_batch = max(sample.running + sample.waiting for sample in everything)
    top_pending = max(sample.pending_prefill_tokens for sample in everything)
    return [
        LoadPlot(
            name,
            index % plots.COLOURS,
            sorted({sample.worker for sample in of_arm}),
            Markup(
                plots_time.load_over_time(
                    _series(of_arm, lambda s: s.running + s.waiting), top_batch, f"{name}: requests"
                )
            ),
            Markup(
                plots_time.load_over_time(
                    _series(of_arm, lambda s: s.pending_prefill_tokens),
                    top_pending,
                    f"{name}: pending prefill tokens",
                )
            ),
        )
        for index, (name, of_arm) in enumerate(samples.items())
    ]


def _series(
    samples: Iterable[LoadSample], value: Callable[[LoadSample], float]
) -> dict[str, list[tuple[float, float]]]:
    """Points of each worker, by name."""
    points: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        points.setdefault(sample.worker, []).append((sample.at_s, value(sample)))
    return dict(sorted(points.items()))


def parameters(asked: RequestSource) -> str:
    """The workload or trace, such as "rag: documents 100, order kept"."""
    source = asked.workload or asked.trace
    if source is None:
        return ""
    fields = msgspec.to_builtins(source)
    if "options" in fields:
        options = fields.pop("options")
        fields |= {name: value for name, value in options.items() if value is not None}
    name = fields.pop("name", None) or "trace"
    told = ", ".join(f"{key.replace('_', ' ')} {_plain(value)}" for key, value in fields.items())
    return f"{name}: {told}"


def _plain(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _examples(summary: Summary, evidence: Evidence) -> list[Example]:
    """A few requests that every arm answered in its first replay, evenly spread over the run."""
    answers: dict[str, list[Outcome]] = {}
    for outcome in evidence.outcomes:
        if outcome.status == "ok" and outcome.repeat == 0:
            answers.setdefault(outcome.id, []).append(outcome)
    complete = [r for r in evidence.requests if len(answers.get(r.id, ())) == len(summary.arms)]
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
                    outcome.text[:TEXT_CHARACTERS],
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
    return text[-TEXT_CHARACTERS:]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
