import asyncio
import random

from loadgen import observer
from loadgen.admin import Admin, Explanation, FleetView, WorkerView
from loadgen.observer import LoadSample, Observations, ask_decisions, observe, samples_of
from loadgen.slowest import WORST, Slowest
from loadgen.worst import worst_requests
from tests.loadgen.fake_gateway import FakeGateway, serving
from tests.loadgen.test_measures import outcome


def slowest_of(*names):
    slowest = Slowest()
    for name in names:
        slowest.add(outcome(name, request_id=f"id-{name}"))
    return slowest


def test_a_sample_is_each_workers_load_in_tokens_and_requests():
    worker = WorkerView(
        worker="w", pending_prefill_tokens=7, running=2, waiting=1, cached_blocks=3, block_size=16
    )
    fleet = FleetView(requests_total=0, in_flight=0, workers=[worker])
    assert samples_of(fleet, 1.23456) == [
        LoadSample(
            at_s=1.235, worker="w", pending_prefill_tokens=7, running=2, waiting=1, cached_tokens=48
        )
    ]


class Watched(FakeGateway):
    """Knows when it has been asked for the fleet twice and for one decision."""

    def __init__(self):
        super().__init__()
        self.decisions = {"id-r0": "w0", "id-r1": "w1"}
        self.asked_all = asyncio.Event()
        self._looks = 0

    def _check(self):
        if self._looks >= 2 and self.asked:
            self.asked_all.set()

    async def _fleet(self, request):
        self._looks += 1
        self._check()
        return await super()._fleet(request)

    async def _decision(self, request):
        answer = await super()._decision(request)
        self._check()
        return answer


async def test_the_gateway_is_looked_at_until_told_to_stop(monkeypatch):
    monkeypatch.setattr(observer, "ASK_EVERY_S", 0.01)
    gateway = Watched()
    seen = Observations()
    async with serving(gateway) as url, Admin(url) as admin:
        begin = asyncio.get_running_loop().time()
        task = asyncio.create_task(observe(admin, slowest_of("r0", "r1"), begin, 0.01, seen))
        await gateway.asked_all.wait()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert {sample.worker for sample in seen.samples} == {"w0", "w1"}
    assert seen.unknown == {}


async def test_each_decision_is_asked_for_once_and_one_that_is_missing_hinders_no_other():
    gateway = FakeGateway()
    gateway.decisions = {"id-r0": "w0", "id-r2": "w1"}
    seen = Observations()
    slowest = slowest_of("r0", "r1", "r2")
    slowest.add(outcome("unanswered", first_token_s=None, status="unfinished"))
    async with serving(gateway) as url, Admin(url) as admin:
        await ask_decisions(admin, slowest, seen)
        await ask_decisions(admin, slowest, seen)
    assert set(seen.explanations) == {"r0", "r2"}
    assert [w.worker for w in seen.explanations["r2"].workers if w.chosen] == ["w1"]
    assert seen.unknown.keys() == {"r1"}
    assert "none is kept" in seen.unknown["r1"]
    assert sorted(gateway.asked) == ["id-r0", "id-r1", "id-r1", "id-r2"]


async def test_a_look_up_that_fails_is_forgotten_where_a_later_one_succeeds():
    gateway = FakeGateway()
    seen = Observations()
    slowest = slowest_of("r0", "r1")
    async with serving(gateway) as url, Admin(url) as admin:
        await ask_decisions(admin, slowest, seen)
        assert seen.unknown.keys() == {"r0", "r1"}
        gateway.decisions = {"id-r0": "w0"}
        await ask_decisions(admin, slowest, seen)
    assert (seen.explanations.keys(), seen.unknown.keys()) == ({"r0"}, {"r1"})


async def test_a_gateway_that_is_gone_ends_the_looking():
    seen = Observations()
    async with Admin("http://127.0.0.1:1") as admin:
        begin = asyncio.get_running_loop().time()
        async with asyncio.timeout(30):
            await observe(admin, None, begin, 0.01, seen)
    assert seen.samples == []


def test_the_slowest_of_every_replay_hold_the_slowest_of_all():
    rng = random.Random(5)
    replays = [
        [
            outcome(
                f"r{i}", repeat=repeat, first_token_s=rng.choice([None, 1.5, 1.6, rng.random()])
            )
            for i in range(40)
        ]
        for repeat in range(3)
    ]
    known = set()
    for replay in replays:
        slowest = Slowest()
        for one in replay:
            slowest.add(one)
        known |= {(one.id, one.repeat) for one in slowest}
        assert len(list(slowest)) == WORST
    everything = [one for replay in replays for one in replay]
    found = worst_requests(everything, {"x": [Observations()] * 3})["x"]
    assert {(worst.outcome.id, worst.outcome.repeat) for worst in found} <= known


def sample(at_s, worker):
    return LoadSample(
        at_s=at_s, worker=worker, pending_prefill_tokens=0, running=0, waiting=0, cached_tokens=0
    )


def test_the_slowest_come_first_with_what_was_known_when_they_were_due():
    outcomes = [outcome(f"r{i}", first_token_s=1.0 + i / 10) for i in range(9)]
    outcomes.append(outcome("failed", status="failed", first_token_s=None))
    outcomes.append(outcome("r8", first_token_s=1.75, repeat=1))
    why = Explanation(because="it holds more")
    seen = Observations(
        samples=[sample(0.5, "w0"), sample(0.9, "w0"), sample(0.9, "w1"), sample(1.1, "w0")],
        explanations={"r8": why},
        unknown={"r7": "none is kept"},
        otherwise="it was not asked for",
    )
    found = worst_requests(outcomes, {"x": [seen, Observations()]})["x"]
    assert [worst.outcome.id for worst in found] == ["failed", "r8", "r7", "r6", "r5"]
    assert len(found) == WORST
    assert found[1].explanation is why
    assert [worst.explanation for worst in found[2:]] == [None] * 3
    assert [worst.unknown for worst in found[2:4]] == ["none is kept", "it was not asked for"]
    # They were due at 1.0 s.
    assert found[2].load == [sample(0.9, "w0"), sample(0.9, "w1")]
