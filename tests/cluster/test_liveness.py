"""Which workers without a lease are asked, and which are gone at once."""

from __future__ import annotations

import asyncio

from cluster.following import Following, Held, Need
from cluster.liveness import Health, Liveness
from cluster.protocol import PROTOCOL_VERSION, WorkerCard
from tests.cluster.model_worker import HEARTBEAT_S, LEASE_S, SECRET, ModelWorker, Sink


class Patient:
    """A probe whose workers answer when the test lets them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = asyncio.Event()

    async def __call__(self, card: WorkerCard) -> Health:
        self.asked.append(card.worker)
        await self.answer.wait()
        return Health(answers=True, ready=True, reason="")


async def test_a_worker_that_is_being_asked_is_no_reason_to_drop_the_next() -> None:
    following = Following(Sink(), secret=SECRET, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
    for name in "ab":
        card = ModelWorker(name, 1, PROTOCOL_VERSION, SECRET).card()
        following.settle(Need(name, None, repair=False), Held(1, 1, card, []), 0.0)
    probe = Patient()
    liveness = Liveness(following, probe, clock=lambda: 10.0)
    assert liveness.decide(["a"], bus_fails=True) == []
    assert liveness.decide(["b"], bus_fails=False) == []
    probe.answer.set()
    async with asyncio.timeout(10):
        while sorted(following.kept) != ["a", "b"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert sorted(probe.asked) == ["a", "b"]
    await liveness.close()
