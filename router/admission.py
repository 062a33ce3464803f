"""Who may start now, and who waits at the gateway.

Without a queue a request for which no worker has a free block is refused with 429. With one, a
request waits here while no worker has room for its prompt, instead of at a worker that may not
be the best one by the time it starts. Requests are released in order of arrival, when something
happens that may have made room: a report, the end of a request, a worker that is ready.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from cluster.protocol import RequestError
from router.dispatch import Dispatcher, NoRoom, Placement
from router.tokenization import Prompt


class _Waiting:
    """A request in the queue; `placed` gets its place, or None where it must be hashed anew."""

    __slots__ = ("model", "placed", "prompt", "request_id")

    def __init__(self, model: str, prompt: Prompt, request_id: str) -> None:
        self.model = model
        self.prompt = prompt
        self.request_id = request_id
        self.placed: asyncio.Future[Placement | None] = asyncio.get_running_loop().create_future()


class Admission:
    """Places requests, or lets them wait. Owner of the queue; use it in the event loop only.

    limit      requests that may wait; 0: none does
    timeout_s  for so long at most
    """

    def __init__(self, dispatcher: Dispatcher, limit: int, timeout_s: float) -> None:
        self._dispatcher = dispatcher
        self._limit = limit
        self._timeout_s = timeout_s
        self._queues: dict[str, deque[_Waiting]] = {}
        self._looking: asyncio.Handle | None = None
        self._looking_later: asyncio.TimerHandle | None = None
        if limit:
            dispatcher.holds_back = True
            dispatcher.fleet.on_room = self._look_soon

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return sum(map(len, self._queues.values()))

    def close(self) -> None:
        """Stop looking for room. Whoever still waits does so until its timeout."""
        self._dispatcher.fleet.on_room = _ignore
        for handle in (self._looking, self._looking_later):
            if handle is not None:
                handle.cancel()

    async def place(
        self, model: str, prompt: Prompt, request_id: str, excluded: Collection[str] = ()
    ) -> Placement | None:
        """A place for the request, booked; the caller releases it. None where no worker may serve.

        A repeated attempt, which has workers `excluded`, has waited already and never does again.
        Raises RequestError (429) where every worker is full and the request may not wait, or
        not longer.
        """
        if excluded or model not in self._queues:
            try:
                return self._dispatcher.place(model, prompt, request_id, excluded)
            except NoRoom:
                if excluded:
                    return None
        if self.waiting >= self._limit:
            raise _full(model, self._limit)
        waiting = _Waiting(model, prompt, request_id)
        self._queues.setdefault(model, deque()).append(waiting)
        self._look_soon()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await waiting.placed
        except TimeoutError as error:
            self._forget(waiting)
            raise _waited(model, self._timeout_s) from error
        except asyncio.CancelledError:
            self._forget(waiting)
            raise

    def _forget(self, waiting: _Waiting) -> None:
        """The request is given up. It may have got its place in this very moment."""
        placed = waiting.placed
        if placed.done() and not placed.cancelled():
            placement = placed.result()
            if placement is not None:
                self._dispatcher.fleet.release(placement.booking)
            return
        queue = self._queues.get(waiting.model)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            if not queue:
                del self._queues[waiting.model]
        self._look_soon()  # those behind may need less

    def _look_soon(self) -> None:
        """Look once for all that happens in this turn of the loop."""
        if self._queues and self._looking is None:
            self._looking = asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looking = None
        for model in list(self._queues):
            queue = self._queues[model]
            while queue and self._settle(queue[0]):
                queue.popleft()
            if not queue:
                del self._queues[model]
        if self._looking_later is not None:
            self._looking_later.cancel()
            self._looking_later = None
        back_s = self._dispatcher.fleet.next_return_s()
        if self._queues and back_s is not None:
            self._looking_later = asyncio.get_running_loop().call_later(back_s, self._look_soon)

    def _settle(self, waiting: _Waiting) -> bool:
        """Whether the request need not wait any longer."""
        if waiting.placed.done():
            return True
        try:
            placement = self._dispatcher.place(waiting.model, waiting.prompt, waiting.request_id)
        except NoRoom:
            return False
        if placement is None and not self._dispatcher.outdated(waiting.model, waiting.prompt):
            return False  # no worker is ready; one may come
        waiting.placed.set_result(placement)
        return True


def _full(model: str, limit: int) -> RequestError:
    lacks = (
        f"room for the prompt, and {limit} requests wait already" if limit else "a free KV block"
    )
    return RequestError(
        f"no worker of the model `{model}` has {lacks}: try again in a moment",
        status=429,
        type="rate_limit_error",
        code="no_room",
    )


def _waited(model: str, timeout_s: float) -> RequestError:
    return RequestError(
        f"no worker of the model `{model}` had room for the prompt within {timeout_s:g} s: try "
        "again in a moment",
        status=429,
        type="rate_limit_error",
        code="no_room",
    )


def _ignore() -> None:
    return None
