"""Progress of a long run."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from loadgen.outcomes import Outcome


class Watcher(Protocol):
    """Receives the steps of a run. Must not block: it is called between requests."""

    def phase(self, text: str) -> None:
        """What happens now, such as "round_robin: waiting until quiet"."""

    def arm(self, name: str, requests: int) -> None:
        """An arm begins."""

    def ended(self, outcome: Outcome) -> None:
        """A request of the arm has ended, well or not."""


class Silent:
    """A watcher that prints nothing."""

    def phase(self, text: str) -> None:
        """Nothing."""

    def arm(self, name: str, requests: int) -> None:
        """Nothing."""

    def ended(self, outcome: Outcome) -> None:
        """Nothing."""


class Bars:
    """One progress bar an arm on a terminal; elsewhere nothing. A context manager."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._current: TaskID | None = None
        self._errors = 0

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, text: str) -> None:
        """Print it above the bars."""
        if not self._progress.disable:
            self._progress.console.print(text, style="dim", highlight=False, markup=False)

    def arm(self, name: str, requests: int) -> None:
        """Begin a new bar."""
        self._errors = 0
        self._current = self._progress.add_task(name, total=requests, note="")

    def ended(self, outcome: Outcome) -> None:
        """Advance the bar."""
        if self._current is None:
            return
        self._errors += outcome.status != "ok"
        note = f"{self._errors} errors" if self._errors else ""
        self._progress.update(self._current, advance=1, note=note)
