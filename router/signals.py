"""Subscriptions to an event without arguments."""

from __future__ import annotations

from collections.abc import Callable


class Signal:
    """Calls its listeners in the order of their subscription."""

    __slots__ = ("_listeners",)

    def __init__(self) -> None:
        self._listeners: tuple[Callable[[], object], ...] = ()

    def subscribe(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call `listener` at each event. Returns a function that ends the subscription."""
        self._listeners = (*self._listeners, listener)

        def unsubscribe() -> None:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

        return unsubscribe

    def send(self) -> None:
        """Call the listeners."""
        for listener in self._listeners:
            listener()
