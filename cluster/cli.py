"""The command `stemroute`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from cluster.settings import Settings, SettingsError, load_settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A prefix-locality-aware request router for a GPU cluster.",
)
out = Console() if sys.stdout.isatty() else Console(width=160)
err = Console(stderr=True)

Config = Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")]
Url = Annotated[str, typer.Option(help="Base URL of a gateway.")]


def main() -> None:
    """Entry point: known trouble ends with one sentence, not with a trace."""
    try:
        app()
    except SettingsError as error:
        _fail(str(error))


def _fail(sentence: str, code: int = 1) -> None:
    err.print(f"[red]stemroute:[/red] {escape(sentence)}", highlight=False, soft_wrap=True)
    raise SystemExit(code)


@app.command()
def up(
    workers: Annotated[int | None, typer.Option(help="Number of workers.")] = None,
    model: Annotated[
        str | None, typer.Option(help="smollm2, a Hugging Face directory or a GGUF file.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    host: Annotated[str | None, typer.Option(help="Interface of the gateway.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the gateway; 0 for a free one.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Routing policy, such as locality or dynamo:temperature=0.5.")
    ] = None,
    queue: Annotated[
        int | None, typer.Option(help="Requests that may wait for a worker with room.")
    ] = None,
    kv_blocks: Annotated[int | None, typer.Option(help="KV blocks a worker; 0: as fit.")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis to use instead of an embedded Valkey.")
    ] = None,
    config: Config = None,
) -> None:
    """Start a whole cluster on this machine and serve until Ctrl-C."""
    from cluster.local import LocalCluster, LocalClusterError

    flags = {
        "serve.replicas": workers,
        "worker.model": model,
        "worker.device": device,
        "worker.kv_blocks": kv_blocks,
        "gateway.host": host,
        "gateway.port": port,
        "gateway.policy": policy,
        "gateway.queue": queue,
        "redis_url": redis_url,
    }
    settings = _with_gpus(load_settings(config, flags=flags))
    _stop_on_signals()
    try:
        with LocalCluster(settings, say=_say) as cluster:
            _say_how_to_use(cluster.url, cluster.settings)
            cluster.watch()
    except KeyboardInterrupt:
        _say("stopped")
    except LocalClusterError as error:
        _fail(str(error))


@app.command()
def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="Where the report goes.")] = Path(
        "out/demo"
    ),
) -> None:
    """Compare round_robin with locality on a small real model, on this machine's CPUs."""
    from cluster.demo import demo_settings, loadgen_arguments, measure_rate
    from cluster.local import LocalCluster, LocalClusterError

    _stop_on_signals()
    try:
        with LocalCluster(demo_settings(), say=_say) as cluster:
            _say("measuring what this machine can do")
            rate = measure_rate(cluster.url)
            arguments = loadgen_arguments(cluster.url, rate, out_dir)
            _say(f"loadgen {' '.join(arguments)}")
            command = [sys.executable, "-m", "loadgen", *arguments]
            code = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        code = 130
    except LocalClusterError as error:
        _fail(str(error))
    raise SystemExit(code)


@app.command()
def gateway(
    host: Annotated[str | None, typer.Option(help="Interface to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for a free one.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Routing policy, such as locality or dynamo:temperature=0.5.")
    ] = None,
    queue: Annotated[
        int | None, typer.Option(help="Requests that may wait for a worker with room.")
    ] = None,
    redis_url: Annotated[str | None, typer.Option(help="Redis of the pool.")] = None,
    config: Config = None,
) -> None:
    """Run a gateway for the workers of a pool."""
    import uvloop

    from router.gateway import serve_gateway

    flags = {
        "gateway.host": host,
        "gateway.port": port,
        "gateway.policy": policy,
        "gateway.queue": queue,
        "redis_url": redis_url,
    }
    settings = load_settings(config, flags=flags)
    _need_redis(settings)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        uvloop.run(_until_signal(serve_gateway(settings)))
    except OSError as error:
        _fail(f"the gateway cannot listen on {settings.gateway.host}: {error}")
    except ValueError as error:
        _fail(str(error))


