"""Cold tiers under a real model in fp32: the same tokens, token for token, whatever they do.

`small_engine` compares every answer with a plain reference.
"""

import errno
import os
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import msgspec
import pytest
import torch

from cluster.blocks import Namespace, hash_blocks, pack_tokens
from cluster.settings import WorkerSettings
from tests.worker.small_engine import BLOCK, MODEL, ROOT, SmallEngine, tokens_of
from tests.worker.tiered_rig import ByHand
from worker.kv_memory import kv_block_bytes
from worker.prefill_speed import Speed
from worker.runner import TorchRunner
from worker.tiers.block_file import name_of
from worker.tiers.cold_tiers import ColdTiers
from worker.tiers.disk_folder import DiskFolder
from worker.tiers.kv_copies import TorchCopies
from worker.tiers.opening import open_tiers

STEM = tokens_of(1, 6 * BLOCK)
NAMESPACE = Namespace(
    weights="w", tokenizer="t", kv_dtype="float32", block_size=BLOCK, positions="rope"
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)


class AtOnce(Executor):
    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        try:
            future.set_result(fn(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class Tiered(SmallEngine):
    """A SmallEngine of 10 blocks with cold tiers; I/O happens at once unless `loader` says else.

    `cold_s_per_token` and `compute_s_per_token` are what is "measured".
    """

    def __init__(
        self, *, host=64, directory=None, disk=64, loader=None, blocks=10, namespace=NAMESPACE
    ) -> None:
        self.host, self.disk_blocks, self.loader = host, disk, loader or AtOnce()
        self.folder = None
        if directory is not None:
            shape = [4, BLOCK, 2, 8]
            body = kv_block_bytes(MODEL.config, BLOCK, torch.float32)
            self.folder = DiskFolder(directory, namespace, shape, body, 1 << 30)
        super().__init__(blocks=blocks)

    def make_tiers(self):
        tiers = ColdTiers(
            TorchCopies(self.runner.pools, self.host),
            block_size=BLOCK,
            block_bytes=4 * BLOCK,
            host_blocks=self.host,
            loader=self.loader,
            writer=AtOnce(),
            clock=lambda: 0.0,
            folder=self.folder,
            disk_blocks=self.disk_blocks,
        )
        tiers.set_prefill_speed(1.0, 0.0)
        return tiers

    @property
    def stats(self):
        return self.core.tier_stats()

    def crowd_out(self, count: int = 3) -> None:
        """Serve other prompts until nothing of STEM is on the device."""
        for number in range(count):
            self.run(f"crowd {number} {len(self.tokens)}", tokens_of(50 + number, 8 * BLOCK))
        assert hashes()[0] not in self.core.cached_blocks()

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()


def hashes(tokens=STEM):
    return hash_blocks(ROOT, pack_tokens(tokens), BLOCK)


def test_evicted_blocks_come_back_from_host_memory():
    engine = Tiered()
    assert engine.run("cold", [*STEM, 1]) == 0
    engine.crowd_out()
    assert engine.run("again", [*STEM, 1]) == len(STEM)
    assert engine.tokens["again"] == engine.tokens["cold"]
    assert engine.stats.cpu_loaded_blocks == len(STEM) // BLOCK


def test_what_fell_out_of_host_memory_comes_back_from_disk(tmp_path):
    engine = Tiered(host=12, directory=tmp_path)
    engine.run("cold", [*STEM, 1])
    engine.crowd_out(6)
    assert set(hashes()).isdisjoint(engine.core.tiers.host.hashes())
    assert engine.run("again", [*STEM, 1]) == len(STEM)
    assert engine.tokens["again"] == engine.tokens["cold"]
    assert engine.stats.disk_loaded_blocks == len(STEM) // BLOCK
    engine.close()


@pytest.mark.parametrize("host", [64, 12])
def test_nan_that_comes_back_from_a_cold_tier_leaves_all_tiers(tmp_path, host):
    """From host memory, and from disk where host memory is small."""
    engine = Tiered(host=host, directory=tmp_path)
    engine.run("cold", [*STEM, 1])
    block = engine.core._cache._blocks[hashes()[2]]
    for pair in engine.runner.pools:
        for pool in pair:
            pool[block] = float("nan")
    engine.crowd_out(3 if host == 64 else 6)
    assert engine.run("again", [*STEM, 1]) == len(STEM)
    tiers = engine.core.tiers
    assert set(hashes()).isdisjoint([*tiers.host.hashes(), *tiers.disk.hashes()])
    assert engine.run("afresh", [*STEM, 1]) == 0
    engine.crowd_out(3 if host == 64 else 6)
    assert engine.run("reused", [*STEM, 1]) == len(STEM)
    assert not set(hashes()).isdisjoint(engine.core.cached_blocks())
    engine.close()


def test_one_load_from_device_host_memory_and_disk(tmp_path):
    engine = Tiered(host=12, directory=tmp_path)
    engine.run("cold", [*STEM, 1])
    engine.crowd_out(6)
    engine.run("front", [*STEM[: 2 * BLOCK], 1])
    tail = tokens_of(9, 2 * BLOCK)
    assert engine.run("longer", [*STEM, *tail]) == len(STEM)
    engine.close()


@pytest.mark.parametrize("tail", [0, 3])
def test_many_prompts_in_a_tiny_pool_get_the_same_tokens(tmp_path, tail):
    engine = Tiered(host=12, directory=tmp_path, disk=14, blocks=12)
    for turn in range(4):
        for number in range(5):
            prompt = STEM[: 2 * BLOCK] + tokens_of(number, 3 * BLOCK) + tokens_of(turn, tail)
            engine.add(f"{turn} {number}", [*prompt, turn + 1], max_tokens=6)
    engine.drain()
    stats = engine.stats
    assert stats.loads
    assert stats.cpu_evictions
    assert stats.disk_evictions
    engine.core.tiers.check()
    engine.close()


def test_a_restart_finds_its_blocks_on_disk(tmp_path):
    before = Tiered(directory=tmp_path)
    before.run("cold", [*STEM, 1])
    before.crowd_out()
    before.close()
    after = Tiered(directory=tmp_path)
    assert set(hashes()) <= set(after.core.tiers.disk.hashes())
    assert after.run("again", [*STEM, 1]) == len(STEM)
    assert after.tokens["again"] == before.tokens["cold"]
    assert after.stats.disk_loaded_blocks == len(STEM) // BLOCK
    after.close()


def test_a_restart_keeps_the_bound_and_the_order_of_use(tmp_path):
    before = Tiered(directory=tmp_path)
    before.run("cold", [*STEM, 1])
    before.crowd_out()
    before.close()
    after = Tiered(directory=tmp_path, disk=4)
    disk = after.core.tiers.disk
    assert len(disk) == 4
    newest = tokens_of(51, 8 * BLOCK)  # what left the device last is what is kept
    assert set(disk.hashes()) == set(hashes(newest)[:4])
    assert len(list(after.folder.path.glob("*.kv"))) == 4
    disk.check()
    after.close()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)


def put_another_block_there(path):
    other = next(file for file in path.parent.glob("*.kv") if file != path)
    path.write_bytes(other.read_bytes())


def take_away(path):
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, put_another_block_there, take_away])
@pytest.mark.parametrize("restart", [False, True])
def test_a_damaged_file_is_a_miss_and_is_counted(tmp_path, damage, restart):
    engine = Tiered(host=12, directory=tmp_path)
    engine.run("cold", [*STEM, 1])
    engine.crowd_out(6)
    path = engine.folder.path / name_of(hashes()[3])
    damage(path)
    if restart:
        engine.close()
        engine = Tiered(host=12, directory=tmp_path)
    assert engine.run("again", [*STEM, 1]) == 3 * BLOCK
    stats = engine.stats
    assert stats.failed_loads + stats.unusable_files + stats.orphaned_files
    assert stats.disk_loaded_blocks == 3
    engine.crowd_out(6)
    assert engine.run("whole again", [*STEM, 1]) == len(STEM)
    assert engine.stats.failed_loads <= 1
    engine.close()


