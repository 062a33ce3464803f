"""The command `loadgen`.

Exit codes: 0 for a valid run, 3 for an invalid one, 1 where nothing could be run, 2 for wrong
usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from loadgen import wording
from loadgen.admin import AdminError
from loadgen.arrivals import ArrivalError
from loadgen.compare import CompareOptions, OptionError, RunOptions, compare, run
from loadgen.measures import SloError, parse_slo
from loadgen.progress import Bars
from loadgen.report import REPORT_FILE
from loadgen.requests import RequestFileError
from loadgen.summary import Summary
from loadgen.workloads import SharedPrefix, WorkloadError

EXIT_VALID, EXIT_FAILED, EXIT_USAGE, EXIT_INVALID, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
WIDTH_WITHOUT_TERMINAL = 150
KNOWN_ERRORS = (AdminError, RequestFileError)
USAGE_ERRORS = (ArrivalError, OptionError, SloError, WorkloadError)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Load for a gateway: replay requests, measure, compare policies.\n\n"
    "Exit code 0: a valid run; 3: an invalid one (the reasons are printed); 1: nothing could "
    "be run; 2: wrong usage; 130: interrupted.",
)

Url = Annotated[str, typer.Option("--url", help="Base URL of the gateway.")]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder of the results [out/COMMAND-TIME].")
]
RequestFile = Annotated[
    Path | None, typer.Option("--requests", help="Replay this request file; make none.")
]
Workload = Annotated[str, typer.Option("--workload", help="The only one so far: shared_prefix.")]
Groups = Annotated[int, typer.Option("--groups", help="System prompts.")]
Users = Annotated[int, typer.Option("--users", help="Users in a group.")]
Turns = Annotated[int, typer.Option("--turns", help="Questions of a user.")]
SystemTokens = Annotated[
    int, typer.Option("--system-tokens", help="Tokens of a system prompt, approximately.")
]
OutputTokens = Annotated[int, typer.Option("--output-tokens", help="Tokens of an answer at most.")]
ThinkTime = Annotated[
    float, typer.Option("--think-time-s", help="Least pause between two turns of a user.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Let every answer run to --output-tokens.")
]
Rate = Annotated[
    float, typer.Option("--request-rate", "--rate", help="Requests a second (Poisson).")
]
Seed = Annotated[int, typer.Option("--seed")]
Model = Annotated[str, typer.Option("--model", help="Model to ask for [the first one served].")]
Goodput = Annotated[
    list[str] | None,
    typer.Option("--goodput", help="Bounds in ms, such as --goodput ttft:2000 tpot:100."),
]
Warmups = Annotated[
    int, typer.Option("--num-warmups", min=0, help="Uncounted requests before each flush.")
]
Timeout = Annotated[
    float, typer.Option("--timeout-s", min=0.001, help="A slower request is unfinished.")
]
Lag = Annotated[
    float, typer.Option("--max-client-lag-ms", help="Bound on the client's p99 lag, else invalid.")
]
ApiKey = Annotated[str, typer.Option("--api-key", envvar="STEMROUTE_GATEWAY_API_KEY")]
AdminKey = Annotated[str, typer.Option("--admin-key", envvar="STEMROUTE_GATEWAY_ADMIN_KEY")]

_SHARED, _COMPARE = SharedPrefix(), CompareOptions(url="")


@app.command("compare")
def compare_command(
    url: Url = "http://127.0.0.1:8000",
    policies: Annotated[
        str, typer.Option("--policies", help="Separated by commas; the first is the base.")
    ] = ",".join(_COMPARE.policies),
    out: Out = None,
    requests: RequestFile = None,
    workload: Workload = "shared_prefix",
    groups: Groups = _SHARED.groups,
    users: Users = _SHARED.users,
    turns: Turns = _SHARED.turns,
    system_tokens: SystemTokens = _SHARED.system_tokens,
    output_tokens: OutputTokens = _SHARED.output_tokens,
    think_time_s: ThinkTime = _SHARED.think_time_s,
    ignore_eos: IgnoreEos = False,
    request_rate: Rate = _COMPARE.request_rate,
    seed: Seed = 0,
    model: Model = "",
    goodput: Goodput = None,
    num_warmups: Warmups = _COMPARE.num_warmups,
    timeout_s: Timeout = _COMPARE.timeout_s,
    max_client_lag_ms: Lag = _COMPARE.max_client_lag_ms,
    api_key: ApiKey = "",
    admin_key: AdminKey = "",
) -> None:
    """Replay the same requests through each policy, each time from cold, and compare."""
    folder = out or _default_folder("compare")
    _check_workload(workload)
    options = CompareOptions(
        url=url,
        policies=split_policies(policies),
        requests=requests,
        workload=SharedPrefix(
            groups=groups,
            users=users,
            turns=turns,
            system_tokens=system_tokens,
            output_tokens=output_tokens,
            think_time_s=think_time_s,
            ignore_eos=ignore_eos,
        ),
        model=model,
        request_rate=request_rate,
        seed=seed,
        slo=parse_slo(goodput or ()),
        num_warmups=num_warmups,
        timeout_s=timeout_s,
        max_client_lag_ms=max_client_lag_ms,
        api_key=api_key,
        admin_key=admin_key,
        out=folder,
    )
    _finish(lambda bars: compare(options, bars), folder)


@app.command("run")
def run_command(
    url: Url = "http://127.0.0.1:8000",
    out: Out = None,
    requests: RequestFile = None,
    workload: Workload = "shared_prefix",
    groups: Groups = _SHARED.groups,
    users: Users = _SHARED.users,
    turns: Turns = _SHARED.turns,
    system_tokens: SystemTokens = _SHARED.system_tokens,
    output_tokens: OutputTokens = _SHARED.output_tokens,
    think_time_s: ThinkTime = _SHARED.think_time_s,
    ignore_eos: IgnoreEos = False,
    request_rate: Rate = _COMPARE.request_rate,
    seed: Seed = 0,
    model: Model = "",
    goodput: Goodput = None,
    flush: Annotated[bool, typer.Option("--flush", help="Empty all caches first.")] = False,
    num_warmups: Warmups = _COMPARE.num_warmups,
    timeout_s: Timeout = _COMPARE.timeout_s,
    max_client_lag_ms: Lag = _COMPARE.max_client_lag_ms,
    api_key: ApiKey = "",
    admin_key: AdminKey = "",
) -> None:
    """Replay requests once, under the policy that the gateway has.

    Caches stay as they are unless --flush is given; warm-ups are sent only then.
    """
    folder = out or _default_folder("run")
    _check_workload(workload)
    options = RunOptions(
        url=url,
        requests=requests,
        workload=SharedPrefix(
            groups=groups,
            users=users,
            turns=turns,
            system_tokens=system_tokens,
            output_tokens=output_tokens,
            think_time_s=think_time_s,
            ignore_eos=ignore_eos,
        ),
        model=model,
        request_rate=request_rate,
        seed=seed,
        slo=parse_slo(goodput or ()),
        flush=flush,
        num_warmups=num_warmups,
        timeout_s=timeout_s,
        max_client_lag_ms=max_client_lag_ms,
        api_key=api_key,
        admin_key=admin_key,
        out=folder,
    )
    _finish(lambda bars: run(options, bars), folder)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; always ends in SystemExit."""
    given = spread_goodput(sys.argv[1:] if arguments is None else arguments)
    console = _console(stderr=True)
    try:
        app(args=given, prog_name="loadgen")
    except KNOWN_ERRORS as error:
        console.print(f"loadgen: {error}", style="red", markup=False, highlight=False)
        raise SystemExit(EXIT_FAILED) from None
    except USAGE_ERRORS as error:
        console.print(f"loadgen: {error}", style="red", markup=False, highlight=False)
        raise SystemExit(EXIT_USAGE) from None


