"""A context manager for parts that are started and stopped."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class StartStop:
    """Starts on entry; stops on exit, and also where the start fails."""

    def start(self) -> None:
        """Start all parts. Where it raises, `stop` ends those that have started."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop all parts that have started."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
