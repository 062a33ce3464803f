import math
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from loadgen.arm import OptionError, ReplayOptions
from loadgen.arrivals import Arrivals
from loadgen.flags import LoadFlags, ReplayFlags, with_flags
from loadgen.plan import Load, TraceSource
from loadgen.traces import TraceOptions
from loadgen.workloads import WORKLOADS, Rag, SharedPrefix, WorkloadError


def parse(*arguments, kind=ReplayFlags):
    """The flags object that a command gets, and its own flag."""
    app = typer.Typer()
    got = []

    @app.command()
    @with_flags(kind)
    def command(flags: kind, own: Annotated[int, typer.Option("--own")] = 1) -> None:
        got.append((flags, own))

    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return got[0]


def load(*arguments):
    return parse(*arguments)[0].load()


def test_without_flags_the_workload_is_the_default():
    flags, own = parse()
    assert own == 1
    assert flags.load() == Load(workload=SharedPrefix())


def test_a_commands_own_flags_stay_beside_the_shared_ones():
    flags, own = parse("--own", "5", "--seed", "7", kind=LoadFlags)
    assert (own, flags.seed) == (5, 7)


def test_parameters_reach_their_workload():
    assert load("--workload", "rag", "--documents", "9", "--order", "shuffled").workload == Rag(
        documents=9, order="shuffled"
    )
    assert load("--groups", "2", "--ignore-eos").workload == SharedPrefix(groups=2, ignore_eos=True)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_every_parameter_of_every_workload_has_a_flag(name):
    for field in msgspec.structs.fields(WORKLOADS[name]):
        if field.name == "ignore_eos":
            continue
        flag = f"--{field.name.replace('_', '-')}"
        workload = load("--workload", name, flag, str(field.default)).workload
        assert getattr(workload, field.name) == field.default


def test_a_parameter_of_another_workload_is_refused_by_name():
    with pytest.raises(WorkloadError, match="rag has no parameter groups"):
        load("--workload", "rag", "--groups", "3")


def test_arrivals_are_named_as_in_vllm_bench():
    assert load("--request-rate", "3", "--burstiness", "0.5").arrivals == Arrivals(
        request_rate=3, burstiness=0.5
    )
    assert load("--request-rate", "inf").arrivals == Arrivals(request_rate=math.inf)
    ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "5"]
    assert load(*ramp).arrivals == Arrivals(
        ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=5
    )


def test_a_closed_loop_is_offered_everything_at_once_unless_a_rate_is_given():
    assert load("--max-concurrency", "4").arrivals == Arrivals(request_rate=math.inf)
    both = load("--max-concurrency", "4", "--request-rate", "2")
    assert both.arrivals == Arrivals(request_rate=2)


def test_a_trace_has_its_own_times_and_its_own_flags():
    found = load("--trace", "a", "--trace", "b", "--format", "azure", "--speed-up", "3",
                 "--no-spread-timestamps", "--num-prompts", "9", "--seed", "2")  # fmt: skip
    assert found.arrivals is None
    assert found.trace == TraceSource(
        files=("a", "b"),
        format="azure",
        options=TraceOptions(speed_up=3, spread_timestamps=False, num_prompts=9, seed=2),
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--speed-up 2", "--speed-up needs --trace"),
        ("--trace a --groups 3", "--trace takes no --groups"),
        ("--requests a --groups 3", "--requests takes no --groups"),
        ("--trace a --workload rag", "--trace takes no --workload"),
        ("--trace a --burstiness 2", "--trace has its own times"),
        ("--requests a --trace b", "as it is"),
        ("--requests a --request-rate 3", "as it is"),
        (
            "--request-rate 3 --ramp-up-strategy linear",
            "leave out --request-rate",
        ),
    ],
)
def test_flags_that_do_not_fit_together_are_named(arguments, said):
    with pytest.raises(OptionError, match=said):
        load(*arguments.split())


def test_every_option_of_a_replay_can_be_set_by_flags():
    options = parse("--goodput", "ttft:5")[0].options(Path("x"))
    assert ReplayOptions(**options).slo.ttft_ms == 5
    # How long to wait for quiet is no matter of taste.
    assert set(ReplayOptions.__struct_fields__) - set(options) == {"quiet_timeout_s"}
