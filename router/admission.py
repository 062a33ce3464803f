"""Who may start now, and who waits at the gateway.

Without a queue a request for which no worker has a free block is refused with 429, and one whose
model has no ready worker with 503. With one, a request waits here while no worker is ready or has
room for its prompt, instead of at a worker that may not be the best one by the time it starts.

A request keeps its place from its arrival on. Where no worker is ready then, it is not hashed yet:

    arrives ──ready──▶ a worker is ready ──(is hashed)──place──▶ is the first, and there is room

It keeps it also where it must be hashed anew, because others have replaced the workers for which it
was hashed (`Outdated`).

Requests are released in order of arrival, when something happens that may have made room: a
report, the end of a request, a worker that is ready. One that is being hashed holds up those
behind it, for the milliseconds that this takes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from cluster.protocol import RequestError
from router.dispatch import Dispatcher, NoRoom, Placement
from router.edge import no_ready_worker
from router.tokenization import Prompt


class Outdated(Exception):
    """The prompt was hashed for workers that have been replaced by others since: hash it anew."""


class _Waiting:
    """A request in the queue; `placed` gets its place, or None where it must be hashed anew.

    prompt     None until it was hashed, or while it must be hashed anew
    deadline   of the event loop's clock
    """

    __slots__ = ("deadline", "model", "placed", "prompt", "request_id")

    def __init__(
        self, model: str, prompt: Prompt | None, request_id: str, timeout_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self.model = model
        self.prompt = prompt
        self.request_id = request_id
        self.deadline = loop.time() + timeout_s
        self.placed: asyncio.Future[Placement | None] = loop.create_future()


class Admission:
    """Places requests, or lets them wait. Owner of the queue; use it in the event loop only.

    limit      requests that may wait; 0: none does
    timeout_s  for so long at most, from their arrival
    """

    def __init__(self, dispatcher: Dispatcher, limit: int, timeout_s: float) -> None:
        self._dispatcher = dispatcher
        self._limit = limit
        self._timeout_s = timeout_s
        self._queues: dict[str, deque[_Waiting]] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._ready: dict[str, asyncio.Event] = {}
        self._looking: asyncio.Handle | None = None
        self._looking_later: asyncio.TimerHandle | None = None
        if limit:
            dispatcher.holds_back = True
            dispatcher.fleet.on_room = self._look_soon

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return len(self._waiting)

    def close(self) -> None:
        """Stop looking for room. Whoever still waits does so until its timeout."""
        self._dispatcher.fleet.on_room = _ignore
        for handle in (self._looking, self._looking_later):
            if handle is not None:
                handle.cancel()

    async def ready(self, model: str, request_id: str) -> None:
        """Return once a worker of `model` may serve; at once where waiting for one is in vain.

        In vain: without a queue, and for a model that has no workers and has had none for as long
        as a request may wait. Whoever waited keeps its place until `place` or `leave`.
        Raises RequestError (503) where the request may not wait, or not longer.
        """
        while not self._is_ready(model) and self._is_expected(model):
            waiting = self._waiting.get(request_id) or self._enter(model, None, request_id)
            try:
                async with asyncio.timeout_at(waiting.deadline):
                    await self._ready.setdefault(model, asyncio.Event()).wait()
            except TimeoutError as error:
                raise self._waited(model) from error

    async def place(
        self, model: str, prompt: Prompt, request_id: str, excluded: Collection[str] = ()
    ) -> Placement | None:
        """A place for the request, booked; the caller releases it. None where no worker may serve.

        A repeated attempt, which has workers `excluded`, has waited already and never does again.
        Raises RequestError (429, 503) where every worker is full or none is ready and the request
        may not wait, or not longer; Outdated where it has waited with another prompt than the
        workers know by now.
        """
        waiting = self._waiting.get(request_id)
        if excluded or (waiting is None and model not in self._queues):
            try:
                placement = self._dispatcher.place(model, prompt, request_id, excluded)
                if placement is not None or excluded or not self._would_wait(model, prompt):
                    return placement
            except NoRoom:
                if excluded:
                    return None
        if waiting is None:
            waiting = self._enter(model, prompt, request_id)
        waiting.prompt = prompt
        self._look_soon()
        try:
            async with asyncio.timeout_at(waiting.deadline):
                placement = await waiting.placed
        except TimeoutError as error:
            self._forget(waiting)
            raise self._waited(model) from error
        except asyncio.CancelledError:
            self._forget(waiting)
            raise
        if placement is None:
            raise Outdated
        return placement

    def leave(self, request_id: str) -> None:
        """The request has ended, however: it waits no more."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            self._forget(waiting)

    def _is_ready(self, model: str) -> bool:
        group = self._dispatcher.fleet.group(model)
        return group is not None and bool(group.mask)

    def _is_expected(self, model: str) -> bool:
        """Whether it makes sense to wait for a worker of `model`."""
        if not self._limit:
            return False
        fleet = self._dispatcher.fleet
        absent_s = fleet.groups.absent_s(model)
        return fleet.group(model) is not None if absent_s is None else absent_s < self._timeout_s

    def _would_wait(self, model: str, prompt: Prompt) -> bool:
        """Whether a request that found no worker waits for one."""
        return self._is_expected(model) and not self._dispatcher.outdated(model, prompt)

    def _enter(self, model: str, prompt: Prompt | None, request_id: str) -> _Waiting:
        """The last place in the queue. Raises RequestError where there is none."""
        if self.waiting >= self._limit:
            raise _full(model, self._limit, is_ready=self._is_ready(model))
        waiting = _Waiting(model, prompt, request_id, self._timeout_s)
        self._queues.setdefault(model, deque()).append(waiting)
        self._waiting[request_id] = waiting
        self._look_soon()  # a suspect may be trusted again without a report
        return waiting

    def _waited(self, model: str) -> RequestError:
        if self._is_ready(model):
            return _no_room(
                f"no worker of the model `{model}` had room for the prompt within "
                f"{self._timeout_s:g} s"
            )
        return no_ready_worker(
            f"no worker of the model `{model}` became ready within {self._timeout_s:g} s"
        )

    def _forget(self, waiting: _Waiting) -> None:
        """The request is given up. It may have got its place in this very moment."""
        placed = waiting.placed
        if placed.done() and not placed.cancelled():
            placement = placed.result()
            if placement is not None:
                self._dispatcher.fleet.release(placement.booking)
            return
        if self._waiting.pop(waiting.request_id, None) is not None:
            queue = self._queues[waiting.model]
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
            if self._is_ready(model) and model in self._ready:
                self._ready.pop(model).set()
            while queue and self._settle(queue[0]):
                del self._waiting[queue.popleft().request_id]
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
        if waiting.prompt is None:
            return False  # it is being hashed, or waits for a worker that is ready
        try:
            placement = self._dispatcher.place(waiting.model, waiting.prompt, waiting.request_id)
        except NoRoom:
            return False
        if placement is None:  # no worker is ready; one may come
            if self._dispatcher.outdated(waiting.model, waiting.prompt):
                waiting.prompt = None
                waiting.placed.set_result(None)
                waiting.placed = asyncio.get_running_loop().create_future()
            return False
        waiting.placed.set_result(placement)
        return True


def _full(model: str, limit: int, *, is_ready: bool) -> RequestError:
    waiting = f", and {limit} requests wait already" if limit else ""
    if not is_ready:
        return no_ready_worker(f"no worker of the model `{model}` is ready{waiting}")
    lacks = "room for the prompt" if limit else "a free KV block"
    return _no_room(f"no worker of the model `{model}` has {lacks}{waiting}")


def _no_room(found: str) -> RequestError:
    return RequestError(
        f"{found}: try again in a moment", status=429, type="rate_limit_error", code="no_room"
    )


def _ignore() -> None:
    return None
