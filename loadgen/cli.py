"""The command `loadgen`.

Exit codes: 0: valid run, 3: invalid run, 1: nothing could be run, 2: wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from loadgen import wording
from loadgen.admin import AdminError
from loadgen.arm import OptionError
from loadgen.arrivals import ArrivalError
from loadgen.compare import CompareOptions, RunOptions, compare, run
from loadgen.flags import ReplayFlags, with_flags
from loadgen.goodput import GoodputOptions, goodput
from loadgen.goodput_report import COLUMNS as GOODPUT_COLUMNS
from loadgen.goodput_report import goodput_rows
from loadgen.goodput_summary import GoodputSummary, findings
from loadgen.measures import SloError
from loadgen.progress import Bars
from loadgen.report import REPORT_FILE
from loadgen.requests import RequestFileError
from loadgen.simulation.command import SimulateFlags
from loadgen.simulation.run import simulate
from loadgen.summary import Summary
from loadgen.traces import TraceError
from loadgen.workloads import WorkloadError

EXIT_VALID, EXIT_FAILED, EXIT_USAGE, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
WIDTH_WITHOUT_TERMINAL = 150
KNOWN_ERRORS = (AdminError, RequestFileError, TraceError)
USAGE_ERRORS = (ArrivalError, OptionError, SloError, WorkloadError)

R = TypeVar("R")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Load generator for a gateway: replay requests, measure, compare policies.\n\n"
    "Exit code 0: a valid run; 3: an invalid one (the reasons are printed); 1: nothing could "
    "be run; 2: wrong usage; 130: interrupted.",
)

_COMPARE = CompareOptions(url="")
_GOODPUT = GoodputOptions(url="")
BOTH_POLICIES = ",".join(_COMPARE.policies)
Policies = Annotated[
    str,
    typer.Option("--policies", help="Policies, separated by commas; the first is the baseline."),
]


@app.command("compare")
@with_flags(ReplayFlags)
def compare_command(
    flags: ReplayFlags,
    policies: Policies = BOTH_POLICIES,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Replays per policy, interleaved.", min=1)
    ] = _COMPARE.repeats,
) -> None:
    """Replay the same requests with each policy, always with empty caches, and compare."""
    folder = flags.folder("compare")
    options = CompareOptions(
        policies=split_policies(policies), repeats=repeats, **flags.options(folder)
    )
    _finish(lambda bars: compare(options, bars), folder)


@app.command("run")
@with_flags(ReplayFlags)
def run_command(
    flags: ReplayFlags,
    flush: Annotated[bool, typer.Option("--flush", help="Flush all caches first.")] = False,
) -> None:
    """Replay requests once with the gateway's current policy.

    Caches are kept unless --flush is given. Warm-up requests are sent only with --flush.
    """
    folder = flags.folder("run")
    options = RunOptions(flush=flush, **flags.options(folder))
    _finish(lambda bars: run(options, bars), folder)


@app.command("goodput")
@with_flags(ReplayFlags)
def goodput_command(
    flags: ReplayFlags,
    policies: Policies = BOTH_POLICIES,
    attainment: Annotated[
        float, typer.Option("--attainment", help="Share of requests that must meet the bounds.")
    ] = _GOODPUT.attainment,
    precision: Annotated[
        float, typer.Option("--precision", help="Relative precision of the rate; 0.1 is 10 %.")
    ] = _GOODPUT.precision,
    max_trials: Annotated[
        int, typer.Option("--max-trials", help="Maximum number of replays per policy.", min=1)
    ] = _GOODPUT.max_trials,
) -> None:
    """Find the highest request rate at which each policy still meets the --goodput bounds.

    The search starts at --request-rate, or at the trace's own rate.
    """
    folder = flags.folder("goodput")
    options = GoodputOptions(
        policies=split_policies(policies),
        attainment=attainment,
        precision=precision,
        max_trials=max_trials,
        **flags.options(folder),
    )
    summary = _work(lambda bars: goodput(options, bars))
    console = _console()
    console.print(goodput_table(summary))
    for sentence in findings(summary):
        console.print(sentence, style="bold", markup=False, highlight=False, soft_wrap=True)
    for reason in summary.reasons:
        console.print(f"invalid: {reason}", style="red", markup=False, highlight=False)
    console.print(f"report: {folder / REPORT_FILE}", markup=False, highlight=False)
    raise typer.Exit(EXIT_VALID if summary.valid else EXIT_INVALID)


@app.command("simulate")
@with_flags(SimulateFlags)
def simulate_command(flags: SimulateFlags, policies: Policies = BOTH_POLICIES) -> None:
    """Replay requests with each policy in virtual time: needs no gateway and no workers."""
    folder = flags.folder()
    options = flags.options(split_policies(policies), folder)
    _finish(lambda bars: simulate(options, bars), folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; always raises SystemExit."""
    given = spread_goodput(sys.argv[1:] if arguments is None else arguments)
    console = _console(stderr=True)
    # Whoever ends us, the gateway gets its policy back as after Ctrl-C; also where a shell began us
    # in the background, which makes us ignore that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        app(args=given, prog_name="loadgen")
    except KNOWN_ERRORS as error:
        console.print(f"loadgen: {error}", style="red", markup=False, highlight=False)
        raise SystemExit(EXIT_FAILED) from None
    except USAGE_ERRORS as error:
        console.print(f"loadgen: {error}", style="red", markup=False, highlight=False)
        raise SystemExit(EXIT_USAGE) from None


