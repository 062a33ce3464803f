"""Workers without a sign of life: asked, suspected, left by their requests, trusted again."""

import asyncio

import pytest
from aiohttp import web

from cluster.liveness import Health
from cluster.protocol import HEADER_WORKER
from router.fleet import Fleet
from router.stalls import StallWatch
from router.worker_connections import WorkerStalled
from tests.router.asking import Clock, names
from tests.router.support import Rig, card, count, report

TIMEOUT_S = 3.0


class Connections:
    """Keeps what is failed. Only bytes and failures are of interest here."""

    def __init__(self) -> None:
        self.heard: dict[str, float] = {}
        self.failed: list[tuple[str, str]] = []

    def heard_at(self, address: str) -> float:
        return self.heard.get(address, 0.0)

    def fail(self, address: str, error: WorkerStalled) -> None:
        self.failed.append((address, str(error)))

    def fail_quiet(self, longest_s: float) -> None:
        pass


class Watched:
    """Two workers, and a probe that answers as the test says."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.fleet = Fleet(clock=self.clock)
        self.connections = Connections()
        self.asked: list[str] = []
        self.health = Health(answers=True, ready=True, reason="")
        self.watch = StallWatch(
            self.fleet, self.connections, self.probe, TIMEOUT_S, 60.0, self.clock
        )
        for worker in ("a", "b"):
            self.fleet.on_card(card(worker))

    async def probe(self, of) -> Health:
        self.asked.append(of.worker)
        return self.health

    async def go_on(self, seconds: float, *reporting: str) -> None:
        """Time goes on in looks, between which workers report and probes are answered."""
        for _ in range(round(seconds / 0.25)):
            self.clock.now += 0.25
            for worker in reporting:
                self.fleet.on_report(report(worker))
            self.watch.look()
            while self.watch._asking:  # noqa: ASYNC110
                await asyncio.sleep(0)


@pytest.fixture
def watched():
    made = Watched()
    yield made
    made.fleet.check()


SILENT = Health(answers=False, ready=False, reason="it did not answer")


async def test_workers_that_report_or_send_bytes_are_not_asked(watched):
    for _ in range(10):
        watched.connections.heard["http://b.invalid:1"] = watched.clock.now
        await watched.go_on(1.0, "a")
    assert watched.asked == []


async def test_a_silent_worker_is_asked_once_in_a_while_and_serves_while_it_answers(watched):
    await watched.go_on(1.75, "a")  # the next look is at 2 s, after 60 % of the timeout
    assert watched.asked == []
    await watched.go_on(0.25, "a")
    assert watched.asked == ["b"]
    await watched.go_on(4.0, "a")
    assert watched.asked == ["b"] * 3
    assert names(watched.fleet) == {"a", "b"}
    assert watched.connections.failed == []


async def test_one_that_does_not_answer_gets_no_requests_until_it_reports(watched):
    watched.health = SILENT
    await watched.go_on(2.0, "a")
    assert names(watched.fleet) == {"a"}
    assert watched.connections.failed == [("http://b.invalid:1", "no sign of life for 2.0 s")]
    await watched.go_on(30.0, "a")
    assert names(watched.fleet) == {"a"}, "time alone does not bring it back"
    watched.fleet.on_report(report("b"))
    assert names(watched.fleet) == {"a", "b"}
    await watched.go_on(1.0, "a")
    assert names(watched.fleet) == {"a", "b"}


async def test_without_reports_an_answer_brings_it_back(watched):
    watched.health = SILENT
    await watched.go_on(2.0, "a")
    watched.health = Health(answers=True, ready=True, reason="")
    await watched.go_on(0.25, "a")
    assert names(watched.fleet) == {"a", "b"}


async def test_one_that_says_it_is_not_ready_keeps_the_requests_that_it_has(watched):
    watched.health = Health(answers=True, ready=False, reason="the engine process 7 is stopped")
    await watched.go_on(2.0, "a")
    assert names(watched.fleet) == {"a"}
    assert watched.connections.failed == []
    (suspect,) = [m for m in watched.fleet.members() if m.suspect_until]
    assert suspect.suspect_why == "the engine process 7 is stopped"


async def test_bytes_that_come_while_it_is_asked_count(watched):
    async def probe(of) -> Health:
        watched.connections.heard[of.address] = watched.clock.now
        return SILENT

    watched.watch._probe = probe
    await watched.go_on(2.0, "a")
    assert names(watched.fleet) == {"a", "b"}
    assert watched.connections.failed == []


async def test_nobody_is_suspected_for_the_time_in_which_the_gateway_did_not_run(watched):
    watched.health = SILENT
    await watched.go_on(1.0, "a", "b")
    watched.clock.now += 60.0
    await watched.go_on(1.5)
    assert watched.asked == []
    assert names(watched.fleet) == {"a", "b"}


async def test_workers_that_have_left_are_forgotten(watched):
    await watched.go_on(4.0)
    for worker in ("a", "b"):
        watched.fleet.on_gone(worker, "it has left")
    await watched.go_on(0.25)
    assert watched.watch._answered == {}


def stands_still(worker) -> None:
    """The worker's process is stopped: connections are accepted, and nothing more is sent."""

    async def nothing(*_) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    worker.answer = nothing
    worker.others["GET /health"] = nothing


async def suspect_of(rig: Rig) -> str:
    while True:
        for member in rig.fleet.members():
            if member.suspect_until:
                return member.card.worker
        await asyncio.sleep(0.01)


async def test_requests_leave_a_worker_that_stands_still_and_it_is_named():
    async with Rig(workers=2, stall_timeout_s=0.5, policy="round_robin") as rig:
        stands_still(rig.workers[0])
        asked = [rig.complete(f"{number}") for number in range(4)]
        for status, headers, _ in await asyncio.gather(*asked):
            assert (status, headers[HEADER_WORKER]) == (200, "w1")
        assert count(rig, "failed_attempts", reason="stalled") == 2
        assert await suspect_of(rig) == "w0"
        _, _, ready = await rig.get("/ready")
        (degraded,) = ready["degraded"]
        assert "1 of 2 workers serve; w0 is not reachable (no sign of life for" in degraded
        _, _, told = await rig.post("/admin/explain", {"model": "tiny", "prompt": "x"})
        reasons = {row["worker"]: row["left_out"] for row in told["workers"]}
        assert "no sign of life" in reasons["w0"]
        assert (await rig.complete("next"))[1][HEADER_WORKER] == "w1"
        rig.fleet.on_report(report("w0"))
        _, _, ready = await rig.get("/ready")
        assert ready["degraded"] == []


async def test_a_long_prefill_of_a_worker_that_answers_is_no_stall():
    async with Rig(workers=2, stall_timeout_s=0.5, policy="round_robin") as rig:
        computing, done = asyncio.Event(), asyncio.Event()
        answer, asked = rig.workers[0].say("late"), []

        async def late(request, generate) -> web.StreamResponse:
            computing.set()
            await done.wait()
            return await answer(request, generate)

        async def health(_: web.Request) -> web.Response:
            asked.append(1)
            if len(asked) == 3:
                done.set()
            return web.json_response({"worker": "w0", "ready": True})

        rig.workers[0].answer = late
        rig.workers[0].others["GET /health"] = health
        both = await asyncio.gather(rig.complete("1"), rig.complete("2"))
        assert {headers[HEADER_WORKER] for _, headers, _ in both} == {"w0", "w1"}
        assert computing.is_set()
        assert count(rig, "failed_attempts", reason="stalled") == 0
