"""The command `stemroute`."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from cluster.settings import Settings, SettingsError, load_settings
from ops.console import Config, fail, out, say
from ops.gateway_processes import LOG_FORMAT, GatewayProcessError, GatewayProcesses
from ops.pool_cli import add_commands
from ops.signals import interrupt_on_signals, until_signal

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A prefix-locality-aware request router for a GPU cluster.",
)
add_commands(app)

Shadow = Annotated[
    str | None, typer.Option(help="Shadow policies to evaluate on live traffic, comma-separated.")
]


def main() -> None:
    """Entry point: a known error ends with one sentence instead of a traceback."""
    try:
        app()
    except SettingsError as error:
        fail(str(error))


@app.command()
def up(
    workers: Annotated[int | None, typer.Option(help="Number of workers.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="smollm2, a Hugging Face directory, a GGUF file or emulated:PROFILE."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    host: Annotated[str | None, typer.Option(help="Interface of the gateway.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the gateway; 0: a free port.")] = None,
    shadow: Shadow = None,
    policy: Annotated[
        str | None, typer.Option(help="Routing policy, such as locality or dynamo:temperature=0.5.")
    ] = None,
    queue: Annotated[
        int | None, typer.Option(help="Size of the admission queue; 0: no queue.")
    ] = None,
    kv_blocks: Annotated[
        int | None, typer.Option(help="KV blocks per worker; 0: as many as fit.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis to use instead of an embedded Valkey.")
    ] = None,
    config: Config = None,
) -> None:
    """Start a whole cluster on this machine and serve until Ctrl-C."""
    from ops.local import LocalCluster, LocalClusterError

    flags = {
        "serve.replicas": workers,
        "worker.model": model,
        "worker.device": device,
        "worker.kv_blocks": kv_blocks,
        "gateway.host": host,
        "gateway.port": port,
        "gateway.policy": policy,
        "gateway.shadow": shadow,
        "gateway.queue": queue,
        "redis_url": redis_url,
    }
    settings = _with_gpus(load_settings(config, flags=flags))
    interrupt_on_signals()
    try:
        with LocalCluster(settings, say=say) as cluster:
            _say_how_to_use(cluster.url, cluster.settings)
            cluster.watch()
    except KeyboardInterrupt:
        say("stopped")
    except LocalClusterError as error:
        fail(str(error))


@app.command()
def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="Output directory of the report.")] = Path(
        "out/demo"
    ),
) -> None:
    """Compare round_robin with locality, with a small real model on this machine's CPUs."""
    from ops.demo import demo_settings, loadgen_arguments, measure_rate
    from ops.local import LocalCluster, LocalClusterError

    interrupt_on_signals()
    try:
        with LocalCluster(demo_settings(), say=say) as cluster:
            say("measuring what this machine can do")
            rate = measure_rate(cluster.url)
            arguments = loadgen_arguments(cluster.url, rate, out_dir)
            say(f"loadgen {' '.join(arguments)}")
            command = [sys.executable, "-m", "loadgen", *arguments]
            code = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        code = 130
    except LocalClusterError as error:
        fail(str(error))
    raise SystemExit(code)