def spread_goodput(arguments: Sequence[str]) -> list[str]:
    """Allow one `--goodput` to take several bounds: repeat the flag before each."""
    spread: list[str] = []
    taking = False
    for argument in arguments:
        if taking and re.fullmatch(r"[a-z0-9]+:[0-9.]+", argument):
            if spread[-1] != "--goodput":
                spread.append("--goodput")
        else:
            taking = argument == "--goodput"
        spread.append(argument)
    return spread


def split_policies(text: str) -> tuple[str, ...]:
    """Split at commas, but keep `name:a=1,b=2` together."""
    policies: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if policies and "=" in part and ":" not in part:
            policies[-1] += f",{part}"
        elif part:
            policies.append(part)
    return tuple(policies)


def table(summary: Summary) -> Table:
    """A table with the figures of every arm."""
    result = Table(
        caption="times from the intended send time, in milliseconds", caption_justify="left"
    )
    for column in wording.COLUMNS:
        result.add_column(column, justify="left" if column == "policy" else "right")
    for name, arm in summary.arms.items():
        result.add_row(*wording.cells(name, arm, summary.ideal))
    return result


def goodput_table(summary: GoodputSummary) -> Table:
    """A table with the highest rate of each policy."""
    result = Table(
        caption=f"highest rate at which {100 * summary.attainment:g} % of the requests met "
        f"{wording.slo_text(summary.slo)}"
        + ("; emulated accelerators: times follow a cost model" if summary.emulated else ""),
        caption_justify="left",
    )
    for column in GOODPUT_COLUMNS:
        result.add_column(column, justify="left" if column == "policy" else "right")
    for row in goodput_rows(summary):
        result.add_row(*row)
    return result


def _finish(work: Callable[[Bars], Summary], folder: Path) -> None:
    """Run `work` with progress bars, print the result, and exit with its code."""
    summary = _work(work)
    _tell(summary, folder)
    raise typer.Exit(EXIT_VALID if summary.valid else EXIT_INVALID)


def _work(work: Callable[[Bars], R]) -> R:
    errors = _console(stderr=True)
    try:
        with Bars(errors) as bars:
            return work(bars)
    except KeyboardInterrupt:
        errors.print("loadgen: interrupted; the gateway's policy was restored", style="red")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _tell(summary: Summary, folder: Path) -> None:
    console = _console()

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    console.print(table(summary))
    for line in wording.load_lines(summary):
        say(line)
    for sentence in summary.verdicts:
        say(sentence, "bold")
    for name, paired in summary.paired.items():
        say(wording.ratio_line(name, paired))
    if (size := wording.size_line(summary)) is not None:
        say(size)
    if summary.valid:
        say("valid", "green")
    for reason in summary.reasons:
        say(f"invalid: {reason}", "red")
    say(f"report: {folder / REPORT_FILE}")


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH_WITHOUT_TERMINAL)
    return console
