"""A worker whose reports never agree with its set is said to disagree, and is not read for ever."""

from __future__ import annotations

from itertools import pairwise

from cluster.agreement import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    UNHELPED_READS,
    Agreement,
)
from cluster.following import Held
from tests.cluster.model_worker import BLOCKS, HEARTBEAT_S, Alone


class Liar(Alone):
    """Says that it caches `more` blocks than it publishes; a report each heartbeat."""

    def __init__(self, more: int) -> None:
        super().__init__()
        self.worker.unpublished = more

    def beat(self, count: int = 1) -> int:
        """So many reports; returns how many whole sets were read for them."""
        reads = 0
        for _ in range(count):
            self.now += HEARTBEAT_S
            reads += self.take(self.publish()) is not None
        return reads


def test_a_worker_that_publishes_none_of_what_it_caches_disagrees_after_three_reads() -> None:
    liar = Liar(50)
    assert (liar.beat(), liar.following.disagreeing) == (1, {})
    assert (liar.beat(), liar.following.disagreeing) == (1, {})
    assert (liar.beat(), liar.following.disagreeing) == (1, {})
    liar.beat()
    assert liar.following.disagreeing == {"a": UNHELPED_READS}
    assert liar.following.disagreements == 4
    assert liar.following.gaps == 0


def test_reading_that_does_not_help_becomes_rare_but_never_ends() -> None:
    liar = Liar(50)
    beats = int(60 / HEARTBEAT_S)
    first_minute = liar.beat(beats)
    assert first_minute <= 3 + 6  # at once, then after 1, 2, 4, 8, 16 and 30 s
    liar.beat(beats)
    assert 1 <= liar.beat(beats) <= 60 / LONGEST_PAUSE_S
    assert liar.following.disagreements == 3 * beats


def test_it_agrees_again_at_its_first_report_that_does() -> None:
    liar = Liar(2)
    liar.beat(100)
    assert liar.following.disagreeing
    liar.worker.unpublished = 0
    assert (liar.beat(), liar.following.disagreeing) == (0, {})
    told = liar.following.disagreements
    liar.sink.sets["a"].add(BLOCKS[9])  # and what is mended now is mended at once
    assert (liar.beat(), liar.sink.sets["a"]) == (1, set())
    assert liar.following.disagreements == told + 1
    assert liar.following.disagreeing == {}


def test_a_worker_that_sends_its_whole_set_each_time_is_judged_too() -> None:
    liar = Liar(5)
    for _ in range(4):
        liar.redis.clear()  # Redis forgets; the worker publishes all of it again
        liar.beat()
    assert liar.following.disagreeing == {"a": 4}


def test_what_a_snapshot_has_overtaken_is_not_judged_by_it() -> None:
    alone = Alone()
    alone.take(alone.publish(BLOCKS[0]))
    entries = [alone.publish(block) for block in BLOCKS[1:9]]
    for entry in entries[1:]:  # the first is lost: the second reads the set of the last
        alone.take(entry)
    assert (alone.following.disagreements, alone.following.repairs) == (0, 1)


def test_a_worker_that_is_gone_disagrees_no_more() -> None:
    liar = Liar(1)
    liar.beat(10)
    liar.following.silent(liar.now + 60)
    liar.following.answer_silence("a", has_lease=False, now=liar.now + 60)
    assert liar.following.disagreeing == {}


def test_pauses_double_up_to_the_longest() -> None:
    agreement, now, asked = Agreement(), 0.0, []
    while len(asked) < 12:
        agreement.judge(False, now)
        if agreement.wants_read(now):
            agreement.asked(now)
            asked.append(now)
        now += 0.25
    pauses = [later - sooner for sooner, later in pairwise(asked)]
    assert pauses[:7] == [0.25, 0.25, FIRST_PAUSE_S, 2.0, 4.0, 8.0, 16.0]
    assert pauses[7:] == [LONGEST_PAUSE_S] * 4


def asked_in_a_minute(liar: Liar, held: Held | None) -> int:
    """How often the set of a worker that never agrees is asked for, where this is all there is."""
    asked = 0
    for _ in range(int(60 / HEARTBEAT_S)):
        liar.now += HEARTBEAT_S
        need = liar.following.take(liar.publish(), liar.now)
        if need is not None:
            asked += 1
            liar.following.settle(need, held, liar.now)
    return asked


def test_where_redis_has_nothing_of_a_worker_it_is_not_blamed_nor_redis_asked_for_ever() -> None:
    liar = Liar(0)
    liar.take(liar.publish(BLOCKS[0]))
    liar.worker.unpublished = 5
    assert 4 <= asked_in_a_minute(liar, None) <= 3 + 6
    assert liar.following.disagreeing == {}
    assert liar.following.knows("a")


def test_nor_where_redis_is_behind() -> None:
    liar = Liar(0)
    liar.take(liar.publish(BLOCKS[0]))
    place = liar.redis["a"]
    old = Held(place.epoch, place.sequence, place.card, list(place.blocks))
    liar.worker.unpublished = 5
    assert 4 <= asked_in_a_minute(liar, old) <= 3 + 6
    assert liar.following.disagreeing == {}
    liar.beat(int(LONGEST_PAUSE_S / HEARTBEAT_S) * 4)  # it catches up: now reading does not help
    assert liar.following.disagreeing