@app.command()
def deploy(
    address: Annotated[str, typer.Option(help="Ray cluster; auto finds this node's.")] = "auto",
    workers: Annotated[int | None, typer.Option(help="Number of workers.")] = None,
    model: Annotated[
        str | None, typer.Option(help="smollm2, a Hugging Face directory or a GGUF file.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    gpus: Annotated[float | None, typer.Option(help="GPUs a worker.")] = None,
    worker_host: Annotated[
        str, typer.Option(help="Interface of the workers' servers: gateways must reach it.")
    ] = "0.0.0.0",
    redis_url: Annotated[str | None, typer.Option(help="Redis that all nodes reach.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Drain and end the workers.")] = False,
    config: Config = None,
) -> None:
    """Deploy the workers onto a Ray cluster that runs already."""
    flags = {
        "serve.replicas": workers,
        "serve.gpus_per_worker": gpus,
        "worker.model": model,
        "worker.device": device,
        "worker.host": worker_host,
        "redis_url": redis_url,
    }
    settings = load_settings(config, flags=flags)
    import ray

    from cluster.serve_app import remove_application, run_application

    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    except ConnectionError as error:
        _fail(f"no Ray cluster at {address}: {error}. Start one with: ray start --head")
    try:
        if remove:
            remove_application()
            _say("the workers have been removed")
            return
        _need_redis(settings)
        if not settings.secret:
            _say(
                "note: without STEMROUTE_SECRET whoever reaches a worker's port can use it, and "
                "whoever reads Redis can test guesses of prompts"
            )
        run_application(settings)
        _say(f"{settings.serve.replicas} workers are ready in the pool {settings.pool!r}")
        _say("next: stemroute gateway --redis-url … (with the same STEMROUTE_SECRET)")
    except RuntimeError as error:
        _fail(f"the workers cannot start: {error}")
    finally:
        ray.shutdown()


@app.command()
def status(
    url: Url = "http://127.0.0.1:8000",
    admin_key: Annotated[
        str, typer.Option(envvar="STEMROUTE_GATEWAY_ADMIN_KEY", help="Key for /admin.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the workers as a gateway sees them."""
    from cluster.status import status_table

    headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    try:
        answer = httpx.get(url.rstrip("/") + "/admin/fleet", headers=headers, timeout=10)
        answer.raise_for_status()
        fleet: dict[str, Any] = answer.json()
    except httpx.HTTPStatusError as error:
        _fail(f"{url} answers {error.response.status_code}: {error.response.text}")
    except (httpx.HTTPError, ValueError) as error:
        _fail(f"no gateway answers at {url}: {error}")
    if as_json:
        out.print_json(data=fleet)
    else:
        out.print(status_table(fleet))
    if fleet["bus"]["stale"] or fleet["refused"]:
        raise SystemExit(2)


def _with_gpus(settings: Settings) -> Settings:
    """On a machine with GPUs `up` gives each worker one, unless the settings say otherwise."""
    import msgspec

    if settings.worker.device == "cpu" or settings.serve.gpus_per_worker:
        return settings
    if settings.worker.model.startswith("emulated:"):
        return settings
    import torch

    if not torch.cuda.is_available():
        if settings.worker.device == "cuda":
            _fail("no CUDA device on this machine: use --device cpu")
        return settings
    share = min(1.0, torch.cuda.device_count() / settings.serve.replicas)
    return msgspec.structs.replace(
        settings, serve=msgspec.structs.replace(settings.serve, gpus_per_worker=share)
    )


def _need_redis(settings: Settings) -> None:
    if not settings.redis_url:
        _fail("where is Redis? Give --redis-url or STEMROUTE_REDIS_URL")


def _say(sentence: str) -> None:
    err.print(f"[dim]{escape(sentence)}[/dim]", highlight=False, soft_wrap=True)


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


def _stop_on_signals() -> None:
    """SIGTERM and a closed terminal stop as Ctrl-C does."""

    def interrupt(number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


async def _until_signal(serving: Any) -> None:
    """Run until it ends by itself or a signal asks for it."""
    task = asyncio.ensure_future(serving)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        if not task.cancelled():
            raise


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
