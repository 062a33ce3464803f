"""A full worker is no candidate; a request waits in order of arrival, or is told to come back."""

import asyncio
import json

import pytest

from cluster.protocol import Load
from loadgen.simulation.events import Clock
from router.admission import Admission, Ticket, Told
from router.fleet import Fleet
from tests.router.deciding import dispatcher_of, prompt_of
from tests.router.support import Rig, card, report

FULL = Load(running=3, free_blocks=0)
PROMPT = "0123456789ab"  # 12 tokens, 3 blocks of 4


def free(blocks, **more):
    return Load(running=3, free_blocks=blocks, **more)


async def waits(rig, count=1):
    """Until so many requests wait at the gateway, which is announced to nobody."""
    while rig.gateway.admission.waiting != count:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_a_full_worker_is_no_candidate():
    async with Rig(workers=2) as rig:
        rig.fleet.on_report(report("w0", load=FULL))
        rig.fleet.on_report(report("w1", load=free(100, pending_prefill_tokens=10_000)))
        for _ in range(4):
            _, headers, _ = await rig.complete(PROMPT)
            assert headers["x-stemroute-worker"] == "w1"


async def test_a_worker_without_room_for_this_prompt_is_none_where_another_has_room():
    async with Rig(workers=2) as rig:
        rig.fleet.on_report(report("w0", load=free(2)))
        rig.fleet.on_report(report("w1", load=free(3, pending_prefill_tokens=10_000)))
        _, headers, _ = await rig.complete(PROMPT)
        assert headers["x-stemroute-worker"] == "w1"
        _, headers, _ = await rig.complete("short")
        assert headers["x-stemroute-worker"] == "w0"


async def test_without_a_queue_a_request_waits_at_a_worker_while_one_has_any_block():
    async with Rig() as rig:
        rig.fleet.on_report(report("w0", load=free(1)))
        assert (await rig.complete(PROMPT))[0] == 200


async def test_where_all_are_full_the_client_is_told_when_to_come_back():
    async with Rig(workers=2) as rig:
        for worker in ("w0", "w1"):
            rig.fleet.on_report(report(worker, load=FULL))
        status, headers, body = await rig.complete(PROMPT)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert body["error"]["code"] == "no_room"
        assert "no worker of the model `tiny` has a free KV block" in body["error"]["message"]
        rig.fleet.on_report(report("w1", load=free(50)))
        assert (await rig.complete(PROMPT))[0] == 200


async def test_draining_workers_are_none_and_a_full_one_does_not_take_their_place():
    async with Rig(workers=2) as rig:
        rig.fleet.on_report(report("w0", state="draining"))
        rig.fleet.on_report(report("w1", load=FULL))
        assert (await rig.complete(PROMPT))[0] == 429


async def test_the_queue_releases_in_order_of_arrival_as_room_comes():
    async with Rig(queue=10) as rig:
        await rig.complete(PROMPT)  # the tokenizer is there from now on
        rig.fleet.on_report(report("w0", load=FULL))
        order = []

        async def ask(number):
            status, _, _ = await rig.complete(f"{number}123456789ab")
            order.append((number, status))

        tasks = []
        for number in range(4):
            tasks.append(asyncio.create_task(ask(number)))
            await waits(rig, number + 1)
        arrived = len(rig.workers[0].requests)
        block = asyncio.Event()
        answer = rig.workers[0].answer

        async def held(request, generate):
            await block.wait()
            return await answer(request, generate)

        rig.workers[0].answer = held
        # room for two prompts of 3 blocks, not for three: what is on its way counts
        rig.fleet.on_report(report("w0", load=free(8)))
        await waits(rig, 2)
        for _ in range(arrived + 2):
            await rig.arrivals.get()
        sent = [generate.token_ids for generate in rig.workers[0].requests[arrived:]]
        assert sorted(token_ids[0] for token_ids in sent) == sorted(_first_tokens("01"))
        assert rig.gateway.admission.waiting == 2
        # nobody overtakes, though a short one would fit
        late = asyncio.create_task(rig.complete("x"))
        await waits(rig, 3)
        block.set()
        rig.fleet.on_report(report("w0", load=free(500)))
        await asyncio.gather(*tasks)
        assert (await late)[0] == 200
        assert {status for _, status in order} == {200}
        assert sorted(number for number, _ in order[:2]) == [0, 1]
        assert rig.gateway.admission.waiting == 0


def _first_tokens(characters):
    from tests.router.support import TOKENIZER

    vocabulary = json.loads(TOKENIZER)["model"]["vocab"]
    return [vocabulary[character] for character in characters]


async def test_the_end_of_a_request_makes_room_without_a_report():
    async with Rig(queue=10) as rig:
        await rig.complete(PROMPT)
        block = asyncio.Event()
        answer = rig.workers[0].answer

        async def held(request, generate):
            await block.wait()
            return await answer(request, generate)

        rig.workers[0].answer = held
        rig.fleet.on_report(report("w0", load=free(4)))
        first = asyncio.create_task(rig.complete("abcdefghijkl"))
        await rig.workers[0].got_request.wait()
        second = asyncio.create_task(rig.complete("mnopqrstuvwx"))
        await waits(rig)
        block.set()
        assert [(await task)[0] for task in (first, second)] == [200, 200]


async def test_the_queue_is_bounded():
    async with Rig(queue=1) as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=FULL))
        first = asyncio.create_task(rig.complete("abcdefghijkl"))
        await waits(rig)
        status, headers, body = await rig.complete("mnopqrstuvwx")
        assert (status, headers["Retry-After"], body["error"]["code"]) == (429, "1", "no_room")
        assert "1 requests are waiting already" in body["error"]["message"]
        async with rig.http.get("/metrics") as metrics:
            assert "stemroute_gateway_queued_requests 1.0" in await metrics.text()
        rig.fleet.on_report(report("w0", load=free(100)))
        assert (await first)[0] == 200


