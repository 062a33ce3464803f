"""The Ray Serve application: one deployment, whose replicas are the workers.

Used in three ways: by `stemroute up` on a Ray of its own, by `stemroute deploy` on a running Ray
cluster, and from a Serve configuration file (as the Helm chart writes it):

    applications:
      - name: stemroute
        import_path: ops.serve_app:application
        route_prefix: null
        args: {pool: ..., worker: {...}, serve: {...}}

`args` is a partial settings tree. Each replica merges it over the environment of its own node,
so that secrets and addresses come from there and not from the configuration.
"""

from __future__ import annotations

from typing import Any

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from cluster.settings import Settings, flat_settings, load_settings
from ops.replica import WorkerReplica

APPLICATION = "stemroute"
DEPLOYMENT = "worker"


def application(args: dict[str, Any]) -> Application:
    """The application of a settings tree. Raises SettingsError where it cannot be used."""
    settings = load_settings(flags=flat_settings(args))
    options = settings.serve
    deployment = serve.deployment(WorkerReplica).options(
        name=DEPLOYMENT,
        num_replicas=options.replicas,
        max_ongoing_requests=16,  # of Serve's own calls; tokens do not go through it
        health_check_period_s=options.health_check_period_s,
        health_check_timeout_s=options.health_check_timeout_s,
        graceful_shutdown_timeout_s=settings.worker.drain_timeout_s
        + settings.worker.save_timeout_s
        + 15,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={
            "num_cpus": options.cpus_per_worker,
            "num_gpus": options.gpus_per_worker,
        },
    )
    return deployment.bind(args)


def run_application(settings: Settings) -> None:
    """Deploy onto the Ray cluster that this process is connected to; returns when all are ready.

    Serve's own HTTP proxy is not started: gateways talk to the workers directly.
    Raises RuntimeError with Serve's reason where a worker cannot start.
    """
    serve.start(proxy_location="Disabled")
    tree: dict[str, Any] = msgspec.to_builtins(settings)
    try:
        serve.run(application(tree), name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        raise RuntimeError(_reason() or str(error)) from error


def _reason() -> str:
    """Why the workers did not start: the last line of what Serve tells, which is a whole trace."""
    known = serve.status().applications.get(APPLICATION)
    deployment = known.deployments.get(DEPLOYMENT) if known else None
    lines = deployment.message.strip().splitlines() if deployment else []
    return lines[-1] if lines else ""


def remove_application() -> bool:
    """Drain and stop the workers. Returns False if Serve does not run."""
    try:
        serve.delete(APPLICATION)
    except RayServeException:
        return False
    return True
