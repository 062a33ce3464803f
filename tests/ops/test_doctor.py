"""`stemroute doctor`: a real Valkey, a real worker on a tiny model, a real gateway."""

import asyncio
import contextlib
import json

import msgspec
import pytest
from aiohttp import web
from typer.testing import CliRunner

from cluster.bus import BusKeys, Publisher
from cluster.protocol import PROTOCOL_VERSION, BlockList, Load
from cluster.redis_client import connect
from cluster.settings import BusSettings, GatewaySettings, Settings, WorkerSettings
from ops.bus_links import BusLinks
from ops.cli import app
from ops.doctor import examine, healthy
from router.gateway import Gateway
from tests.cluster.redis_servers import order
from tests.router.support import QUICK_STOP, FakeWorker
from tests.router.test_over_the_bus import Heard, Published
from tests.tiny_model import write_tiny_llama
from worker.server import WorkerServer

BUS = BusSettings(lease_s=3.0, heartbeat_s=0.1, min_report_gap_s=0.002)
PATIENCE_S = 1.0
LINKS = [
    "redis",
    "writes",
    "cards",
    "versions",
    "digests",
    "epochs",
    "reports",
    "workers",
    "blocks",
    "gateway",
    "ready",
    "index",
    "probe",
    "encoder",
]


def settings_of(redis_url: str, pool: str, **changes) -> Settings:
    values = {
        "pool": pool,
        "redis_url": redis_url,
        "secret": "s3cret",
        "bus": BUS,
        "gateway": GatewaySettings(port=0, **QUICK_STOP),
    }
    return Settings(**{**values, **changes})


@contextlib.asynccontextmanager
async def gateway_of(settings: Settings, workers: int):
    gateway = Gateway(settings)
    heard = Heard(gateway)
    await gateway.start()
    try:
        await heard.until(lambda: len(gateway.fleet.members()) >= workers)
        yield gateway
    finally:
        await gateway.stop()


@contextlib.asynccontextmanager
async def real_worker(settings: Settings, directory):
    worker = WorkerSettings(
        model=str(write_tiny_llama(directory)),
        served_name="tiny",
        device="cpu",
        dtype="float32",
        kv_blocks=200,
        drain_timeout_s=0.5,
        cache_dir=str(directory / "cache"),
    )
    server = WorkerServer(msgspec.structs.replace(settings, worker=worker), "w0")
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def by_name(links):
    assert [link.name for link in links] == LINKS
    return {link.name: link for link in links}


def broken(links) -> list[str]:
    return [link.name for link in links if link.state == "broken"]


async def look(settings: Settings, url: str):
    return await examine(settings, url, patience_s=PATIENCE_S)


async def test_a_whole_chain_is_ok_and_what_is_cut_is_found(redis_url, pool, tmp_path):
    """One worker's start serves all looks; each cut is repaired before the next."""
    settings = settings_of(redis_url, pool)
    async with real_worker(settings, tmp_path / "model") as server, gateway_of(settings, 1) as gw:
        links = by_name(await look(settings, gw.url))
        assert {link.state for link in links.values()} == {"ok"}, links
        assert "tokens reused by w0 on the second request" in links["probe"].found
        assert "tiny: prompts are encoded by fastokens" in links["encoder"].found
        assert healthy(links.values())

        # the index forgot blocks, and nobody else knows
        (member,) = gw.fleet.members()
        block = next(iter(gw.fleet.index.blocks_of(member.slot)))
        gw.fleet.on_report = lambda report: True
        gw.fleet.index.evict(member.slot, [block])
        links = by_name(await look(settings, gw.url))
        assert links["index"].state == "broken"
        assert "blocks of w0 in its index, but it caches" in links["index"].found
        del gw.fleet.on_report

        # Redis lost a block of the worker's set
        redis, keys = connect(redis_url, timeout_s=2), BusKeys(pool)
        held = keys.blocks("w0", server.service.epoch)
        publishes = server.service.publisher._send

        async def in_vain(*args):
            return b"ok"

        server.service.publisher._send = in_vain
        await redis.spop(held)
        links = by_name(await look(settings, gw.url))
        assert links["blocks"].state == "broken"
        assert links["blocks"].found.startswith("1 blocks that w0 caches")
        # and what pretends to publish is not heard
        assert links["reports"].state == "broken"
        assert "no report of w0 came within 1 s" in links["reports"].found
        server.service.publisher._send = publishes
        server.service.publisher.update(load=server.service.publisher.load)
        async with asyncio.timeout(10):
            await server.service.publisher.flushed()
        await redis.aclose()

        # another secret than the pool's
        other = msgspec.structs.replace(settings, secret="another")
        links = by_name(await look(other, gw.url))
        assert links["digests"].state == "broken"
        assert "STEMROUTE_SECRET" in links["digests"].fix
        assert links["workers"].state == "skipped"