@pytest.mark.parametrize("field", ["weights", "kv_dtype", "positions"])
def test_blocks_of_another_namespace_are_not_found(tmp_path, field):
    before = Tiered(directory=tmp_path)
    before.run("cold", [*STEM, 1])
    before.crowd_out()
    before.close()
    other = msgspec.structs.replace(NAMESPACE, **{field: "other"})
    after = Tiered(directory=tmp_path, namespace=other)
    assert len(after.core.tiers.disk) == 0
    assert after.run("again", [*STEM, 1]) == 0
    assert list(before.folder.path.glob("*.kv")), "files of another namespace are left alone"
    after.close()


def test_loading_that_is_slower_than_computing_is_not_chosen():
    engine = Tiered()
    engine.run("cold", [*STEM, 1])
    engine.crowd_out()
    engine.core.tiers.host_speed.observe(1, 100.0 * BLOCK)
    assert engine.run("again", [*STEM, 1]) == 0
    assert (engine.stats.loads, engine.stats.declined_loads) == (0, 1)
    engine.crowd_out()
    engine.core.tiers.set_prefill_speed(1000.0, 0.0)
    assert engine.run("slow now", [*STEM, 1]) == len(STEM)


def test_nothing_is_loaded_while_the_speed_of_computing_is_unknown():
    engine = Tiered()
    engine.run("cold", [*STEM, 1])
    engine.crowd_out()
    engine.core.tiers.set_prefill_speed(0.0, 0.0)
    assert engine.run("again", [*STEM, 1]) == 0


