"""Output, messages and errors of the command `stemroute`, and its calls to a gateway."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from ops.addresses import base_url, uses_proxy

out = Console() if sys.stdout.isatty() else Console(width=160)
err = Console(stderr=True)

Config = Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")]
AdminKey = Annotated[
    str, typer.Option(envvar="STEMROUTE_GATEWAY_ADMIN_KEY", help="Admin key of the gateway.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Url = Annotated[str, typer.Option(help="Base URL of a gateway.")]

READ_TIMEOUT_S = 10.0


def say(sentence: str) -> None:
    """Print progress to standard error."""
    err.print(f"[dim]{escape(sentence)}[/dim]", highlight=False, soft_wrap=True)


def fail(sentence: str, code: int = 1) -> NoReturn:
    """End the command with an error message of one sentence."""
    err.print(f"[red]stemroute:[/red] {escape(sentence)}", highlight=False, soft_wrap=True)
    raise SystemExit(code)


def ask_gateway(
    url: str, admin_key: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON object of a gateway's `/admin/<path>`: POST where there is a body.

    Ends the command with a message if there is no answer or an error. A POST has no timeout,
    because loading weights takes long.
    """
    try:
        url = base_url(url)
    except ValueError as error:
        fail(str(error))
    headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    try:
        answer = httpx.request(
            "GET" if body is None else "POST",
            f"{url}/admin/{path}",
            headers=headers,
            json=body,
            timeout=httpx.Timeout(10, read=READ_TIMEOUT_S if body is None else None),
            trust_env=uses_proxy(url),
        )
        answer.raise_for_status()
        told: dict[str, Any] = answer.json()
    except httpx.HTTPStatusError as error:
        fail(f"{url} answers {error.response.status_code}: {_reason(error.response)}")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        fail(f"no gateway answers at {url}: {error}")
    return told


def _reason(answer: httpx.Response) -> str:
    """The message of an OpenAI error object, or the whole text."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text
