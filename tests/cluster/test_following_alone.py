"""One worker, one follower: what a single entry brings about."""

import msgspec
import pytest

from cluster.card_check import card_problem
from cluster.protocol import PROTOCOL_VERSION, ColdReport, Report, WorkerCard
from tests.cluster.model_worker import BLOCKS, SECRET, Alone, ModelWorker


def test_reports_that_a_snapshot_has_overtaken_still_name_their_requests_and_their_load() -> None:
    alone = Alone()
    first = alone.publish(BLOCKS[0], received=("r1",), running=1)
    second = alone.publish(BLOCKS[1], received=("r2",), running=2)
    third = alone.publish(BLOCKS[2], received=("r3",), running=3)
    assert alone.take(first) is not None  # reads the set of the third
    assert alone.sink.sets["a"] == set(BLOCKS[:3])
    assert alone.take(third) is None
    assert alone.sink.loads["a"].running == 3
    assert alone.take(second) is None  # late: its load is old, what it names is news
    assert alone.sink.loads["a"].running == 3
    assert alone.sink.named == {"r1", "r2", "r3"}


def test_a_lost_report_is_a_gap_and_one_repair() -> None:
    alone = Alone()
    alone.take(alone.publish(BLOCKS[0]))
    alone.publish(BLOCKS[1])  # lost
    alone.take(alone.publish(BLOCKS[2]))
    assert alone.sink.sets["a"] == set(BLOCKS[:3])
    assert (alone.following.gaps, alone.following.repairs) == (1, 1)
    alone.take(alone.publish(BLOCKS[3]))
    assert (alone.following.gaps, alone.following.repairs) == (1, 1)


def test_a_report_of_another_version_that_cannot_even_be_decoded_is_refused_by_name() -> None:
    alone = Alone()
    strange = {"worker": "a", "version": 7, "epoch": 3, "load": "another shape"}
    assert alone.take(msgspec.msgpack.encode(strange)) is None
    assert "version 7" in alone.following.refused["a"]
    assert alone.take(msgspec.msgpack.encode({**strange, "version": 1})) is None
    assert "cannot be read" in alone.following.refused["a"]
    assert alone.take(b"\xc1") is None
    assert alone.following.unreadable == 3


@pytest.mark.parametrize(
    "changes",
    [{"stored": b"x" * 17}, {"evicted": b"x"}, {"cold": ColdReport(disk_evicted=b"x" * 15)}],
    ids=lambda changes: str(*changes),
)
def test_a_report_with_a_part_of_a_hash_is_refused_by_name(changes: dict[str, object]) -> None:
    alone = Alone()
    alone.take(alone.publish(BLOCKS[0]))
    report = msgspec.msgpack.decode(alone.publish(), type=Report)
    broken = msgspec.structs.replace(report, **changes)
    assert alone.take(msgspec.msgpack.encode(broken)) is None
    assert "hashes that are not of 16 bytes" in alone.following.refused["a"]
    assert not alone.following.knows("a")


def test_a_worker_that_is_not_reached_over_plain_http_is_refused() -> None:
    card = msgspec.json.decode(Alone().worker.card(), type=WorkerCard)
    assert card_problem(card, SECRET) == ""
    encrypted = msgspec.structs.replace(card, address="https://10.0.0.7:1")
    assert "announce it as http://HOST:PORT" in card_problem(encrypted, SECRET)


def test_a_refused_worker_is_not_read_again_until_its_next_life() -> None:
    alone = Alone(secret=b"another")
    assert alone.take(alone.publish(BLOCKS[0])) is not None
    assert "STEMROUTE_SECRET" in alone.following.refused["a"]
    assert alone.take(alone.publish(BLOCKS[1])) is None
    alone.worker = ModelWorker("a", 2, PROTOCOL_VERSION, SECRET)
    assert alone.take(alone.publish(BLOCKS[2])) is not None
    assert alone.following.refused == {}
    assert alone.sink.sets["a"] == {BLOCKS[2]}


def test_a_worker_is_gone_when_it_is_silent_and_its_lease_has_ended() -> None:
    alone = Alone()
    alone.take(alone.publish(BLOCKS[0]))
    assert alone.following.silent(2.9) == []
    assert alone.following.silent(3.0) == ["a"]
    alone.following.answer_silence("a", has_lease=True, now=3.0)
    assert alone.following.silent(3.4) == []
    assert alone.following.silent(3.6) == ["a"]
    alone.following.answer_silence("a", has_lease=False, now=3.6)
    assert alone.sink.sets == {}
