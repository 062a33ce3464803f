"""Output of `stemroute explain`: every worker's figures for one request."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def explain_table(answer: dict[str, Any]) -> RenderableType:
    """Render the JSON of a gateway's `POST /admin/explain`."""
    cold = any(worker.get("cold_tokens") for worker in answer["workers"])
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("worker")
    for name in (
        "hit",
        "of it coming",
        *(["cold"] if cold else []),
        "new",
        "pending",
        "batch",
        "free blocks",
        "cost",
    ):
        table.add_column(name, justify="right")
    table.add_column("left out because")
    for worker in answer["workers"]:
        table.add_row(
            "→" if worker["chosen"] else "",
            worker["worker"],
            str(worker["hit_tokens"]),
            str(worker["coming_tokens"]),
            *([str(worker.get("cold_tokens", 0))] if cold else []),
            str(worker["new_tokens"]),
            str(worker["pending_tokens"]),
            str(worker["batch"]),
            str(worker["free_blocks"]),
            "-" if worker["cost"] is None else f"{worker['cost']:,.6g}",
            worker["left_out"],
            style="bold" if worker["chosen"] else "dim" if worker["left_out"] else "",
        )
    head = Text(
        f"{answer['kind']} of {answer['prompt_tokens']} tokens for {answer['model']} "
        f"({answer['blocks']} full blocks of {answer['block_size']}), policy {answer['policy']}"
    )
    return Group(head, table, Text(verdict(answer)))


def verdict(answer: dict[str, Any]) -> str:
    """The decision in a sentence."""
    if not answer["chosen"]:
        return "no worker can serve it"
    sentence = f"{answer['chosen']} is chosen: {answer['because']}"
    if not answer["second"]:
        return sentence
    margin = answer["margin"]
    if margin is None:
        return f"{sentence}; {answer['second']} is second best"
    share = answer["margin_share"]
    by = f"{abs(margin):,.6g}" + ("" if share is None else f" ({abs(share):.1%})")
    if margin == 0:
        return f"{sentence}; {answer['second']} has the same cost: load or chance decided"
    if margin < 0:
        return f"{sentence}; {answer['second']} costs less by {by}: a near-tie is decided by load"
    return f"{sentence}; {answer['second']} is second best, its cost is higher by {by}"