def spread_goodput(arguments: Sequence[str]) -> list[str]:
    """Let one `--goodput` take several bounds: repeat the flag before each of them."""
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
    """The figures of every arm."""
    result = Table(
        caption="times from the intended send time, in milliseconds", caption_justify="left"
    )
    for column in wording.COLUMNS:
        result.add_column(column, justify="left" if column == "policy" else "right")
    for name, arm in summary.arms.items():
        result.add_row(*wording.cells(name, arm))
    return result


def _finish(work: Callable[[Bars], Summary], folder: Path) -> None:
    """Do the work under progress bars, tell what came out, end with the exit code."""
    errors = _console(stderr=True)
    try:
        with Bars(errors) as bars:
            summary = work(bars)
    except KeyboardInterrupt:
        errors.print("loadgen: interrupted; the gateway has its policy back", style="red")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _tell(summary, folder)
    raise typer.Exit(EXIT_VALID if summary.valid else EXIT_INVALID)


def _tell(summary: Summary, folder: Path) -> None:
    console = _console()

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    console.print(table(summary))
    if summary.emulated:
        say("emulated accelerators: times follow a cost model")
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


def _default_folder(command: str) -> Path:
    return Path("out") / f"{command}-{datetime.now():%Y%m%d-%H%M%S}"


def _check_workload(name: str) -> None:
    if name != "shared_prefix":
        raise OptionError(f"there is no workload {name!r}; there is: shared_prefix")
