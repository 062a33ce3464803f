"""A pool to break: external Valkey, workers as Serve replicas or plain processes, gateways."""

from __future__ import annotations

import asyncio
import re
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
from tokenizers import Tokenizer

from ops.start_stop import StartStop
from tests.chaos.load import Ask, Client, asks
from tests.chaos.parts import (
    START_S,
    GatewayProcess,
    PlainWorkers,
    RayWorkers,
    Valkey,
    start_gateway,
    start_up,
)
from tests.chaos.processes import PartFailed, Processes, child_of, listener
from tests.chaos.verdict import Reference
from tests.tiny_model import write_tiny_llama

MODEL = "chaos"
STEP_S = 0.03
"""Of an emulated worker: answers take seconds, so that a fault meets many of them."""
PROFILE = f"""\
kv_tokens = 16384
context_tokens = 8192
[cost]
step_s = {STEP_S}
prefill_token_s = 2e-5
"""
ASKS = 48
LEARN_AT_ONCE = 4
"""Requests per worker."""
DISK_MIB = 1
EXTRA_TOKEN = "<|extra|>"
QUIET_S = 15.0
LOOK_AGAIN_S = 0.1
CONTINUED = re.compile(r"^stemroute_\w*(?:migrat|continu)\w*_total(?:\{.*\})? (\S+)$", re.M)
"""Counters of streams that were continued at another worker."""

Engine = Literal["emulated", "tiny"]


@dataclass(frozen=True)
class EngineLoad:
    """Load that three workers of a kind carry on two cores: answers of `tokens`, at `rate` per
    second and worker."""

    tokens: tuple[int, int]
    rate: float


LOADS: Mapping[Engine, EngineLoad] = {
    "emulated": EngineLoad(tokens=(40, 120), rate=2.5),
    "tiny": EngineLoad(tokens=(80, 240), rate=1.5),
}


@dataclass(frozen=True)
class Needs:
    """What a fault breaks. Faults with equal needs share a rig.

    serve       workers are Serve replicas on Ray; else processes that nobody replaces
    up          all is started by `stemroute up`, with one gateway and a Valkey of its own
    nodes       of Ray
    gcs_redis   Ray keeps its state in the Redis of the pool (`serve.gcs_fault_tolerance`)
    patient     Ray nodes outlive the loss of a head whose state is in memory
    batch       sequences that a worker runs at once
    disk        cold tiers, the disk tier on a file system of `DISK_MIB` MiB
    clock       a wall clock that can be stepped
    health_check_period_s   of Ray Serve
    extra_token the tiny model's tokenizer knows `EXTRA_TOKEN`, its embedding has no row for it
    """

    serve: bool = True
    up: bool = False
    workers: int = 3
    gateways: int = 2
    engine: Engine | None = None
    nodes: int = 1
    gcs_redis: bool = False
    patient: bool = False
    batch: int = 16
    disk: bool = False
    clock: bool = False
    extra_token: bool = False
    health_check_period_s: float = 2.0


@dataclass(frozen=True)
class Worker:
    """One worker's processes."""

    name: str
    pid: int
    engine_pid: int


@dataclass(frozen=True)
class Quiet:
    """What is left when no client waits: requests that are still counted, blocks that are held."""

    load: int
    blocks: int


