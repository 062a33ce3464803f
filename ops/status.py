"""Output of `stemroute status`: the workers and their caches as a gateway sees them."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def status_table(fleet: dict[str, Any]) -> RenderableType:
    """Render the JSON of a gateway's `/admin/fleet`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("worker")
    table.add_column("state")
    table.add_column("model")
    table.add_column("device")
    for name in ("running", "waiting", "pending tokens", "KV use", "cached", "indexed", "routed"):
        table.add_column(name, justify="right")
    for worker in fleet["workers"]:
        capacity = worker["capacity_blocks"]
        used = capacity - worker["free_blocks"]
        style = "" if worker["indexed_blocks"] == worker["cached_blocks"] else "yellow"
        if worker["worker"] in fleet["disagreeing"]:
            style = "red"
        table.add_row(
            worker["worker"],
            _state(worker),
            worker["model"],
            worker["device"],
            str(worker["running"]),
            str(worker["waiting"]),
            str(worker["pending_prefill_tokens"]),
            f"{used / capacity:.0%}" if capacity else "-",
            str(worker["cached_blocks"]),
            Text(str(worker["indexed_blocks"]), style=style),
            str(worker["routed"]),
        )
    bus = fleet["bus"]
    head = Text(f"pool {fleet['pool']}, policy {fleet['policy']}, {fleet['in_flight']} in flight")
    lines: list[RenderableType] = [head, table]
    if not fleet["workers"]:
        lines.append(Text("no workers", style="yellow"))
    if bus["stale"]:
        lines.append(Text(f"the index is stale: {bus['reason']}", style="red"))
    else:
        lines.append(
            Text(
                f"index: {bus['reports']} reports, {bus['gaps']} gaps, "
                f"{bus['disagreements']} disagreements, {bus['repairs']} repairs"
            )
        )
    lines += [Text(encoder_line(encoder)) for encoder in fleet["encoders"]]
    if bus["warning"]:
        lines.append(Text(bus["warning"], style="yellow"))
    lines += [
        Text(f"refused: {worker}: {reason}", style="red")
        for worker, reason in fleet["refused"].items()
    ]
    return Group(*lines)


def _state(worker: dict[str, Any]) -> Text:
    if worker["kept"]:
        return Text(f"{worker['state']}, last report {worker['report_age_s']:.0f} s ago", "yellow")
    if worker["left_out"]:
        return Text(f"{worker['state']}, left out: {worker['left_out']}", "red")
    return Text(worker["state"], style="green" if worker["state"] == "ready" else "yellow")


def encoder_line(encoder: dict[str, Any]) -> str:
    """The library that encodes the prompts of a model, with the reason if it is the slower one."""
    line = f"{encoder['model']}: prompts are encoded by {encoder['library']} {encoder['version']}"
    return f"{line}, because {encoder['reason']}" if encoder["reason"] else line


def cache_table(cache: dict[str, Any]) -> RenderableType:
    """Render the JSON of a gateway's `/admin/cache`.

    `reused` is the share of prompt tokens that were not computed; evictions are counted by reason:
    for space, over the cache's share, expired.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("cache of", "eviction"):
        table.add_column(name)
    for name in (
        "hits",
        "partial",
        "misses",
        "reused",
        "evicted: space/share/expired",
        "age at eviction",
        "pinned",
        "bytes a token",
        "pool use",
    ):
        table.add_column(name, justify="right")
    for worker in cache["workers"]:
        reused, computed = worker["reused_tokens"], worker["computed_prompt_tokens"]
        age_s = worker["mean_eviction_age_s"]
        table.add_row(
            worker["worker"],
            worker["eviction"],
            str(worker["hits"]),
            str(worker["partial_hits"]),
            str(worker["misses"]),
            f"{reused / (reused + computed):.0%}" if reused + computed else "-",
            f"{worker['evictions_for_space']}/{worker['evictions_over_share']}/"
            f"{worker['evictions_expired']}",
            "-" if age_s is None else f"{age_s:.1f} s",
            str(worker["pinned_blocks"]),
            str(worker["kv_bytes_a_token"]),
            f"{worker['pool_use']:.0%}",
        )
    tiers = [Text(_tiers_line(w["worker"], w["tiers"])) for w in cache["workers"] if w.get("tiers")]
    silent = [
        Text(f"no cache statistics from {worker}: {reason}", style="yellow")
        for worker, reason in cache["silent"].items()
    ]
    return Group(table, *tiers, *silent)


def _tiers_line(worker: str, tiers: dict[str, Any]) -> str:
    """Contents and use of a worker's cold tiers."""
    line = f"{worker}: cold tiers:"
    for name, title in (("cpu", "host memory"), ("disk", "disk")):
        if tiers[f"{name}_capacity_blocks"]:
            line += (
                f" {title} {tiers[f'{name}_blocks']} of {tiers[f'{name}_capacity_blocks']} blocks, "
                f"{tiers[f'{name}_loaded_blocks']} loaded, {tiers[f'{name}_evictions']} evicted;"
            )
    return (
        f"{line} {tiers['loads']} loads, {tiers['failed_loads']} of them cut short, "
        f"{tiers['declined_loads']} times computing was faster"
    )
