"""A whole cluster on this machine: Valkey, Ray with its workers, and a gateway."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from cluster.settings import Settings, settings_environment
from ops.addresses import free_port, listen_address, listen_url
from ops.keeper import Keeper, KeeperError
from ops.local_ray import LocalRay, LocalRayError
from ops.start_stop import StartStop
from ops.up_record import record_path, write_record

log = logging.getLogger(__name__)

GATEWAY_START_S = 60.0
GATEWAY_STOP_S = 15.0
"""For the gateway to end, after the time in which it drains; then it is killed."""


class LocalClusterError(RuntimeError):
    """The cluster cannot start; the message names the part and the reason."""


class LocalCluster(StartStop):
    """Starts every part, and stops every part that it started.

    settings   `redis_url` "" starts an embedded Valkey; where pool or secret are at their default,
               this cluster has its own
    say        receives progress messages
    """

    def __init__(self, settings: Settings, say: Callable[[str], None] = log.info) -> None:
        self.settings = _with_own_pool(settings)
        self._say = say
        self._keeper: Keeper | None = None
        self._gateway: subprocess.Popen[bytes] | None = None
        self._ray: LocalRay | None = None
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return listen_url(self.settings.gateway.host, self.settings.gateway.port)

    def start(self) -> None:
        """Start Valkey, Ray, workers and gateway. Raises LocalClusterError where one cannot."""
        self._check_model()
        self._choose_port()
        self._start_keeper()
        self._start_workers()
        self._start_gateway()
        self._write_record()  # only now is it sure that the port is this cluster's

    def stop(self) -> None:
        """Stop what was started: gateway, workers (draining), Ray, Valkey. Safe to call twice.

        Whatever goes wrong with one part, a second Ctrl-C included, the others are stopped.
        """
        keeper, self._keeper = self._keeper, None
        with contextlib.ExitStack() as parts:  # the last one pushed is stopped first
            if keeper is not None:
                parts.callback(keeper.stop)
            if self._ray is not None:
                ray, self._ray = self._ray, None
                parts.callback(ray.stop)
                if ray.alive:
                    parts.callback(_drain_workers)
            if self._gateway is not None:
                timeout_s = self.settings.gateway.shutdown_s + GATEWAY_STOP_S
                parts.callback(_end, self._gateway, keeper, timeout_s)
                self._gateway = None

    def watch(self) -> None:
        """Wait until a part has ended that is not restarted. Raises LocalClusterError."""
        raise LocalClusterError(self._ended.get())

    def _check_model(self) -> None:
        """Fail at once if there is no such file: Ray would retry several times first."""
        model = self.settings.worker.model.removeprefix("emulated:")
        looks_like_path = "/" in model or model.endswith((".gguf", ".toml", ".json"))
        if looks_like_path and not Path(model).expanduser().exists():
            raise LocalClusterError(f"there is no model at {model}")

    def _choose_port(self) -> None:
        gateway = self.settings.gateway
        try:
            port = gateway.port or free_port(gateway.host)
            family, address = listen_address(gateway.host, port)
            socket.create_server(address, family=family).close()
        except OSError as error:
            raise LocalClusterError(
                f"the gateway cannot listen on {gateway.host}:{gateway.port} ({error.strerror}): "
                "choose another with --port, or 0 for a free one"
            ) from error
        self.settings = msgspec.structs.replace(
            self.settings, gateway=msgspec.structs.replace(gateway, port=port)
        )

    def _start_keeper(self) -> None:
        settings = self.settings
        if not settings.redis_url:
            self._say("starting Valkey")
        try:
            self._keeper = Keeper(
                record_path(settings.gateway.port),
                valkey=not settings.redis_url,
                durable=settings.serve.gcs_fault_tolerance,
            )
        except (KeeperError, OSError) as error:
            raise LocalClusterError(str(error)) from error
        self.settings = msgspec.structs.replace(
            settings, redis_url=settings.redis_url or self._keeper.redis_url
        )

    def _write_record(self) -> None:
        try:
            write_record(self.settings)
        except OSError as error:
            self._say(f"note: stemroute doctor will not find Redis by itself: {error}")

    def _start_workers(self) -> None:
        options, keeper = self.settings.serve, self._kept_by
        durable = options.gcs_fault_tolerance
        self._ray = LocalRay(
            cpus=max(os.cpu_count() or 1, int(options.replicas * options.cpus_per_worker + 0.999)),
            redis_url=self.settings.redis_url if durable else "",
            directory=keeper.directory,
            lost=self._ended.put,
            say=self._say,
        )
        if durable and not keeper.redis_url:  # its own Valkey ends with it
            keeper.remove_gcs_state(self.settings.redis_url, self._ray.namespace)
        self._say("starting Ray")
        try:
            self._ray.start()
        except LocalRayError as error:
            raise LocalClusterError(str(error)) from error
        self._say(f"starting {options.replicas} workers with {self.settings.worker.model}")
        for noisy in ("ray", "ray.serve"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        from ops.serve_app import run_application

        try:
            run_application(self.settings)
        except RuntimeError as error:
            keeper.keep_directory()
            raise LocalClusterError(
                f"the workers cannot start: {error}\nlogs: {self._ray.logs}"
            ) from error

    def _start_gateway(self) -> None:
        self._say("starting the gateway")
        self._gateway = subprocess.Popen(
            [sys.executable, "-m", "ops.cli", "gateway"],
            env={**os.environ, **settings_environment(self.settings)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which stops the gateway in turn
        )
        self._kept_by.end_with_owner(self._gateway.pid)
        threading.Thread(target=self._watch_gateway, args=(self._gateway,), daemon=True).start()
        deadline = time.monotonic() + GATEWAY_START_S
        headers = {}
        if self.settings.gateway.api_key:
            headers["Authorization"] = f"Bearer {self.settings.gateway.api_key}"
        reason = "it does not answer"
        while time.monotonic() < deadline:
            if self._gateway.poll() is not None:
                raise LocalClusterError(
                    f"the gateway has ended with exit code {self._gateway.returncode}"
                )
            with contextlib.suppress(httpx.HTTPError, ValueError):
                answer = self._get("/ready", headers)
                if answer.status_code == 200 and self._all_seen():
                    return
                reason = answer.text
            time.sleep(0.05)  # another process: there is nothing here to wait on
        raise LocalClusterError(f"the gateway is not ready after {GATEWAY_START_S:g} s: {reason}")

    @property
    def _kept_by(self) -> Keeper:
        assert self._keeper is not None, "start() first"
        return self._keeper

    def _watch_gateway(self, gateway: subprocess.Popen[bytes]) -> None:
        os.waitid(os.P_PID, gateway.pid, os.WEXITED | os.WNOWAIT)
        self._ended.put(f"the gateway has ended with exit code {gateway.wait()}")

    def _get(self, path: str, headers: dict[str, str]) -> httpx.Response:
        """Query the own gateway, ignoring proxies of the environment."""
        return httpx.get(self.url + path, headers=headers, timeout=5, trust_env=False)

    def _all_seen(self) -> bool:
        """Whether the gateway is this cluster's, and has all workers. Raises ValueError where
        another server answers, which was quicker to take the port."""
        headers = {}
        if self.settings.gateway.admin_key:
            headers["Authorization"] = f"Bearer {self.settings.gateway.admin_key}"
        fleet = self._get("/admin/fleet", headers).json()
        if fleet.get("pool") != self.settings.pool:
            return False
        ready = [worker for worker in fleet["workers"] if worker["state"] == "ready"]
        return len(ready) >= self.settings.serve.replicas


def _drain_workers() -> None:
    from ops.serve_app import remove_application

    try:
        remove_application()
    except Exception as error:  # whatever it is: Ray ends next, and the workers with it
        log.warning("the workers could not be drained: %s", error)


def _with_own_pool(settings: Settings) -> Settings:
    """Two clusters on one machine, or on one Redis, never see each other's workers."""
    pool = settings.pool
    if pool == Settings().pool:
        pool = f"up-{secrets.token_hex(4)}"
    return msgspec.structs.replace(settings, pool=pool, secret=settings.secret or _secret(settings))


def _secret(settings: Settings) -> str:
    """A new one; with a disk tier, one that is kept: blocks on disk are named by hashes with it."""
    new = secrets.token_hex(16)
    if not settings.worker.disk_tier_gb:
        return new
    file = Path(settings.worker.cache_dir or "~/.cache/stemroute").expanduser() / "up-secret"
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(new)
    except FileExistsError:
        return file.read_text(encoding="ascii").strip() or new
    return new


def _end(process: subprocess.Popen[bytes], keeper: Keeper | None, timeout_s: float) -> None:
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if keeper is not None:
        keeper.forget(process.pid)
