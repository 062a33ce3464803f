"""`fidelity`: how far the simulator is from the system it simulates.

The same request file is replayed live, through a real gateway, Redis and four Ray replicas with
emulated accelerators, and in virtual time; once at half and once at 90 % of what the fleet can
serve. Compared are mean TTFT, mean TPOT and the hit ratio.

Nothing in the simulator is fitted to the runs that are compared. What a request's way takes beside
the engine is measured before, on the idle fleet.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import NamedTuple

from cluster.settings import BusSettings, GatewaySettings, ServeSettings, Settings, WorkerSettings
from loadgen.arrivals import Arrivals
from loadgen.compare import RunOptions
from loadgen.compare import run as replay_live
from loadgen.plan import WORKLOAD_FILE, Load
from loadgen.simulation.fleet import FleetOptions, Latency
from loadgen.simulation.prompts import asked_of
from loadgen.simulation.reporting import Pace
from loadgen.simulation.run import SimulateOptions, simulate
from loadgen.simulation.saturation import sustained_rate
from loadgen.simulation.source import sent_of
from loadgen.summary import Summary
from loadgen.workloads import NoSharing, Rag
from ops.local import LocalCluster, LocalClusterError
from worker.emulated_profiles import profile_of

PROFILE = "h200-llama3-70b-fp8"
POLICY = "locality"
WORKERS = 4
WORKER = WorkerSettings(
    model=f"emulated:{PROFILE}",
    kv_blocks=2000,
    max_batch_size=64,
    token_budget=2048,
)
BUS = BusSettings()
REPORT_S = 0.002
"""From a worker's report to the gateway's picture, over Redis on this machine."""

WORKLOAD = Rag(
    num_prompts=300,
    documents=60,
    documents_a_prompt=4,
    document_tokens=800,
    input_tokens=200,
    output_tokens=24,
)
LOADS = ((0.5, 0.10), (0.9, 0.15))
"""Share of the saturation rate, and how far simulated figures may be from live ones."""

PROBES = 40
MEASURES = ("mean TTFT", "mean TPOT", "hit ratio")


class Disturbed(RuntimeError):
    """A live run that shows nothing. Its text says why."""


class Figures(NamedTuple):
    """What is compared."""

    ttft_ms: float
    tpot_ms: float
    hit_ratio: float


def run() -> int:
    """Print all differences; 0 where the worst one, as a share of its bar, is within it."""
    logging.getLogger("cluster").setLevel(logging.WARNING)
    settings = Settings(
        bus=BUS,
        gateway=GatewaySettings(port=0, policy=POLICY),
        worker=WORKER,
        serve=ServeSettings(replicas=WORKERS, cpus_per_worker=0.25),
    )
    try:
        with LocalCluster(settings) as cluster, tempfile.TemporaryDirectory() as folder:
            worst = _compare(cluster.url, Path(folder))
    except (LocalClusterError, Disturbed) as error:
        print(error)
        return 2
    print(f"fidelity: {worst:.2f} of the bound (bar 1)")
    return 0 if worst <= 1 else 1


def _compare(url: str, folder: Path) -> float:
    fleet = _fleet(_latency(url, folder / "idle"))
    full_rate = _full_rate(fleet)
    print(
        f"{WORKERS} workers with {PROFILE}, {WORKER.kv_blocks * WORKER.block_size} tokens of KV "
        f"each, {POLICY}: it keeps up with {full_rate:.2f} requests a second; an idle "
        f"request's way takes "
        f"{1e3 * _total_s(fleet.latency):.1f} ms beside the engine",
        flush=True,
    )
    worst = 0.0
    for share, bound in LOADS:
        load = Load(workload=WORKLOAD, arrivals=Arrivals(request_rate=share * full_rate))
        live = _live(url, load, folder / f"{share}")
        simulated = simulate(
            SimulateOptions(
                load=Load(requests=folder / f"{share}" / WORKLOAD_FILE),
                policies=(POLICY,),
                fleet=fleet,
            )
        )
        there, here = _figures(live), _figures(simulated)
        for name, measured, predicted in zip(MEASURES, there, here, strict=True):
            off = predicted / measured - 1
            worst = max(worst, abs(off) / bound)
            print(
                f"at {share:.0%} load, {name}: live {measured:.4g}, simulated {predicted:.4g} "
                f"({off:+.1%}, bound {bound:.0%})",
                flush=True,
            )
    return worst


def _fleet(latency: Latency) -> FleetOptions:
    return FleetOptions(
        workers=WORKERS,
        profile=profile_of(PROFILE),
        profile_name=PROFILE,
        kv_tokens=WORKER.kv_blocks * WORKER.block_size,
        block_size=WORKER.block_size,
        max_batch_size=WORKER.max_batch_size,
        token_budget=WORKER.token_budget,
        chunk_tokens=WORKER.chunk_tokens,
        max_waiting=WORKER.max_waiting,
        eviction=WORKER.eviction,
        cache_share=WORKER.cache_share,
        pace=Pace(gap_s=BUS.min_report_gap_s, load_s=REPORT_S, index_s=REPORT_S),
        latency=latency,
    )


def _latency(url: str, folder: Path) -> Latency:
    """What requests to an idle fleet take beyond their steps."""
    load = Load(
        workload=NoSharing(num_prompts=PROBES, input_tokens=500, output_tokens=1),
        arrivals=Arrivals(request_rate=4.0, burstiness=float("inf")),
    )
    idle = SimulateOptions(
        load=Load(requests=folder / WORKLOAD_FILE), policies=(POLICY,), fleet=_fleet(Latency())
    )
    live_ms, steps_ms = (_median_ttft_ms(one) for one in (_live(url, load, folder), simulate(idle)))
    there_and_back_s = max(0.0, live_ms - steps_ms) / 1e3
    # Most of it is on the way there: tokenising, deciding, two connections.
    return Latency(
        to_gateway_s=there_and_back_s / 2,
        to_worker_s=there_and_back_s / 4,
        to_client_s=there_and_back_s / 4,
    )


def _total_s(latency: Latency) -> float:
    return latency.to_gateway_s + latency.to_worker_s + latency.to_client_s


def _full_rate(fleet: FleetOptions) -> float:
    sent = sent_of(Load(workload=WORKLOAD), WORKER.block_size)
    return sustained_rate(fleet, POLICY, asked_of(sent.requests, WORKER.block_size))


def _live(url: str, load: Load, folder: Path) -> Summary:
    options = RunOptions(url=url, load=load, flush=True, explain=False, out=folder)
    summary = replay_live(options)
    if not summary.valid:
        raise Disturbed(f"the live run is invalid: {'; '.join(summary.reasons)}")
    return summary


def _median_ttft_ms(summary: Summary) -> float:
    (arm,) = summary.arms.values()
    return arm.ttft_ms.p50 or 0.0


def _figures(summary: Summary) -> Figures:
    (arm,) = summary.arms.values()
    return Figures(arm.ttft_ms.mean or 0.0, arm.tpot_ms.mean or 0.0, arm.cached_token_ratio or 0.0)
