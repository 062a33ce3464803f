"""The Ray Serve replica: Ray owns the worker's life, and is not on the path of a token."""

from __future__ import annotations

import logging
from typing import Any

from ray import serve

from cluster.settings import flat_settings, load_settings
from ops.autoscaling import BATCH_SIZE
from ops.gcs_storage import gcs_storage
from worker.server import WorkerServer


class WorkerReplica:
    """One worker. Ray starts it, asks for its health, replaces it, and drains it at its end."""

    async def __init__(self, args: dict[str, Any]) -> None:  # type: ignore[misc]
        """`args` is a partial settings tree, merged over this node's environment.

        Returns when the worker is ready. Raises where its model or its port cannot be had.
        """
        logging.basicConfig(level=logging.INFO)
        settings = load_settings(flags=flat_settings(args))
        name = serve.get_replica_context().replica_id.unique_id
        self._server = WorkerServer(settings, name)
        self._server.service.gcs_storage = gcs_storage()
        await self._server.start()

    async def check_health(self) -> None:
        """Raises where the worker has to be replaced, with the reason. One that drains or loads
        other weights goes on."""
        failure = self._server.service.failure()
        if failure:
            raise RuntimeError(failure)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's autoscaler scales by: its own request counts are always 0 here."""
        return {BATCH_SIZE: float(self._server.service.publisher.load.batch)}

    async def __call__(self) -> str:
        """Where the worker's own server listens."""
        return self._server.url

    async def __del__(self) -> None:
        await self._server.stop()