@pytest.fixture
async def fakes(redis_url, pool):
    """Two fake workers with real publishers: cards, reports and addresses without a model."""
    settings = settings_of(redis_url, pool, secret="")
    async with FakeWorker("w0") as first, FakeWorker("w1") as second:
        workers = [Published(each, redis_url, pool, BUS) for each in (first, second)]
        for worker in workers:
            async with asyncio.timeout(10):
                await worker.publisher.flushed()
        yield settings, workers
        for worker in workers:
            await worker.die()


async def test_a_worker_that_never_reuses_anything_breaks_the_probe(fakes):
    settings, workers = fakes
    for each in workers:
        each.worker.info = msgspec.structs.replace(each.worker.info, context_tokens=10_000)
        each.publisher.begin(each.worker.card(epoch=2, context_tokens=10_000))
        each.publisher.update(load=each.load())
        each.worker.answer = each.worker.say("hello", hit=0)
    async with gateway_of(settings, 2) as gateway:
        links = by_name(await look(settings, gateway.url))
        assert links["probe"].state == "broken"
        assert "the gateway does not expect a hit there" in links["probe"].found
        assert "do not reach the gateway" in links["probe"].fix


async def test_a_worker_that_does_not_publish_what_it_caches_is_named(fakes):
    settings, workers = fakes
    async with gateway_of(settings, 2) as gateway:
        heard = Heard(gateway)
        workers[1].held = 50
        workers[1].publisher.update(load=workers[1].load())
        await heard.until(lambda: gateway._follower.status.disagreeing)
        links = by_name(await look(settings, gateway.url))
        assert links["index"].state == "broken"
        assert "w1: it reports 50 cached blocks, but has published 0" in links["index"].found
        assert links["index"].fix.startswith("restart w1 ")
        assert not healthy(links.values())


async def test_without_redis_only_the_gateway_is_looked_at(fakes):
    settings, _ = fakes
    async with gateway_of(settings, 2) as gateway:
        away = msgspec.structs.replace(settings, redis_url="redis://127.0.0.1:1/0")
        links = by_name(await look(away, gateway.url))
        assert links["redis"].state == "broken"
        assert "STEMROUTE_REDIS_URL" in links["redis"].fix
        assert {links[name].state for name in LINKS[1:9]} == {"skipped"}
        assert (links["gateway"].state, links["ready"].state) == ("ok", "ok")
        unnamed = msgspec.structs.replace(settings, redis_url="")
        assert by_name(await look(unnamed, gateway.url))["redis"].found == "no Redis is named"


