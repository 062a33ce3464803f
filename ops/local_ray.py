"""Ray of one machine: started by this process, with a GCS that is started again if it ends.

The GCS is the part of Ray's head that knows all nodes and actors. Workers serve without it, but
nothing is replaced meanwhile, and Ray ends every process that misses it for long.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from ops.gcs_storage import GcsRedis

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""Ray's smallest useful object store: Stemroute puts nothing into it."""

LONGEST_DIRECTORY = 40
"""Ray puts sockets below its directory, whose paths may have 107 bytes. Where the temporary
folder's name is longer, Ray chooses a place by itself."""

RECONNECT_TIMEOUT_S = 24 * 3600
"""Without a GCS for so long, Ray ends its processes, this one among them; its default is 60 s."""

RESTART_GAP_S = 1.0
"""Between two starts of a GCS that ends at once, as it does while Redis is away."""


class LocalRayError(RuntimeError):
    """Ray cannot start; the message says why."""


class LocalRay:
    """`start`, then `stop` once.

    redis_url   where the GCS keeps its state; "" keeps it in memory, so that it cannot be
                started again
    directory   for Ray's sessions
    lost        receives a sentence when the GCS has ended and cannot be started again
    say         receives progress messages

    Raises SettingsError where Ray cannot use this Redis.
    """

    def __init__(
        self,
        *,
        cpus: int,
        redis_url: str,
        directory: Path,
        lost: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self.namespace = f"stemroute-{secrets.token_hex(8)}" if redis_url else ""
        self._redis = GcsRedis(redis_url) if redis_url else None
        self._cpus = cpus
        self._directory = f"{directory}/ray" if len(str(directory)) <= LONGEST_DIRECTORY else None
        self._lost = lost
        self._say = say
        self._node: Any = None
        self._stopping = False
        self._changing = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether its GCS runs, so that replicas can be started, drained and replaced."""
        with self._changing:
            return self._node is not None and self._gcs().poll() is None

    @property
    def logs(self) -> str:
        """Directory of Ray's logs."""
        return str(self._node.get_logs_dir_path())

    def start(self) -> None:
        """Start Ray and connect this process to it. Raises LocalRayError."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(RECONNECT_TIMEOUT_S))
        storage: dict[str, Any] = {}
        if self._redis is not None:
            try:
                self._redis.check()
            except (RedisError, OSError) as error:
                raise LocalRayError(f"Ray cannot keep its state in Redis: {error}") from error
            os.environ.update(self._redis.environment)
            storage["_system_config"] = {"external_storage_namespace": self.namespace}
            if self._redis.password:
                storage["_redis_username"] = self._redis.username
                storage["_redis_password"] = self._redis.password
        import ray

        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
        ray.init(
            address="local",
            num_cpus=self._cpus,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _temp_dir=self._directory,
            **storage,
        )
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray puts its own in their place
        self._node = ray._private.worker._global_node
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """End all processes of Ray. Does nothing where it has not started."""
        if self._node is None:
            return
        import ray

        with self._changing:
            self._stopping = True
        ray.shutdown()
        self._node = None

    def _gcs(self) -> Any:
        return self._node.all_processes["gcs_server"][0].process

    def _watch(self) -> None:
        while True:
            process = self._gcs()
            started_at = time.monotonic()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with self._changing:
                if self._stopping:
                    return
                code = process.wait()
                if self._redis is None:
                    self._lost(
                        f"Ray's GCS has ended with exit code {code}, and its state with it: "
                        "with serve.gcs_fault_tolerance=true, it would have been restarted"
                    )
                    return
                self._say(f"Ray's GCS has ended with exit code {code}; restarting it")
                time.sleep(max(0.0, started_at + RESTART_GAP_S - time.monotonic()))
                try:
                    self._node.kill_gcs_server(check_alive=False)  # forgets the old one
                    self._node.start_gcs_server()
                except Exception as error:
                    self._lost(f"Ray's GCS has ended and cannot be restarted: {error}")
                    return