def test_a_request_waits_for_ready_while_others_go_on():
    loader = ByHand()
    engine = Tiered(loader=loader, blocks=16)
    engine.run("cold", [*STEM, 1])
    engine.crowd_out(4)
    engine.add("waits", [*STEM, 1])
    engine.add("waits as well", [*STEM, 2])
    engine.step()
    assert engine.core.waits_for_loads()
    assert engine.core.tiers.loads == 1
    engine.add("short", tokens_of(3, 5), max_tokens=2)
    engine.step()
    engine.step()
    assert engine.final["short"].finish_reason == "length"
    assert not engine.tokens["waits"]
    loader.run()
    engine.drain()
    assert engine.final["waits"].hit_tokens == len(STEM)
    assert engine.final["waits as well"].hit_tokens == len(STEM)
    assert engine.stats.loads == 1


def test_cancelled_while_it_loads():
    loader = ByHand()
    engine = Tiered(loader=loader)
    engine.run("cold", [*STEM, 1])
    engine.crowd_out()
    engine.add("goes", [*STEM, 1])
    engine.step()
    assert engine.core.cancel("goes")
    engine.core.check()
    assert engine.core.load().free_blocks == 10 - len(STEM) // BLOCK
    loader.run()
    engine.core.expire(0.0)
    engine.core.check()
    assert engine.core.load().free_blocks == 10
    assert engine.run("again", [*STEM, 1]) == len(STEM)
    assert engine.stats.loads == 1


@pytest.mark.parametrize("new_weights", [False, True])
def test_what_loads_across_a_flush_is_never_hit(tmp_path, new_weights):
    loader = ByHand()
    engine = Tiered(loader=loader, directory=tmp_path)
    engine.run("cold", [*STEM, 1])
    engine.crowd_out()
    engine.add("loads", [*STEM, 1])
    engine.step()
    assert engine.core.tiers.loads == 1
    if new_weights:
        engine.core.cancel("loads")
        engine.core.forget_model([])
        engine.core.tiers.use_folder(None, 0)
    else:
        engine.core.flush()
        assert list(engine.folder.path.glob("*.kv")) == []
    loader.run()
    while engine.core.has_work():
        engine.step()
    engine.core.expire(0.0)
    if not new_weights:
        assert engine.final["loads"].hit_tokens == 0
        engine.core.flush()
    assert engine.run("again", [*STEM, 1]) == 0
    assert engine.stats.loads == 1
    assert engine.core.load().free_blocks == 10
    engine.close()


