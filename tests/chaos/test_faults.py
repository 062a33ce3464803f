"""Short forms of the faults whose goals hold, on one rig of worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.chaos.driving import FAULTS
from tests.chaos.faults.redis import NEEDS
from tests.chaos.rig import Rig
from tests.chaos.run import main

pytestmark = pytest.mark.timeout(180)

SECONDS = 3.0
DISTINCT = 6
HELD = ("redis-emptied", "redis-restarted", "redis-paused", "redis-password")


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(replace(NEEDS, workers=2), distinct=DISTINCT) as started:
        yield started


@pytest.mark.parametrize("name", HELD)
async def test_nothing_that_was_accepted_fails(rig: Rig, name: str) -> None:
    fault = FAULTS[name]
    result = await fault.run(rig, SECONDS)
    result.compare(fault.goal)
    assert not result.misses, (result.misses, result.notes, result.tally.reasons)
    assert result.tally.accepted


def test_an_unknown_fault_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["no-such-fault"])
    assert ended.value.code == 2
    assert "no fault no-such-fault" in capsys.readouterr().err