@app.command()
def calibrate(
    profile: Annotated[Path, typer.Option("--out", help="Output file of the profile (TOML).")],
    model: Annotated[
        str | None, typer.Option(help="smollm2, a Hugging Face directory or a GGUF file.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Shortest measuring time, in seconds.")
    ] = 60.0,
    token_budget: Annotated[
        int | None, typer.Option(help="Maximum tokens per engine step.")
    ] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="KV blocks; 0: as many as fit.")] = None,
    config: Config = None,
) -> None:
    """Fit an emulated profile to the steps of a real engine on this machine."""
    from worker.build import build_engine
    from worker.calibrate import (
        LEAST_STEPS,
        LONGEST_S,
        CalibrationError,
        Limits,
        fit,
        measure,
        profile_from,
    )
    from worker.emulated_profiles import write_profile
    from worker.models import ModelError

    flags = {
        "worker.model": model,
        "worker.device": device,
        "worker.token_budget": token_budget,
        "worker.kv_blocks": kv_blocks,
    }
    settings = load_settings(config, flags=flags).worker
    if settings.model.startswith("emulated:"):
        fail("an emulated accelerator has a profile already: calibrate from a real model", code=2)
    say(f"loading {settings.model}")
    try:
        core, info = build_engine(settings)
        limits = Limits(
            context_tokens=info.context_tokens,
            token_budget=info.token_budget,
            pool_tokens=info.capacity_blocks * settings.block_size,
            batch=info.max_batch_size,
            block_size=settings.block_size,
        )
        say(f"measuring steps on {info.device} for {seconds:g} s")
        found = fit(
            measure(
                core.runner,
                limits,
                seconds,
                on_longer=lambda steps: say(
                    f"{steps} steps in {seconds:g} s, of {LEAST_STEPS} that are needed: going on "
                    f"until they are there, {LONGEST_S / 60:g} minutes at most"
                ),
            )
        )
    except (ModelError, CalibrationError, MemoryError, ValueError) as error:
        fail(str(error))
    told = (
        f"{info.model.model} on {info.device}, fitted to {found.steps} steps; of those held out, "
        f"half are predicted within {found.error:.1%}, nine in ten within {found.error_p90:.1%}"
    )
    profile.write_text(write_profile(profile_from(found, limits), told), encoding="utf-8")
    out.print(told, highlight=False, markup=False, soft_wrap=True)
    out.print(f"  stemroute up --model emulated:{profile}", highlight=False, markup=False)


@app.command()
def gateway(
    host: Annotated[str | None, typer.Option(help="Interface to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0: a free port.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Gateway processes that share the port.")
    ] = None,
    shadow: Shadow = None,
    policy: Annotated[
        str | None, typer.Option(help="Routing policy, such as locality or dynamo:temperature=0.5.")
    ] = None,
    queue: Annotated[
        int | None, typer.Option(help="Size of the admission queue; 0: no queue.")
    ] = None,
    redis_url: Annotated[str | None, typer.Option(help="Redis of the pool.")] = None,
    config: Config = None,
) -> None:
    """Run a gateway for the workers of a pool."""
    flags = {
        "gateway.host": host,
        "gateway.port": port,
        "gateway.processes": processes,
        "gateway.policy": policy,
        "gateway.shadow": shadow,
        "gateway.queue": queue,
        "redis_url": redis_url,
    }
    settings = load_settings(config, flags=flags)
    _need_redis(settings)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        if settings.gateway.processes > 1:
            _serve_processes(settings)
        else:
            _serve_here(settings)
    except OSError as error:
        fail(f"the gateway cannot listen on {settings.gateway.host}: {error}")
    except (ValueError, GatewayProcessError) as error:
        fail(str(error))


