"""The command-line flags that commands share: declared once, handed to each as one object.

    @app.command("run")
    @with_flags(ReplayFlags)
    def run_command(flags: ReplayFlags, flush: ... = False) -> None

Parameters of workloads become flags by themselves: the field `system_tokens` is
`--system-tokens` for every workload that has it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import typing
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from loadgen.arm import OptionError, ReplayOptions
from loadgen.arrivals import Arrivals, Ramp
from loadgen.measures import Slo, parse_slo
from loadgen.plan import Load, TraceSource
from loadgen.traces import TraceOptions
from loadgen.workloads import WORKLOADS, make_workload

LOAD, TRACE, TIMES, LIVE = "Workload", "Traces", "Arrivals", "Gateway and measurement"
DEFAULT_WORKLOAD = "shared_prefix"
_REPLAY = ReplayOptions(url="")


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


@dataclasses.dataclass(kw_only=True)
class LoadFlags:
    """What is sent and when. `parameters` are the given workload parameters."""

    parameters: dict[str, object] = dataclasses.field(default_factory=dict)
    requests: Annotated[
        Path | None,
        _option(LOAD, "Replay this request file instead of generating one.", "--requests"),
    ] = None
    workload: Annotated[
        str | None,
        _option(LOAD, f"One of {', '.join(WORKLOADS)} ({DEFAULT_WORKLOAD}).", "--workload"),
    ] = None
    trace: Annotated[
        list[Path] | None,
        _option(
            TRACE,
            "Replay this trace: a file (plain, .gz, .xz, .tar.*) or a folder. May be repeated.",
            "--trace",
        ),
    ] = None
    format: Annotated[
        str, _option(TRACE, "Trace format: mooncake, bailian, lmcache or azure.", "--format")
    ] = "mooncake"
    speed_up: Annotated[
        float | None, _option(TRACE, "Replay the trace this many times faster.", "--speed-up")
    ] = None
    spread_timestamps: Annotated[
        bool | None,
        _option(
            TRACE,
            "Spread requests that share a coarse timestamp up to the next one (default: spread).",
            "--spread-timestamps/--no-spread-timestamps",
        ),
    ] = None
    input_scale: Annotated[
        float | None,
        _option(
            TRACE, "Scale all prompt lengths by this factor; sharing is kept.", "--input-scale"
        ),
    ] = None
    output_scale: Annotated[
        float | None, _option(TRACE, "Scale all output lengths by this factor.", "--output-scale")
    ] = None
    max_input_tokens: Annotated[
        int | None,
        _option(TRACE, "Truncate longer prompts to their first tokens.", "--max-input-tokens"),
    ] = None
    max_output_tokens: Annotated[
        int | None, _option(TRACE, "Truncate longer outputs.", "--max-output-tokens")
    ] = None
    request_rate: Annotated[
        float | None,
        _option(
            TIMES,
            "Requests per second; inf sends all at once (default: 2; for a trace, its own times).",
            "--request-rate",
            "--rate",
        ),
    ] = None
    burstiness: Annotated[
        float,
        _option(
            TIMES,
            "1 is Poisson, below 1 is burstier, above 1 more regular; inf: constant intervals.",
        ),
    ] = 1.0
    ramp_up_strategy: Annotated[str | None, _option(TIMES, "linear or exponential.")] = None
    ramp_up_start_rps: Annotated[
        float | None, _option(TIMES, "Rate at the start, in requests per second.")
    ] = None
    ramp_up_end_rps: Annotated[
        float | None, _option(TIMES, "Rate at the end, in requests per second.")
    ] = None
    seed: Annotated[int, _option(TIMES, "Seed of texts and arrival times.", "--seed")] = 0

    def load(self) -> Load:
        """The load that the flags describe. Raises OptionError or WorkloadError."""
        parameters = dict(self.parameters)
        trace = self._trace(parameters)
        if self.requests is not None or trace is not None:
            source = "--requests" if self.requests is not None else "--trace"
            unused = [*parameters, *(["workload"] if self.workload is not None else [])]
            if unused:
                raise OptionError(f"{source} takes no {', '.join(map(_flag, unused))}")
            if self.requests is not None and (trace is not None or self._arrivals() is not None):
                raise OptionError(
                    "--requests replays a file as it is: leave out --trace and arrival flags"
                )
            return Load(
                requests=self.requests, trace=trace, arrivals=self._arrivals(), seed=self.seed
            )
        workload = make_workload(self.workload or DEFAULT_WORKLOAD, parameters)
        return Load(workload=workload, arrivals=self._arrivals(), seed=self.seed)

    def _trace(self, parameters: dict[str, object]) -> TraceSource | None:
        names = [name for name in TraceOptions.__struct_fields__ if hasattr(self, name)]
        names.remove("seed")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if not self.trace:
            if given:
                raise OptionError(f"{', '.join(map(_flag, given))} needs --trace")
            return None
        if "num_prompts" in parameters:
            given["num_prompts"] = parameters.pop("num_prompts")
        return TraceSource(
            files=tuple(map(str, self.trace)),
            format=self.format,
            options=TraceOptions(seed=self.seed, **given),
        )

    def _arrivals(self) -> Arrivals | None:
        ramp = (self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.request_rate is None and self.burstiness == 1 and ramp == (None, None, None):
            return None
        if self.trace and self.request_rate is None and self.ramp_up_strategy is None:
            raise OptionError("--trace has its own times: give --request-rate to use others")
        if self.request_rate is not None and self.ramp_up_strategy is not None:
            raise OptionError("a ramp sets the rate: leave out --request-rate")
        default = Arrivals()
        return Arrivals(
            request_rate=default.request_rate if self.request_rate is None else self.request_rate,
            burstiness=self.burstiness,
            ramp_up_strategy=typing.cast(Ramp | None, self.ramp_up_strategy),
            ramp_up_start_rps=self.ramp_up_start_rps,
            ramp_up_end_rps=self.ramp_up_end_rps,
        )


@dataclasses.dataclass(kw_only=True)
class ReplayFlags(LoadFlags):
    """Flags that all commands for a live gateway share."""

    url: Annotated[str, _option(LIVE, "Base URL of the gateway.", "--url")] = (
        "http://127.0.0.1:8000"
    )
    out: Annotated[
        Path | None, _option(LIVE, "Output directory (default: out/COMMAND-TIME).", "--out")
    ] = None
    model: Annotated[
        str, _option(LIVE, "Model name (default: the first one served).", "--model")
    ] = ""
    goodput: Annotated[
        list[str] | None,
        _option(LIVE, "Latency bounds in ms, such as --goodput ttft:2000 tpot:100.", "--goodput"),
    ] = None
    max_concurrency: Annotated[
        int | None,
        _option(
            LIVE,
            "Closed loop with at most this many requests in flight. It hides queueing; the "
            "rate is inf unless given.",
            "--max-concurrency",
        ),
    ] = None
    num_warmups: Annotated[
        int,
        _option(LIVE, "Warm-up requests before each flush, not counted.", "--num-warmups", min=0),
    ] = _REPLAY.num_warmups
    timeout_s: Annotated[
        float,
        _option(
            LIVE, "A request that takes longer counts as unfinished.", "--timeout-s", min=0.001
        ),
    ] = _REPLAY.timeout_s
    max_client_lag_ms: Annotated[
        float,
        _option(
            LIVE,
            "Limit on the client's p99 send lag; above it the run is invalid.",
            "--max-client-lag-ms",
        ),
    ] = _REPLAY.max_client_lag_ms
    sample_interval_s: Annotated[
        float,
        _option(
            LIVE,
            "Interval between samples of the workers' load; 0: no samples.",
            "--sample-interval-s",
        ),
    ] = _REPLAY.sample_interval_s
    explain: Annotated[
        bool,
        _option(
            LIVE, "Fetch the routing decisions of the slowest requests.", "--explain/--no-explain"
        ),
    ] = _REPLAY.explain
    api_key: Annotated[str, _option(LIVE, "", "--api-key", envvar="STEMROUTE_GATEWAY_API_KEY")] = ""
    admin_key: Annotated[
        str, _option(LIVE, "", "--admin-key", envvar="STEMROUTE_GATEWAY_ADMIN_KEY")
    ] = ""

    def slo(self) -> Slo:
        """The bounds of --goodput. Raises SloError."""
        return parse_slo(self.goodput or ())

    def load(self) -> Load:
        """As of `LoadFlags`; a closed loop is offered everything at once unless told otherwise."""
        load = super().load()
        if self.max_concurrency is None or load.requests or load.arrivals:
            return load
        return msgspec.structs.replace(load, arrivals=Arrivals(request_rate=math.inf))

    def options(self, out: Path) -> dict[str, Any]:
        """The fields of `ReplayOptions`."""
        return {
            "url": self.url,
            "load": self.load(),
            "model": self.model,
            "slo": self.slo(),
            "max_concurrency": self.max_concurrency,
            "num_warmups": self.num_warmups,
            "timeout_s": self.timeout_s,
            "max_client_lag_ms": self.max_client_lag_ms,
            "sample_interval_s": self.sample_interval_s,
            "explain": self.explain,
            "api_key": self.api_key,
            "admin_key": self.admin_key,
            "out": out,
        }

    def folder(self, command: str) -> Path:
        """Where the results go."""
        return self.out or Path("out") / f"{command}-{datetime.now():%Y%m%d-%H%M%S}"


F = TypeVar("F", bound=LoadFlags)


def with_flags(kind: type[F]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, whose first parameter is `kind`, the flags of all of its fields."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(kind, include_extras=True)
        shared = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
            for field in dataclasses.fields(kind)
            if field.name != "parameters"
        ]
        workloads = _workload_parameters()
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            given = {p.name: values.pop(p.name) for p in workloads}
            fields = {p.name: values.pop(p.name) for p in shared}
            parameters = {name: value for name, value in given.items() if value is not None}
            command(kind(parameters=parameters, **fields), **values)

        parameters = [*own, *shared, *workloads]
        del wrapper.__wrapped__  # or its signature would be taken
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _workload_parameters() -> list[inspect.Parameter]:
    """One optional flag for each name of a parameter, whichever workloads have it."""
    told: dict[str, list[str]] = {}
    types: dict[str, Any] = {}
    for workload, kind in WORKLOADS.items():
        for field in msgspec.structs.fields(kind):
            hint, meta = typing.get_args(field.type)
            told.setdefault(field.name, []).append(
                f"{workload}: {meta.description} ({field.default})"
            )
            types[field.name] = str if typing.get_origin(hint) is typing.Literal else hint
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                types[name] | None,
                _option("Parameters of workloads", " ".join(told[name]), _flag(name)),
            ],
        )
        for name in told
    ]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
