"""Flags of `loadgen simulate`."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from loadgen.arm import OptionError
from loadgen.flags import LoadFlags
from loadgen.measures import parse_slo
from loadgen.simulation.fleet import GATEWAY, FleetOptions, Latency
from loadgen.simulation.reporting import Pace
from loadgen.simulation.run import SimulateOptions
from worker.emulated_profiles import PROFILES, ProfileError, profile_of

FLEET, DELAYS = "Simulated fleet", "Delays"


def _fleet(text: str, name: str, least: int = 0) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        name, help=text, min=least, rich_help_panel=FLEET
    )
    return option


def _delay(text: str, name: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        name, help=text, min=0.0, max=1000.0, rich_help_panel=DELAYS
    )
    return option


@dataclasses.dataclass(kw_only=True)
class SimulateFlags(LoadFlags):
    """The workload, the fleet, and the delays of its reports."""

    out: Annotated[
        Path | None, typer.Option("--out", help="Output directory (default: out/simulate-TIME).")
    ] = None
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput", help="Latency bounds in ms, such as --goodput ttft:2000 tpot:100."
        ),
    ] = None
    repeats: Annotated[
        int, typer.Option("--repeats", help="Replays per policy, each with its own seed.", min=1)
    ] = 1
    drop_over_context: Annotated[
        bool,
        typer.Option(
            "--drop-over-context",
            help="Leave out requests whose prompt exceeds a worker's context or KV pool.",
        ),
    ] = False
    workers: Annotated[int, _fleet("Number of workers, all equal.", "--workers", 1)] = 16
    profile: Annotated[
        str,
        typer.Option(
            "--profile",
            help=f"Cost model of a worker: {', '.join(PROFILES)}, or a TOML or JSON file.",
            rich_help_panel=FLEET,
        ),
    ] = "h100-llama3-8b"
    kv_tokens: Annotated[
        int, _fleet("KV pool of a worker in tokens; 0: as in the profile.", "--kv-tokens")
    ] = 0
    block_size: Annotated[
        int, _fleet("Tokens per KV block; 0: as in the trace, else 16.", "--block-size")
    ] = 0
    max_batch_size: Annotated[
        int, _fleet("Maximum batch size of a worker.", "--max-batch-size", 1)
    ] = 256
    token_budget: Annotated[int, _fleet("Maximum tokens per engine step.", "--token-budget", 1)] = (
        8192
    )
    chunk_tokens: Annotated[
        int, _fleet("Maximum prefill tokens per request and step; 0: no limit.", "--chunk-tokens")
    ] = 0
    queue: Annotated[
        int, _fleet("Size of the gateway's admission queue; 0: no queue.", "--queue")
    ] = 0
    queue_timeout_s: Annotated[
        float,
        typer.Option(
            "--queue-timeout-s",
            help="Longest wait in the gateway's admission queue; then the request fails.",
            min=0.001,
            rich_help_panel=FLEET,
        ),
    ] = GATEWAY.queue_timeout_s
    max_wait_s: Annotated[
        float,
        typer.Option(
            "--max-wait-s",
            help="Longest expected wait of a request; longer ones are refused. 0: no limit.",
            min=0.0,
            rich_help_panel=FLEET,
        ),
    ] = 0.0
    report_delay_ms: Annotated[
        float, _delay("Delay of load reports to the gateway.", "--report-delay-ms")
    ] = 0.0
    index_lag_ms: Annotated[
        float, _delay("Delay of cache changes to the gateway.", "--index-lag-ms")
    ] = 0.0
    report_gap_ms: Annotated[
        float, _delay("Shortest interval between two reports of a worker.", "--report-gap-ms")
    ] = 20.0
    to_gateway_ms: Annotated[
        float, _delay("Time from the client to the routing decision.", "--to-gateway-ms")
    ] = 0.0
    to_worker_ms: Annotated[
        float, _delay("Time from the routing decision to the engine.", "--to-worker-ms")
    ] = 0.0
    to_client_ms: Annotated[
        float, _delay("Time from the engine to the client.", "--to-client-ms")
    ] = 0.0

    def folder(self) -> Path:
        """Where the results go."""
        return self.out or Path("out") / f"simulate-{datetime.now():%Y%m%d-%H%M%S}"

    def options(self, policies: tuple[str, ...], out: Path) -> SimulateOptions:
        """What is to be simulated. Raises OptionError, WorkloadError or SloError."""
        try:
            profile = profile_of(self.profile)
        except ProfileError as error:
            raise OptionError(str(error)) from error
        return SimulateOptions(
            load=self.load(),
            policies=policies,
            slo=parse_slo(self.goodput or ()),
            repeats=self.repeats,
            drop_over_context=self.drop_over_context,
            out=out,
            fleet=FleetOptions(
                workers=self.workers,
                profile=profile,
                profile_name=self.profile,
                kv_tokens=self.kv_tokens,
                block_size=self.block_size,
                max_batch_size=self.max_batch_size,
                token_budget=self.token_budget,
                chunk_tokens=self.chunk_tokens,
                queue=self.queue,
                queue_timeout_s=self.queue_timeout_s,
                max_wait_s=self.max_wait_s,
                pace=Pace(
                    gap_s=self.report_gap_ms / 1e3,
                    load_s=self.report_delay_ms / 1e3,
                    index_s=self.index_lag_ms / 1e3,
                ),
                latency=Latency(
                    to_gateway_s=self.to_gateway_ms / 1e3,
                    to_worker_s=self.to_worker_ms / 1e3,
                    to_client_s=self.to_client_ms / 1e3,
                ),
            ),
        )
