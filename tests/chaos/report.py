"""The table that a run prints, a line per fault."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tests.chaos.driving import WHOLE_S, Fault, Result

COLUMNS = (
    "fault",
    "sent",
    "accepted",
    "refused",
    "failed",
    "broken",
    "wrong",
    "continued",
    "hung",
    "silence s",
    "slowest s",
    "recovery s",
    "load",
    "blocks",
    "MiB",
    "descriptors",
    "goal",
)
REASONS = 3
REASON_CHARACTERS = 160


def row(fault: Fault, result: Result) -> list[str]:
    """One fault's line, in the order of `COLUMNS`."""
    tally = result.tally
    recovery = f"> {WHOLE_S:g}" if result.recovery_s is None else f"{result.recovery_s:.1f}"
    return [
        fault.name,
        *(f"{n:,}" for n in (tally.sent, tally.accepted, tally.refused, tally.failed)),
        *(f"{n:,.0f}" for n in (tally.broken, tally.wrong, result.continued, tally.hung)),
        f"{tally.silence_s:.1f}",
        f"{tally.slowest_s:.1f}",
        recovery,
        str(result.quiet.load),
        str(result.quiet.blocks),
        "{:.0f} → {:.0f}".format(*result.memory_mib),
        "{} → {}".format(*result.descriptors),
        "missed" if result.misses else "reached",
    ]


def details(fault: Fault, result: Result) -> list[str]:
    """What a fault's line does not say: missed goals, further figures, what clients were told."""
    lines = [f"missed: {miss}" for miss in result.misses]
    lines += result.notes
    for reason, count in result.tally.reasons.most_common(REASONS):
        lines.append(f"{count} × {reason[:REASON_CHARACTERS]}")
    return [f"{fault.name}: {line}" for line in lines]


def print_table(results: list[tuple[Fault, Result]], console: Console) -> None:
    """The table, and below it what each line does not say."""
    if not results:
        return
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if 0 < number < len(COLUMNS) - 1 else "left")
    for fault, result in results:
        table.add_row(*row(fault, result))
    console.print(table)
    for fault, result in results:
        for line in details(fault, result):
            console.print(line, markup=False, highlight=False)