@app.command()
def deploy(
    address: Annotated[
        str, typer.Option(help="Address of the Ray cluster; auto: the one of this node.")
    ] = "auto",
    workers: Annotated[int | None, typer.Option(help="Number of workers.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="smollm2, a Hugging Face directory, a GGUF file or emulated:PROFILE."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    gpus: Annotated[float | None, typer.Option(help="GPUs per worker.")] = None,
    worker_host: Annotated[
        str,
        typer.Option(help="Interface of the workers' servers; gateways must be able to reach it."),
    ] = "0.0.0.0",
    redis_url: Annotated[str | None, typer.Option(help="Redis that all nodes reach.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Drain and stop the workers.")] = False,
    config: Config = None,
) -> None:
    """Deploy the workers onto a running Ray cluster."""
    flags = {
        "serve.replicas": workers,
        "serve.gpus_per_worker": gpus,
        "worker.model": model,
        "worker.device": device,
        "worker.host": worker_host,
        "redis_url": redis_url,
    }
    settings = load_settings(config, flags=flags)
    if not _listens(address):
        fail(f"no Ray cluster at {address}: start one with: ray start --head")
    _show_ray_token()
    import ray
    from ray.exceptions import AuthenticationError

    from ops.gcs_storage import HOW_TO_START, IN_MEMORY, gcs_storage
    from ops.serve_app import remove_application, run_application

    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, AuthenticationError) as error:
        fail(
            f"cannot join the Ray cluster at {address}: {error}. Start one with: ray start --head; "
            "if it asks for a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or copy "
            "~/.ray/auth_token of its head"
        )
    try:
        if remove:
            removed = remove_application()
            say(
                "the workers have been removed"
                if removed
                else "no workers are deployed on this cluster"
            )
            return
        _need_redis(settings)
        if not settings.secret:
            say(
                "note: without STEMROUTE_SECRET, anyone who reaches a worker's port can use it, "
                "and anyone who reads Redis can test guesses of prompts"
            )
        in_memory = gcs_storage() == IN_MEMORY
        if in_memory and settings.serve.gcs_fault_tolerance:
            fail(
                f"serve.gcs_fault_tolerance: the Ray head at {address} keeps its state in memory, "
                f"and cannot change that while it runs. Start it with: {HOW_TO_START}"
            )
        run_application(settings)
        say(f"{settings.serve.replicas} workers are ready in the pool {settings.pool!r}")
        if in_memory:
            say(
                "note: the Ray head keeps its state in memory; if it is lost, all workers are lost "
                f"with it. To prevent that, start the head with: {HOW_TO_START}"
            )
        say("next: stemroute gateway --redis-url … (with the same STEMROUTE_SECRET)")
    except RuntimeError as error:
        fail(f"the workers cannot start: {error}")
    finally:
        ray.shutdown()


def _serve_here(settings: Settings) -> None:
    import uvloop

    from router.gateway import serve_gateway

    uvloop.run(until_signal(serve_gateway(settings, ready=_say_listening)))


def _serve_processes(settings: Settings) -> None:
    interrupt_on_signals()
    try:
        with GatewayProcesses(settings) as processes:
            _say_listening(processes.url)
            processes.watch()
    except KeyboardInterrupt:
        say("stopped")


def _say_listening(url: str) -> None:
    say(f"the gateway listens on {url}")


def _with_gpus(settings: Settings) -> Settings:
    """On a machine with GPUs, `up` gives each worker one, unless the settings say otherwise."""
    import msgspec

    if settings.worker.device == "cpu" or settings.serve.gpus_per_worker:
        return settings
    if settings.worker.model.startswith("emulated:"):
        return settings
    import torch

    if not torch.cuda.is_available():
        if settings.worker.device == "cuda":
            fail("no CUDA device on this machine: use --device cpu")
        return settings
    share = min(1.0, torch.cuda.device_count() / settings.serve.replicas)
    return msgspec.structs.replace(
        settings, serve=msgspec.structs.replace(settings.serve, gpus_per_worker=share)
    )


def _show_ray_token() -> None:
    """Have Ray show this user's token, as it does by itself where it finds the cluster.

    A head that finds a token asks for it, but Ray shows it to no address that is given. To a
    cluster that asks for none, showing it does no harm.
    """
    named = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if named or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _listens(address: str) -> bool:
    """False where nobody listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        return True  # "auto" or a Ray Client's address: Ray knows better
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def _need_redis(settings: Settings) -> None:
    if not settings.redis_url:
        fail("where is Redis? Give --redis-url or STEMROUTE_REDIS_URL")


def _say_how_to_use(url: str, settings: Settings) -> None:
    name = settings.worker.served_name or Path(settings.worker.model).name
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    out.print(f"[bold]{url}/v1[/bold] serves {escape(name)}. Ctrl-C stops it.", highlight=False)
    out.print(
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    out.print(f"  stemroute status --url {url}", highlight=False, markup=False)
    out.print(f"  stemroute doctor --url {url}", highlight=False, markup=False)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
