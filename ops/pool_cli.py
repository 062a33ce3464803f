"""Commands of `stemroute` for a running pool: status, reload, explain, doctor."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.settings import load_settings
from ops.console import AdminKey, AsJson, Config, Url, ask_gateway, fail, out


def add_commands(app: typer.Typer) -> None:
    """Register the commands of this file."""
    for command in (status, reload, explain, doctor):
        app.command()(command)


def status(
    url: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = "",
    as_json: AsJson = False,
) -> None:
    """Show the workers as a gateway sees them."""
    from ops.status import cache_table, status_table

    fleet = ask_gateway(url, admin_key, "fleet")
    cache = ask_gateway(url, admin_key, "cache")
    if as_json:
        out.print_json(data=fleet | {"cache": cache})
    else:
        out.print(status_table(fleet))
        out.print(cache_table(cache))
    if fleet["bus"]["stale"] or fleet["refused"]:
        raise SystemExit(2)


def reload(
    model: Annotated[str, typer.Option(help="Model directory or file on the workers' machines.")],
    url: Url = "http://127.0.0.1:8000",
    worker: Annotated[str, typer.Option(help="Reload only this worker (default: all).")] = "",
    admin_key: AdminKey = "",
) -> None:
    """Load other weights of the same architecture, one worker after the other. Workers that start
    later load them too, unless --worker is given."""
    body = {"model": model, "worker": worker}
    answer = ask_gateway(url, admin_key, "weights", body)
    for changed in answer["workers"]:
        out.print(
            f"{changed['worker']}: weights {changed['weights'][:16]}, epoch {changed['epoch']}",
            highlight=False,
            markup=False,
        )


def explain(
    prompt: Annotated[str | None, typer.Option(help="Text of a completion.")] = None,
    chat: Annotated[str | None, typer.Option(help="Text of a user's message in a chat.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Body of a chat or completion request (JSON).")
    ] = None,
    model: Annotated[str, typer.Option(help="Model name (default: the first one served).")] = "",
    url: Url = "http://127.0.0.1:8000",
    admin_key: AdminKey = "",
    as_json: AsJson = False,
) -> None:
    """Show which worker a request would go to now, and why. Nothing is sent to a worker."""
    from ops.explain import explain_table

    if sum(given is not None for given in (prompt, chat, file)) != 1:
        fail("give one of --prompt TEXT, --chat TEXT and --file BODY.json", code=2)
    body: dict[str, Any] = {}
    if file is not None:
        try:
            body = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            fail(f"cannot read {file}: {error}")
    elif prompt is not None:
        body = {"prompt": prompt}
    else:
        body = {"messages": [{"role": "user", "content": chat}]}
    if model or "model" not in body:
        body["model"] = model or _first_model(url, admin_key)
    answer = ask_gateway(url, admin_key, "explain", body)
    if as_json:
        out.print_json(data=answer)
    else:
        out.print(explain_table(answer))


def doctor(
    url: Url = "http://127.0.0.1:8000",
    admin_key: Annotated[str | None, typer.Option(help="Admin key of the gateway.")] = None,
    api_key: Annotated[str | None, typer.Option(help="API key of the gateway.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Redis of the pool.")] = None,
    pool: Annotated[str | None, typer.Option(help="The pool.")] = None,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Check every link from Redis to a reused prompt; name broken links and their fix.

    For a `stemroute up` on this machine, Redis, pool and secret are found by the gateway's port.
    """
    import httpx
    import msgspec

    from ops.doctor import examine, healthy, links_table
    from ops.up_record import find_record, with_record

    flags = {
        "redis_url": redis_url,
        "pool": pool,
        "gateway.admin_key": admin_key,
        "gateway.api_key": api_key,
    }
    settings = load_settings(config, flags=flags)
    if record := find_record(url):
        settings = with_record(settings, record)
    try:
        links = asyncio.run(examine(settings, url))
    except (httpx.InvalidURL, ValueError) as error:
        fail(str(error))
    if as_json:
        out.print_json(data=msgspec.to_builtins(links))
    else:
        out.print(links_table(links))
    if not healthy(links):
        raise SystemExit(1)


def _first_model(url: str, admin_key: str) -> str:
    workers = ask_gateway(url, admin_key, "fleet")["workers"]
    if not workers:
        fail(f"the gateway at {url} knows no worker: see stemroute doctor")
    model: str = workers[0]["model"]
    return model