async def test_a_client_that_goes_away_leaves_the_queue_and_those_behind_it_move_up():
    async with Rig(queue=5) as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=free(2)))
        first = asyncio.create_task(rig.complete("abcdefghijkl"))
        await waits(rig)
        second = asyncio.create_task(rig.complete("abcd"))
        await waits(rig, 2)
        first.cancel()
        assert (await second)[0] == 200
        assert rig.gateway.admission.waiting == 0


async def test_a_request_waits_no_longer_than_it_may():
    async with Rig(queue=5, queue_timeout_s=0.01) as rig:
        await rig.complete(PROMPT)
        rig.fleet.on_report(report("w0", load=FULL))
        status, _, body = await rig.complete(PROMPT)
        assert (status, body["error"]["code"]) == (429, "no_room")
        assert "within 0.01 s" in body["error"]["message"]
        assert rig.gateway.admission.waiting == 0


async def test_a_worker_that_becomes_ready_serves_who_waits():
    async with Rig(workers=2, queue=5) as rig:
        rig.fleet.on_report(report("w1", state="draining"))
        rig.fleet.on_report(report("w0", load=FULL))
        asked = asyncio.create_task(rig.complete(PROMPT))
        await waits(rig)
        rig.fleet.on_report(report("w1", state="ready", load=free(100)))
        assert (await asked)[1]["x-stemroute-worker"] == "w1"


class Queued:
    """Tickets over one worker, whose time a test moves, and what each of them is told."""

    def __init__(self, free_blocks: int = 0, limit: int = 5, timeout_s: float = 10.0) -> None:
        self.clock = Clock()
        self.dispatcher = dispatcher_of([1], holds_back=True)
        self.admission = Admission(self.dispatcher, self.clock, limit, timeout_s)
        self.told: dict[str, list[Told]] = {}
        self.free(free_blocks)

    @property
    def fleet(self) -> Fleet:
        return self.dispatcher.fleet

    def free(self, blocks: int, state: str = "ready") -> None:
        self.fleet.on_report(report("w000", load=free(blocks), state=state))

    def place(self, ticket: Ticket, tokens: int = 12) -> None:
        told = self.told.setdefault(ticket.request_id, [])
        ticket.place(prompt_of(tokens), told.append)

    def wait(self, ticket: Ticket) -> None:
        ticket.wait_for_worker(self.told.setdefault(ticket.request_id, []).append)

    def tickets(self, count: int) -> list[Ticket]:
        return [self.admission.ticket("tiny", f"r{number}") for number in range(count)]

    def run(self, until_s: float) -> None:
        self.clock.at(until_s, self.stop)
        with pytest.raises(StopIteration):
            self.clock.run()

    def stop(self) -> None:
        raise StopIteration


def test_requests_are_placed_and_time_out_by_the_scheduler_that_was_passed():
    queued = Queued()
    first, second, third = queued.tickets(3)
    queued.place(first)
    queued.run(6.0)
    queued.place(second)
    queued.place(third, tokens=400)
    queued.run(9.999)
    assert queued.told == {"r0": [], "r1": [], "r2": []}
    queued.run(10.0)
    (late,) = queued.told["r0"]
    assert (late.status, late.code) == (429, "no_room")
    queued.free(3)
    queued.run(11.0)
    assert queued.told["r1"] == [second.placement]
    assert queued.told["r2"] == []
    assert (queued.admission.waiting, queued.fleet.in_flight) == (1, 1)
    queued.run(16.0)
    assert queued.told["r2"][0].status == 429
    for ticket in (first, second, third):
        ticket.close()
    assert (queued.admission.waiting, queued.fleet.in_flight) == (0, 0)


def test_a_closed_ticket_is_told_nothing_and_holds_nothing():
    queued = Queued()
    placed, waits_on = queued.tickets(2)
    queued.place(placed)
    queued.place(waits_on)
    queued.free(3)
    queued.admission._look()
    assert queued.fleet.in_flight == 1
    placed.close()
    placed.close()  # harmless
    waits_on.close()
    queued.free(100)
    queued.run(20.0)
    assert queued.told == {"r0": [queued.told["r0"][0]], "r1": []}
    assert (queued.admission.waiting, queued.fleet.in_flight) == (0, 0)


def test_time_that_ends_while_a_prompt_is_tokenised_lets_those_behind_go_on():
    queued = Queued()
    queued.free(0, state="draining")
    first, second = queued.tickets(2)
    queued.wait(first)
    queued.run(5.0)
    queued.place(second)
    queued.free(100)
    queued.run(6.0)
    assert queued.told == {"r0": [None], "r1": []}, "the first is being tokenised"
    queued.run(10.1)
    assert queued.told["r1"] == [second.placement]
    queued.place(first)
    refused = queued.told["r0"][1]
    assert (refused.status, refused.code) == (429, "no_room")
    assert queued.fleet.in_flight == 1


def test_a_repeated_attempt_takes_another_worker_at_once_or_none():
    queued = Queued(free_blocks=100)
    (ticket,) = queued.tickets(1)
    queued.place(ticket)
    assert ticket.placement.worker == "w000"
    queued.fleet.on_card(card("w001"))
    assert ticket.move(prompt_of(12), ["w000"]).worker == "w001"
    assert queued.fleet.in_flight == 1, "the former booking has ended"
    assert ticket.move(prompt_of(12), ["w000", "w001"]) is None
    assert (queued.admission.waiting, queued.fleet.in_flight) == (0, 0)