class Rig(StartStop):
    """Starts all parts in order and ends every process of them by its id. A context manager."""

    def __init__(self, needs: Needs, engine: Engine = "emulated", *, distinct: int = ASKS) -> None:
        """`distinct` requests have answers that are learned before the first fault."""
        self.needs = needs
        self.engine: Engine = needs.engine or engine
        self.asks = asks(MODEL, distinct, LOADS[self.engine].tokens)
        self.references: dict[int, list[Reference]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.processes = Processes(self.folder)
        self.gateways: list[GatewayProcess] = []
        self.valkey: Valkey
        self.ray: RayWorkers
        self.plain: PlainWorkers
        self._mounted = False

    @property
    def rate(self) -> float:
        """Requests per second that the rig carries easily."""
        return LOADS[self.engine].rate * self.needs.workers

    @property
    def fresh(self) -> bool:
        """Whether each request can be a new prompt, of which the right answer is known."""
        return self.engine == "emulated"

    @property
    def urls(self) -> list[str]:
        """Base URLs of the gateways."""
        return [gateway.url for gateway in self.gateways]

    @property
    def models(self) -> tuple[Path, Path]:
        """Of a tiny engine: the weights it serves, and others of the same architecture."""
        return self.folder / "tiny", self.folder / "tiny-other"

    @property
    def disk(self) -> Path:
        """Where the disk tier is."""
        return self.folder / "disk"

    def start(self) -> None:
        """Start all parts."""
        self.valkey = Valkey()
        env, count = self._environment(), self.needs.workers
        if self.needs.up:
            self.gateways = [start_up(self.processes, count, env)]
        elif self.needs.serve:
            self.ray = RayWorkers(
                self.processes,
                self.folder,
                count,
                env,
                nodes=self.needs.nodes,
                gcs_redis=f"127.0.0.1:{self.valkey.port}" if self.needs.gcs_redis else "",
                patient=self.needs.patient,
                model=env["STEMROUTE_WORKER_MODEL"],
            )
            self.ray.deploy()
        else:
            self.plain = PlainWorkers(self.processes, count, env)
        for number in range(len(self.gateways), self.needs.gateways):
            gateway = start_gateway(self.processes, f"gateway-{number}", env)
            self.gateways.append(gateway)
        for gateway in self.gateways:
            self._wait_ready(gateway)

    def _wait_ready(self, gateway: GatewayProcess) -> None:
        deadline = time.monotonic() + START_S
        while gateway.ready_workers() < self.needs.workers:
            if not self.needs.serve:
                self.plain.check()
            if not gateway.alive or time.monotonic() > deadline:
                why = self.processes.log_tail(gateway.name) or gateway.reasons()
                raise PartFailed(f"{gateway.name} has not all workers: {why}")
            time.sleep(LOOK_AGAIN_S)  # other processes: there is nothing to wait on

    def stop(self) -> None:
        """End every process. Safe to call twice."""
        self.processes.end()
        if hasattr(self, "valkey"):
            self.valkey.stop()
        if self._mounted:
            subprocess.run(["umount", "--lazy", str(self.disk)], check=False)
            self._mounted = False
        shutil.rmtree(self.folder, ignore_errors=True)

    def _environment(self) -> dict[str, str]:
        needs, root = self.needs, str(Path(__file__).parents[2])
        path = [root]
        env = {
            "STEMROUTE_POOL": self.folder.name,
            "STEMROUTE_REDIS_URL": self.valkey.url,
            "STEMROUTE_SECRET": "of the chaos rig",
            "STEMROUTE_WORKER_SERVED_NAME": MODEL,
            "STEMROUTE_WORKER_DEVICE": "cpu",
            "STEMROUTE_WORKER_MAX_BATCH_SIZE": str(needs.batch),
            "STEMROUTE_WORKER_CACHE_DIR": str(self.folder / "cache"),
            "STEMROUTE_WORKER_MODEL": str(self._model()),
            "STEMROUTE_SERVE_CPUS_PER_WORKER": "1",
            "STEMROUTE_SERVE_HEALTH_CHECK_PERIOD_S": str(needs.health_check_period_s),
            "STEMROUTE_SERVE_GCS_FAULT_TOLERANCE": str(needs.gcs_redis),
        }
        if self.engine == "tiny":
            env["STEMROUTE_WORKER_DTYPE"] = "float32"
            env["STEMROUTE_WORKER_KV_BLOCKS"] = "400"  # prompts evict one another
        if needs.disk:
            self._mount()
            env |= {
                "STEMROUTE_WORKER_KV_BLOCKS": "160",
                "STEMROUTE_WORKER_CPU_TIER_GB": "0.01",
                "STEMROUTE_WORKER_DISK_TIER_GB": "1",
                "STEMROUTE_WORKER_DISK_TIER_DIR": str(self.disk),
            }
        if needs.clock:
            self.step_clock(0.0)
            path.insert(0, str(Path(__file__).parent / "clock"))
            env["CHAOS_CLOCK"] = str(self.folder / "clock")
        env["PYTHONPATH"] = ":".join(path)
        return env

    def _model(self) -> str:
        if self.engine == "tiny":
            for seed, folder in enumerate(self.models):
                write_tiny_llama(folder, seed=seed)
                if self.needs.extra_token:
                    _add_token(folder / "tokenizer.json")
            return str(self.models[0])
        profile = self.folder / "profile.toml"
        profile.write_text(PROFILE)
        return f"emulated:{profile}"

    def _mount(self) -> None:
        self.disk.mkdir()
        size = f"size={DISK_MIB}m"
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.disk)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise PartFailed(f"a small file system needs root: {done.stderr.strip()}")
        self._mounted = True

    def step_clock(self, offset_s: float) -> None:
        """Set how far the wall clock of workers and gateways is from the machine's."""
        path = self.folder / "clock"
        with path.open("r+b" if path.exists() else "wb") as file:
            file.write(struct.pack("<d", offset_s))

    async def learn(self, chosen: Sequence[Ask]) -> None:
        """Send each request once, undisturbed, and keep its answer as right, beside earlier ones.

        Raises PartFailed where the pool does not answer.
        """
        async with Client(self.urls) as client:
            limit = asyncio.Semaphore(LEARN_AT_ONCE * self.needs.workers)

            async def one(ask: Ask) -> None:
                async with limit:
                    outcome = await client.send(ask)
                if not outcome.finished:
                    raise PartFailed(f"the undisturbed pool fails: {outcome.error}")
                right = Reference(outcome.text, outcome.completion_tokens, outcome.elapsed_s)
                known = self.references.setdefault(ask.number, [])
                if right.text not in {each.text for each in known}:
                    known.append(right)

            await asyncio.gather(*(one(ask) for ask in chosen))

    async def know(self, chosen: Sequence[Ask]) -> None:
        """`learn` those of the requests whose right answers are not known yet."""
        await self.learn([ask for ask in chosen if ask.number not in self.references])

    def view(self, path: str) -> dict[str, Any]:
        """A JSON answer of the first gateway that runs; empty where there is none."""
        for gateway in self.gateways:
            if gateway.alive and (answer := gateway.get(path)):
                return answer
        return {}

    def ready(self) -> dict[str, dict[str, Any]]:
        """Name -> view of each worker that a gateway may use now."""
        members = self.view("/admin/fleet").get("workers", [])
        return {m["worker"]: m for m in members if m["state"] == "ready" and not m["suspect"]}

    def busiest(self) -> Worker:
        """The worker with most running requests."""
        ready = self.ready()
        if not ready:
            raise PartFailed("no worker is ready")
        name = max(ready, key=lambda each: int(ready[each]["running"]))
        return self.worker(name)

    def worker(self, name: str) -> Worker:
        """A worker's processes, by its name."""
        pid = listener(int(self.ready()[name]["address"].rpartition(":")[2]))
        return Worker(name, pid, child_of(pid, "worker.engine_process"))

    def whole(self, gone: frozenset[str] = frozenset()) -> bool:
        """Whether every gateway may use all workers, none of them one of `gone`."""
        names = self.ready().keys()
        return not names & gone and all(
            gateway.ready_workers() >= self.needs.workers
            for gateway in self.gateways
            if gateway.alive
        )

    async def until(self, true: Callable[[], bool], timeout_s: float) -> float | None:
        """When `true()` held first, on the loop's clock; None where it does not in time.

        `true` may block: it runs in a thread.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not await asyncio.to_thread(true):
            if loop.time() > deadline:
                return None
            await asyncio.sleep(LOOK_AGAIN_S)  # other processes: there is nothing to wait on
        return loop.time()

    async def quiet(self) -> Quiet:
        """What is left once no client waits; looked at again and again until it is nothing."""
        found = await asyncio.to_thread(self._left)
        deadline = time.monotonic() + QUIET_S
        while (found.load or found.blocks) and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_AGAIN_S)
            found = await asyncio.to_thread(self._left)
        return found

    def _left(self) -> Quiet:
        load = blocks = 0
        for gateway in self.gateways:
            if gateway.alive:
                fleet = gateway.get("/admin/fleet")
                members = [m for m in fleet.get("workers", []) if m["state"] == "ready"]
                held = sum(m["capacity_blocks"] - m["free_blocks"] for m in members)
                busy = sum(m["running"] + m["waiting"] for m in members)
                load = max(load, busy, int(fleet.get("in_flight", 0)))
                blocks = max(blocks, held)
        return Quiet(load, blocks)

    def continued(self) -> float:
        """Streams that were continued at another worker, as the gateways count them."""
        total = 0.0
        for gateway in self.gateways:
            if gateway.alive:
                try:
                    text = httpx.get(gateway.url + "/metrics", timeout=5, trust_env=False).text
                except httpx.HTTPError:
                    continue
                total += sum(map(float, CONTINUED.findall(text)))
        return total


def _add_token(path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([EXTRA_TOKEN])
    tokenizer.save(str(path))
