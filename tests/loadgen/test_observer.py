import asyncio
from collections import Counter

import pytest

from loadgen.admin import Admin, Explanation, FleetView, WorkerView
from loadgen.observer import (
    EXPLAIN_BURST,
    LoadSample,
    Observations,
    observe,
    samples_of,
    to_explain,
)
from loadgen.worst import WORST, worst_requests
from tests.loadgen.fake_gateway import FakeGateway, serving
from tests.loadgen.test_measures import outcome
from tests.loadgen.test_requests import line


def requests(*times):
    return [line(id=f"r{i}", intended_at_s=time) for i, time in enumerate(times)]


def test_steady_requests_are_explained_at_the_rate():
    given = requests(*(i / 100 for i in range(2000)))
    assert len(to_explain(given, rate=5.0)) == pytest.approx(5 * 20 + EXPLAIN_BURST, abs=1)


def test_a_burst_is_explained_whole_as_long_as_there_is_allowance():
    assert len(to_explain(requests(*[3.0] * 15), rate=1.0)) == 15
    assert len(to_explain(requests(*[3.0] * 50), rate=1.0)) == EXPLAIN_BURST
    assert to_explain(requests(1.0, 2.0), rate=0.0) == []


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
    """Knows when it has been asked three times for each thing: then two answers were read."""

    def __init__(self):
        super().__init__()
        self.asked_thrice = asyncio.Event()
        self._asked = Counter()

    def _count(self, what):
        self._asked[what] += 1
        if min(self._asked["fleet"], self._asked["explain"]) >= 3:
            self.asked_thrice.set()

    async def _fleet(self, request):
        self._count("fleet")
        return await super()._fleet(request)

    async def _explain(self, request):
        self._count("explain")
        return await super()._explain(request)


async def test_the_gateway_is_looked_at_until_told_to_stop():
    gateway = Watched()
    seen = Observations()
    async with serving(gateway) as url, Admin(url) as admin:
        begin = asyncio.get_running_loop().time()
        given = requests(0.0, 0.0, 0.0)
        task = asyncio.create_task(observe(admin, given, begin, 0.01, 100.0, seen))
        await gateway.asked_thrice.wait()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert {"r0", "r1"} <= set(seen.explanations)
    assert {sample.worker for sample in seen.samples} == {"w0", "w1"}
    assert len(seen.samples) >= 4
    assert seen.problem == ""


async def test_a_gateway_that_is_gone_ends_the_looking_with_its_reason():
    seen = Observations()
    async with Admin("http://127.0.0.1:1") as admin:
        begin = asyncio.get_running_loop().time()
        await observe(admin, requests(0.0), begin, 0.01, 1.0, seen)
    assert "is the gateway running there?" in seen.problem


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
    )
    found = worst_requests(outcomes, {"x": [seen, Observations()]})["x"]
    assert [worst.outcome.id for worst in found] == ["failed", "r8", "r7", "r6", "r5"]
    assert len(found) == WORST
    assert found[1].explanation is why
    assert found[2].explanation is None
    # They were due at 1.0 s.
    assert found[2].load == [sample(0.9, "w0"), sample(0.9, "w1")]