def test_copies_and_loads_in_threads_of_their_own(tmp_path):
    loader = ThreadPoolExecutor(1)
    engine = Tiered(loader=loader, host=20, directory=tmp_path)
    for turn in range(6):
        for number in range(4):
            engine.add(f"{turn} {number}", [*tokens_of(number, 5 * BLOCK), turn + 1], max_tokens=3)
        engine.drain()
    assert engine.stats.loads
    loader.shutdown()
    engine.close()


def test_the_first_measurement_leaves_nothing_in_the_pool_that_is_not_finite():
    """Host memory is not initialised: here it is NaN, as torch can be told to have it."""
    runner = TorchRunner(MODEL, 16, BLOCK)
    torch.use_deterministic_algorithms(True)
    try:
        tiers = open_tiers(settings_of(), runner, NAMESPACE, 16, Speed(1e-3, 0.0))
    finally:
        torch.use_deterministic_algorithms(False)
    assert tiers is not None
    assert not tiers._copies._typed[-1].isfinite().any(), "the memory was initialised"
    assert all(pool.isfinite().all() for pair in runner.pools for pool in pair)


def settings_of(**fields):
    return WorkerSettings(model="m", block_size=BLOCK, cpu_tier_gb=1e-4, **fields)


def no_room(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_copies_and_nothing_else(tmp_path, monkeypatch, caplog):
    engine = Tiered(host=8, directory=tmp_path)
    with monkeypatch.context() as full:
        full.setattr("worker.tiers.block_file.os.fsync", no_room)
        engine.run("cold", [*STEM, 1])
        engine.crowd_out()
        assert engine.stats.failed_writes > 5
        assert engine.stats.disk_blocks == 0
        engine.run("again", [*STEM, 2])
    warnings = [record.message for record in caplog.records if "disk" in record.message]
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    engine.crowd_out()
    assert engine.stats.written_blocks > 5
    engine.run("then", [*STEM, 3])
    engine.core.tiers.check()
    engine.close()


@pytest.mark.parametrize("fails", ["worker.tiers.block_file.os.fsync", "pathlib.Path.mkdir"])
def test_a_worker_starts_while_its_disk_is_full(tmp_path, monkeypatch, fails):
    runner = TorchRunner(MODEL, 16, BLOCK)
    monkeypatch.setattr(fails, no_room)
    settings = settings_of(disk_tier_gb=1e-3, disk_tier_dir=str(tmp_path))
    tiers = open_tiers(settings, runner, NAMESPACE, 16, Speed(1e-3, 0.0))
    assert tiers is not None
    assert tiers.host.capacity > 0
    assert (tiers.disk.capacity > 0) == (fails != "pathlib.Path.mkdir")


def test_files_from_the_future_are_used_and_go_first_in_first_out(tmp_path):
    """The clock was set back since they were written: what counts is that they are there."""
    engine = Tiered(host=8, directory=tmp_path)
    engine.run("cold", [*STEM, 1])
    engine.crowd_out()
    engine.close()
    ahead_ns = time.time_ns() + 10**9 * 86_400 * 365
    for file in tmp_path.rglob("*.kv"):
        os.utime(file, ns=(ahead_ns, ahead_ns))
    restarted = Tiered(host=8, directory=tmp_path)
    assert restarted.run("warm", [*STEM, 1]) == len(STEM)
    assert restarted.stats.disk_loaded_blocks
    restarted.crowd_out()
    restarted.core.tiers.check()
    restarted.close()
