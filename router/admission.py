"""When a request starts: at once, or after a wait in the gateway's admission queue, or never.

A request is refused with 429 if it is expected to wait too long before it starts (`router.waits`).
Without a queue, it is also refused with 429 if no worker has a free block, and with 503 if no
worker of its model is ready. With a queue, it waits here until a worker is ready and has room for
its prompt, instead of at a worker that may no longer be the best one when it starts.

A request keeps one position in the queue from its arrival on:

    wait_for_worker ──a worker is ready──▶ (tokenise) ──place──▶ first in line, and room: placed
            ▲                                                       │
            └────── the workers that it was hashed for are gone ────┘

Requests of a model leave in order of priority, lower first, then of arrival, after an event that
may have made room: a report, the end of a request, a worker that became ready. A request that is
being tokenised blocks those behind it.

Nothing here waits or reads a clock: the gateway passes its event loop as the scheduler, a
simulation passes its virtual clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from math import inf
from typing import Protocol, Self

from cluster.priority_queue import PriorityQueue
from cluster.protocol import HEADER_TIMEOUT, RequestError
from router.dispatch import Dispatcher, NoRoom, Placement, TooSlow
from router.edge import no_ready_worker
from router.fleet import Fleet
from router.policies import Columns
from router.tokenization import Prompt
from router.waits import WaitLimit

Told = Placement | RequestError | None
"""How a wait ends: placed, refused, or None: check again which workers are ready, and hash the
prompt for them."""

Tell = Callable[[Told], None]


class Timer(Protocol):
    """A call that has been scheduled."""

    def cancel(self) -> None:
        """Cancel the call; no effect if it was made."""


class Scheduler(Protocol):
    """Makes calls later; an asyncio event loop is one. Delays are in seconds."""

    def call_soon(self, callback: Callable[[], object], /) -> Timer: ...

    def call_later(self, delay_s: float, callback: Callable[[], object], /) -> Timer: ...


class Ticket:
    """One request, from its arrival to its end: a position in the queue, then a booking at a
    worker. `close` (or the end of its `with` block) releases both.

    placement   where the request is booked; None without a booking
    priority    lower ones start first
    deadline    when the first token must have been generated, on the fleet's clock

    `wait_for_worker` and `place` call `tell` exactly once, immediately or later, unless the ticket
    is closed first. At most one of them may be pending.
    """

    __slots__ = (
        *("deadline", "model", "placement", "priority", "request_id"),
        *("_admission", "_is_late", "_prompt", "_tell", "_timer"),
    )

    def __init__(
        self,
        admission: Admission,
        model: str,
        request_id: str,
        priority: int = 0,
        deadline: float = inf,
    ) -> None:
        self.model = model
        self.request_id = request_id
        self.priority = priority
        self.deadline = deadline
        self.placement: Placement | None = None
        self._admission = admission
        self._is_late = False
        self._prompt: Prompt | None = None  # None: the prompt must be hashed first
        self._tell: Tell | None = None
        self._timer: Timer | None = None  # while it is in the queue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for_worker(self, tell: Tell) -> None:
        """Wait until a worker of the model is ready. Tells None, or a RequestError (404, 503)
        if the request may not wait or its time is up."""
        admission, model = self._admission, self.model
        if admission._is_ready(model):
            tell(None)
        elif admission._is_expected(model):
            admission._wait(self, None, tell)
        else:
            tell(no_worker(admission._fleet, model))

    def check_wait(self) -> None:
        """Raise RequestError (429) if the request is expected to wait too long. One that is in the
        queue already is not refused any more."""
        if self._timer is None:
            self._admission._check_wait(self)

    def place(self, prompt: Prompt, tell: Tell) -> None:
        """Book the request at a worker that has room. Tells the placement, None, or a RequestError
        (429, 503) if the request may not wait or its time is up."""
        admission, model = self._admission, self.model
        if self._timer is not None or self._is_late or model in admission._queues:
            admission._wait(self, prompt, tell)
            return
        try:
            self.placement = admission._place(self, prompt)
        except NoRoom:
            admission._wait(self, prompt, tell)
        except RequestError as error:
            tell(error)
        else:
            tell(self.placement)

    def move(self, prompt: Prompt, tried: Collection[str]) -> Placement | None:
        """Replace the booking by one at a worker that was not `tried`; None if there is none.

        A retry does not wait in the queue.
        """
        dispatcher = self._admission._dispatcher
        former, self.placement = self.placement, None
        if former is not None:
            dispatcher.fleet.release(former.booking)
        self.placement = dispatcher.place(self.model, prompt, self.request_id, tried)
        return self.placement

    def close(self) -> None:
        """The request has ended, whatever its outcome."""
        self._tell = None
        self._admission._leave(self)
        placement, self.placement = self.placement, None
        self._admission._dispatcher.ended(self.request_id, placement)

    def _told(self, told: Told) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell(told)


class Admission:
    """The admission queue. Not thread-safe.

    limit       most requests that may wait
    timeout_s   longest wait, from when the request enters the queue
    max_wait_s  longest expected wait until a request starts; 0: no limit
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        scheduler: Scheduler,
        limit: int,
        timeout_s: float,
        max_wait_s: float = 0.0,
    ) -> None:
        self.waiting = 0
        self.refused = Counter[str]()
        """Refusals with 429: error code -> requests."""
        self._dispatcher = dispatcher
        self._fleet = dispatcher.fleet
        self._scheduler = scheduler
        self._limit = limit
        self._timeout_s = timeout_s
        self._max_wait_s = max_wait_s
        self._limits: dict[str, WaitLimit] = {}  # by model
        self._queues: dict[str, PriorityQueue[Ticket, None]] = {}
        self._unready: set[str] = set()  # models with requests that wait for a worker
        self._looking: Timer | None = None
        self._looking_later: Timer | None = None
        self._unsubscribe = self._fleet.room.subscribe(self._look_soon)

    def ticket(
        self, model: str, request_id: str, priority: int = 0, deadline: float = inf
    ) -> Ticket:
        """A ticket for a request that has arrived. The caller closes it."""
        return Ticket(self, model, request_id, priority, deadline)

    def close(self) -> None:
        """Stop placing requests. Those in the queue wait until their timeout."""
        self._unsubscribe()
        for timer in (self._looking, self._looking_later):
            if timer is not None:
                timer.cancel()

    def _wait(self, ticket: Ticket, prompt: Prompt | None, tell: Tell) -> None:
        """Wait in the queue: at the ticket's position, or at the end if it has none."""
        model = ticket.model
        if ticket._is_late:
            tell(self._timed_out(model))
            return
        if ticket._timer is None:
            try:
                self._enter(ticket)
            except RequestError as error:
                tell(error)
                return
            expire = partial(self._expire, ticket)
            ticket._timer = self._scheduler.call_later(self._timeout_s, expire)
            queue = self._queues.setdefault(model, PriorityQueue())
            queue.add(ticket, None, ticket.priority)
            self.waiting += 1
        ticket._prompt, ticket._tell = prompt, tell
        if prompt is None:
            self._unready.add(model)
        self._look_soon()  # a suspect may become a candidate again without a report

    def _enter(self, ticket: Ticket) -> None:
        """Check that the ticket may enter the queue. Raises RequestError."""
        if self.waiting >= self._limit:
            raise self._full(ticket.model)
        expected_s, _ = self._check_wait(ticket)
        if expected_s:
            self._limit_of(ticket.model).admitted(self._fleet.clock(), expected_s)

    def _place(self, ticket: Ticket, prompt: Prompt) -> Placement | None:
        """Book the request. Raises NoRoom, and RequestError (400, 429) if it would start too late.

        What has waited in the queue was accepted before.
        """
        expected_s, limit_s, within_s = 0.0, inf, inf
        if ticket._timer is None:
            expected_s, limit_s = self._check_wait(ticket)
        if ticket.deadline < inf:
            within_s = ticket.deadline - self._fleet.clock()
        try:
            placement = self._dispatcher.place(
                ticket.model, prompt, ticket.request_id, wait_limit_s=limit_s, within_s=within_s
            )
        except TooSlow as slow:
            raise self._too_slow(ticket.model, slow, within_s) from None
        if expected_s and placement is not None:
            self._limit_of(ticket.model).admitted(self._fleet.clock(), expected_s)
        return placement

    def _check_wait(self, ticket: Ticket) -> tuple[float, float]:
        """The expected wait in seconds, and the longest that is accepted. Raises RequestError (429)
        if it is exceeded."""
        group = self._fleet.group(ticket.model)
        if group is None or not group.mask:
            return 0.0, inf  # it waits for a worker
        columns = self._fleet.columns_of(group)
        queue = self._queues.get(ticket.model)
        ahead = 0 if queue is None else queue.up_to(ticket.priority)
        if not ahead and not columns.wait_s.any():
            return 0.0, inf
        interval_s = _start_interval_s(columns)
        expected_s = self._fleet.least_wait_s(group, ticket.priority) + ahead * interval_s
        now, limit = self._fleet.clock(), self._limit_of(ticket.model)
        allowed_s = limit.allowed_s(now, interval_s)
        if expected_s > allowed_s:
            raise self._refusal(
                ticket.model,
                "overloaded",
                f"more is asked of the model `{ticket.model}` than its workers can serve: a request"
                f" would wait about {expected_s:.1f} s before it starts, {allowed_s:.1f} s are "
                "accepted",
                expected_s - allowed_s,
            )
        return expected_s, allowed_s

    def _too_slow(self, model: str, slow: TooSlow, within_s: float) -> RequestError:
        says = (
            f"the deadline cannot be met: the first token is expected in {slow.expected_s:.2f} s, "
            f"{max(0.0, within_s):.2f} s are left"
        )
        if slow.prefill_s <= within_s:
            return self._refusal(model, "deadline_unreachable", says, slow.expected_s - within_s)
        return RequestError(
            f"{says}; the prompt alone takes {slow.prefill_s:.2f} s: allow more time "
            f"({HEADER_TIMEOUT}), or send a shorter prompt",
            code="deadline_too_short",
        )

    def _refusal(self, model: str, code: str, found: str, over_s: float = 0.0) -> RequestError:
        """Status 429, with a time to come back; `over_s` is how much too long the wait is."""
        self.refused[code] += 1
        group = self._fleet.group(model)
        interval_s = 0.0
        if group is not None and group.mask:
            interval_s = _start_interval_s(self._fleet.columns_of(group))
        after_s = self._limit_of(model).refuse(self._fleet.clock(), over_s, interval_s)
        return RequestError(
            f"{found}: retry in {after_s} s",
            status=429,
            type="rate_limit_error",
            code=code,
            retry_after_s=after_s,
        )

    def _limit_of(self, model: str) -> WaitLimit:
        limit = self._limits.get(model)
        if limit is None:
            limit = self._limits[model] = WaitLimit(self._max_wait_s)
        return limit

    def _leave(self, ticket: Ticket) -> None:
        if ticket._timer is not None:
            self._remove(ticket)
            self._look_soon()  # those behind may need less room

    def _remove(self, ticket: Ticket) -> None:
        if ticket._timer is not None:
            ticket._timer.cancel()
            ticket._timer = None
        queue = self._queues[ticket.model]
        del queue[ticket]
        if not queue:
            del self._queues[ticket.model]
        self.waiting -= 1

    def _expire(self, ticket: Ticket) -> None:
        """Its time is up. A request that is being tokenised is told afterwards."""
        ticket._is_late = True
        self._leave(ticket)
        ticket._told(self._timed_out(ticket.model))

    def _look_soon(self) -> None:
        """Check the queue once for all events of this turn of the loop."""
        if self._queues and self._looking is None:
            self._looking = self._scheduler.call_soon(self._look)

    def _look(self) -> None:
        self._looking = None
        for model in list(self._queues):
            if model in self._unready and self._is_ready(model):
                self._unready.discard(model)
                for ticket in list(self._queues[model]):
                    if ticket._prompt is None:
                        ticket._told(None)
            while (queue := self._queues.get(model)) and self._place_first(next(iter(queue))):
                pass
        if self._looking_later is not None:
            self._looking_later.cancel()
            self._looking_later = None
        back_s = self._fleet.trust.next_return_s()
        if self._queues and back_s is not None:
            self._looking_later = self._scheduler.call_later(back_s, self._look_soon)

    def _place_first(self, ticket: Ticket) -> bool:
        """Try to place the first request of a queue; whether it has left the queue."""
        prompt = ticket._prompt
        if prompt is None:
            return False  # it waits for a ready worker, or is being tokenised
        try:
            placement = self._place(ticket, prompt)
        except NoRoom:
            return False
        except RequestError as error:
            self._remove(ticket)
            ticket._told(error)
            return True
        if placement is None:
            if self._is_ready(ticket.model):  # those that it was hashed for have been replaced
                ticket._prompt = None
                ticket._told(None)
            return False
        ticket.placement = placement
        self._remove(ticket)
        ticket._told(placement)
        return True

    def _is_ready(self, model: str) -> bool:
        group = self._fleet.group(model)
        return group is not None and bool(group.mask)

    def _is_expected(self, model: str) -> bool:
        """Whether a worker of `model` may become ready within `timeout_s`."""
        if not self._limit:
            return False
        absent_s = self._fleet.groups.absent_s(model)
        if absent_s is None:
            return self._fleet.group(model) is not None
        return absent_s < self._timeout_s

    def _timed_out(self, model: str) -> RequestError:
        within = f"within {self._timeout_s:g} s"
        if self._is_ready(model):
            found = f"no worker of the model `{model}` had room for the prompt {within}"
            return self._refusal(model, "no_room", found)
        return no_ready_worker(f"no worker of the model `{model}` became ready {within}")

    def _full(self, model: str) -> RequestError:
        waiting = f", and {self._limit} requests are waiting already" if self._limit else ""
        if not self._is_ready(model):
            return no_ready_worker(f"no worker of the model `{model}` is ready{waiting}")
        lacks = "room for the prompt" if self._limit else "a free KV block"
        return self._refusal(
            model, "no_room", f"no worker of the model `{model}` has {lacks}{waiting}"
        )


def no_worker(fleet: Fleet, model: str) -> RequestError:
    """The refusal of a request for a model without a ready worker: 404 or 503."""
    known = fleet.known_models()
    if known and model not in known:
        names = ", ".join(f"`{name}`" for name in known)
        return RequestError(
            f"the model `{model}` does not exist here: send one of {names}",
            status=404,
            param="model",
            code="model_not_found",
        )
    return no_ready_worker(f"no worker of the model `{model}` is ready")


def _start_interval_s(columns: Columns) -> float:
    """Measured seconds from one start of the workers' requests to the next; 0: unknown. A worker
    without a measurement counts like the mean of the others."""
    intervals = columns.start_interval_s
    known = intervals[intervals > 0]
    return len(known) / len(intervals) / float((1.0 / known).sum()) if len(known) else 0.0