async def test_a_redis_that_takes_no_writes_or_evicts_is_named(own_valkey, pool):
    settings = settings_of(own_valkey.connection_url, pool)
    await order(own_valkey, "CONFIG", "SET", "maxmemory", "1")
    links = by_name(await look(settings, "http://127.0.0.1:1"))
    assert (links["redis"].state, links["writes"].state) == ("ok", "broken")
    assert "Redis takes no writes: it has reached maxmemory" in links["writes"].found
    await order(own_valkey, "CONFIG", "SET", "maxmemory", "0")
    for number in range(50):
        await order(own_valkey, "SET", f"other:{number}", "x" * 50_000)
    used = (await order(own_valkey, "INFO", "memory"))["used_memory"]
    await order(own_valkey, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    await order(own_valkey, "CONFIG", "SET", "maxmemory", used - 1_000_000)
    links = by_name(await look(settings, "http://127.0.0.1:1"))
    assert "evicts keys (maxmemory-policy allkeys-lru" in links["writes"].found
    await order(own_valkey, "REPLICAOF", "127.0.0.1", "1")
    links = by_name(await look(settings, "http://127.0.0.1:1"))
    assert links["redis"].state == "broken"
    assert "is a replica of 127.0.0.1:1" in links["redis"].found


async def test_a_password_is_never_part_of_a_message(own_valkey, pool):
    await order(own_valkey, "CONFIG", "SET", "requirepass", "right/one")
    run = CliRunner().invoke
    port = own_valkey.port
    for url, words in (
        (f"redis://:zyx/ret@127.0.0.1:{port}/0", "percent-encode them"),
        (f"redis://:zyx%2Fret@127.0.0.1:{port}/0", "Redis refuses user or password"),
        (f"redis://zyx/ret:x@127.0.0.1:{port}", "percent-encode them"),
        ("redis://:zyx", "the port in the Redis URL is not a number"),
    ):
        arguments = ["doctor", "--url", "http://127.0.0.1:1", "--redis-url", url, "--pool", pool]
        result = await asyncio.to_thread(run, app, arguments)
        told = result.output + str(result.exception)
        assert result.exit_code == 1
        assert words in told, told
        assert "zyx" not in told, told
    links = by_name(
        await look(
            settings_of(f"redis://:right%2Fone@127.0.0.1:{port}", pool), "http://127.0.0.1:1"
        )
    )
    assert links["redis"].state == "ok"


async def test_another_pool_is_named(fakes):
    settings, _ = fakes
    other = msgspec.structs.replace(settings, pool="elsewhere")
    links = by_name(await look(other, "http://127.0.0.1:1"))
    assert links["cards"].state == "broken"
    assert settings.pool in links["cards"].found.partition("workers in the pools ")[2].split(", ")
    assert "STEMROUTE_POOL" in links["cards"].fix
    assert links["gateway"].state == "broken"
    assert "stemroute gateway" in links["gateway"].fix


async def test_a_gateway_of_another_pool_does_not_know_the_workers(fakes):
    settings, _ = fakes
    stray = msgspec.structs.replace(settings, pool=settings.pool + "-other")
    async with gateway_of(stray, 0) as gateway:
        links = by_name(await look(settings, gateway.url))
        assert links["ready"].state == "broken"
        assert "no worker has announced itself" in links["ready"].found
        assert links["index"].state == "broken"
        assert "does not know w0" in links["index"].found


async def test_workers_of_another_version_or_block_size_are_named(fakes, redis_url):
    settings, workers = fakes
    namespace = msgspec.structs.replace(workers[0].worker.info.namespace, block_size=8)
    strangers = {
        "wide": workers[0].worker.card(
            namespace=namespace, namespace_check=namespace.check(settings.secret.encode())
        ),
        "young": workers[0].worker.card(version=PROTOCOL_VERSION + 1),
    }
    for name, card in strangers.items():
        publisher = Publisher(redis_url, settings.pool, BUS)
        publisher.begin(msgspec.structs.replace(card, worker=name))
        publisher.update(load=Load())
        task = asyncio.create_task(publisher.run())
        async with asyncio.timeout(10):
            await publisher.flushed()
        links = by_name(await look(settings, "http://127.0.0.1:1"))
        if name == "wide":
            assert broken(links.values())[0] == "digests"
            assert "block_size" in links["digests"].found
        else:
            assert broken(links.values())[0] == "versions"
            assert f"young speaks version {PROTOCOL_VERSION + 1}" in links["versions"].found
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await publisher.leave()
        await publisher.close()


async def test_a_worker_that_cannot_be_reached_is_named(fakes):
    settings, workers = fakes
    workers[1].publisher.begin(workers[1].worker.card(epoch=2, address="http://127.0.0.1:1"))
    workers[1].publisher.update(load=Load())
    async with asyncio.timeout(10):
        await workers[1].publisher.flushed()
    links = by_name(await look(settings, "http://127.0.0.1:1"))
    assert links["workers"].state == "broken"
    assert links["blocks"].state == "skipped"


async def test_a_worker_that_dies_between_two_looks_is_named(fakes, monkeypatch):
    settings, workers = fakes
    workers[1].publisher.begin(workers[1].worker.card(epoch=2, address="http://127.0.0.1:1"))
    async with asyncio.timeout(10):
        await workers[1].publisher.flushed()

    async def listing(self, card):
        return BlockList(worker=card.worker, epoch=2, blocks=b"")

    async def healthy(request):
        return web.json_response({})

    monkeypatch.setattr(BusLinks, "listing", listing)
    workers[0].worker.others["GET /health"] = healthy
    links = by_name(await look(settings, "http://127.0.0.1:1"))
    assert links["workers"].state == "broken"
    assert "w1 cannot be reached" in links["workers"].found


async def test_a_worker_that_lists_nonsense_is_named(fakes):
    settings, workers = fakes

    async def nonsense(request):
        return web.Response(body=b"\xc1")

    workers[0].worker.others["GET /blocks"] = nonsense
    links = by_name(await look(settings, "http://127.0.0.1:1"))
    assert links["workers"].state == "broken"
    assert "the list of w0's blocks cannot be read" in links["workers"].found


async def test_keys_that_are_missing_are_named(fakes):
    settings, _ = fakes
    locked = msgspec.structs.replace(
        settings, gateway=GatewaySettings(port=0, **QUICK_STOP, admin_key="admin", api_key="api")
    )
    async with gateway_of(locked, 2) as gateway:
        links = by_name(await look(settings, gateway.url))
        assert links["index"].state == "broken"
        assert "STEMROUTE_GATEWAY_ADMIN_KEY" in links["index"].fix


async def test_the_command_prints_links_and_fixes_and_ends_with_1(fakes):
    settings, _ = fakes
    arguments = ["doctor", "--url", "http://127.0.0.1:1", "--redis-url", settings.redis_url]
    run = CliRunner().invoke
    result = await asyncio.to_thread(run, app, [*arguments, "--pool", "nobody"])
    assert result.exit_code == 1
    assert "no worker is registered in the pool 'nobody'" in result.output
    assert "fix: " in result.output
    result = await asyncio.to_thread(run, app, [*arguments, "--pool", settings.pool, "--json"])
    assert result.exit_code == 1
    links = json.loads(result.output)
    assert [link["name"] for link in links] == LINKS
    assert links[2]["state"] == "ok"
