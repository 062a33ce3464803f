"""What is on the device alone is written to disk at an orderly end, and found by the next life."""

from concurrent.futures import Future

import pytest

from tests.worker.scheduling import prompt_of
from tests.worker.tiered_rig import ByHand, TieredRig
from worker.block_pool import InvariantError

POOL = {"capacity_blocks": 40, "block_size": 4, "host_blocks": 8, "disk_blocks": 64}


class Time:
    """Each idle moment a file is written and a second passes."""

    def __init__(self, rig):
        self.now = 0.0
        self.rig = rig

    def __call__(self):
        return self.now

    def idle(self):
        self.rig.writer.run(1)
        self.now += 1.0


class GoesOn(ByHand):
    """A writer that gets on with its jobs after each one that is cancelled."""

    def submit(self, fn, /, *args, **kwargs):
        job = Cancelled(self)
        self.jobs.append((job, fn, args))
        return job


class Cancelled(Future):
    def __init__(self, writer):
        super().__init__()
        self.writer = writer

    def cancel(self):
        was_cancelled = super().cancel()
        self.writer.run(2)
        return was_cancelled


def saved(rig, seconds=1000.0):
    time = Time(rig)
    rig.core.fail_all("the end")
    return rig.core.save(seconds, time, time.idle)


def first_life(**changes):
    rig = TieredRig(**{**POOL, **changes})
    rig.add("long", prompt_of(20))
    rig.drain()
    rig.add("latest", prompt_of(12, first=3))
    rig.drain()
    assert not rig.folder.files
    return rig


def second_life(rig):
    return TieredRig(**POOL, files=rig.folder.files)


def test_the_next_life_loads_what_was_on_the_device():
    rig = first_life()
    cached = set(rig.core.cached_blocks())
    assert saved(rig) == (len(cached), len(cached))
    assert set(rig.folder.files) == cached
    again = second_life(rig)
    again.add("long again", [*prompt_of(20), 5])
    again.drain()
    assert again.hit_tokens("long again") == 20


def test_when_time_runs_out_whole_chains_of_the_most_valuable_are_there():
    order = []
    for seconds in range(9):
        rig = first_life()
        count, _ = saved(rig, float(seconds))
        assert count == len(rig.folder.files)
        headers = [header for header, _ in rig.folder.files.values()]
        assert all(not h.parent or h.parent in rig.folder.files for h in headers)
        order.append(frozenset(rig.folder.files))
    assert order == sorted(order, key=len)
    assert len(order[-1]) == 8
    # What was used last goes first: three blocks of "latest" before any of "long".
    latest = order[3]
    rig = first_life()
    rig.add("latest again", [*prompt_of(12, first=3), 5])
    hashes = rig.core._scheduler.waiting["latest again"].hashes
    assert latest == frozenset(hashes[:3])


def test_what_is_written_while_the_rest_is_dropped_is_whole_chains_too():
    rig = first_life()
    rig.writer = rig.core.tiers._writer = GoesOn()
    count, _ = saved(rig, 0.0)
    headers = [header for header, _ in rig.folder.files.values()]
    assert count == len(headers) > 0
    assert all(not h.parent or h.parent in rig.folder.files for h in headers)


def test_nothing_is_saved_under_a_running_request():
    rig = first_life()
    rig.add("runs", [7])
    with pytest.raises(InvariantError, match="1 requests"):
        rig.core.save(1.0, lambda: 0.0, lambda: None)


def test_a_pinned_prefix_and_one_that_a_request_uses_are_saved_as_well():
    rig = first_life(pin_share=0.2)
    request, _ = rig.requests["long"]
    assert rig.core.pin(request.namespace_root, request.token_ids) == 20
    rig.add("runs", [*prompt_of(12, first=3), 6, 6, 6, 6, 6], max_tokens=9, ignore_eos=True)
    rig.step()
    cached = len(rig.core.cached_blocks())
    assert saved(rig) == (cached, cached)


def test_a_chain_longer_than_host_memory_is_saved_as_far_as_that_goes():
    rig = first_life(host_blocks=3)
    count, cached = saved(rig)
    assert 3 <= count < cached
    headers = [header for header, _ in rig.folder.files.values()]
    assert all(not h.parent or h.parent in rig.folder.files for h in headers)


def test_the_order_of_use_survives():
    rig = first_life()
    saved(rig)
    used = list(rig.folder.files)  # as a scan finds them: used longest ago first
    depth = dict.fromkeys(used, 0)
    for block_hash in used:
        above = rig.folder.files[block_hash][0].parent
        while above:
            depth[block_hash] += 1
            above = rig.folder.files[above][0].parent
    assert [depth[h] for h in used] == [4, 3, 2, 1, 0, 2, 1, 0]


def test_a_full_disk_ends_nothing_but_the_saving():
    rig = first_life()
    rig.folder.full = True
    count, cached = saved(rig)
    assert (count, rig.folder.files) == (0, {})
    assert cached > 0


@pytest.mark.parametrize("eviction", ["lfu", "ttl:ttl_s=1000", "workload_aware"])
def test_every_policy_s_cache_can_be_saved(eviction):
    rig = first_life(eviction=eviction)
    cached = set(rig.core.cached_blocks())
    assert saved(rig) == (len(cached), len(cached))
    assert set(rig.folder.files) == cached


@pytest.mark.parametrize("disk_blocks", [3, 5])
def test_a_disk_too_small_for_all_gets_the_most_valuable(disk_blocks):
    rig = first_life(disk_blocks=disk_blocks)
    rig.add("latest again", [*prompt_of(12, first=3), 5])
    latest = set(rig.core._scheduler.waiting["latest again"].hashes[:3])
    assert saved(rig) == (disk_blocks, 8)
    assert latest <= rig.folder.files.keys()
    assert len(rig.folder.files) == disk_blocks


def test_what_lies_on_a_full_disk_already_is_not_displaced_by_what_is_worth_less():
    rig = TieredRig(capacity_blocks=40, block_size=4, host_blocks=16, disk_blocks=6)
    hashes = {}
    for first, name in ((9, "oldest"), (5, "middle"), (3, "latest")):
        rig.add(name, [*prompt_of(12, first=first), 1])
        hashes[name] = rig.core._scheduler.waiting[name].hashes
        rig.drain()
    cache, disk = rig.core._cache, rig.core.tiers.disk
    for name in ("latest", "oldest"):  # as if evicted once, and then loaded from host memory
        cache.offer(cache._blocks[hashes[name][-1]], rig.now)
        rig.settle()
        disk.touch(map(disk.get, hashes[name]), {"latest": -9.0, "oldest": -5.0}[name])
    assert set(rig.folder.files) == {*hashes["latest"], *hashes["oldest"]}
    assert saved(rig) == (6, 9)
    assert set(rig.folder.files) == {*hashes["latest"], *hashes["middle"]}


def test_what_was_flushed_just_before_the_end_is_not_there_in_the_next_life():
    rig = first_life()
    saved(rig)
    again = second_life(rig)
    assert again.folder.files
    again.core.flush()
    assert saved(again, 0.0) == (0, 0)
    assert not again.folder.files


@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.0])
def test_what_the_disk_gave_up_for_others_is_gone_even_where_time_runs_out(seconds):
    rig = first_life(disk_blocks=8)
    saved(rig)
    again = TieredRig(**{**POOL, "disk_blocks": 8}, files=rig.folder.files)
    again.add("new", prompt_of(24, first=9))
    again.drain()
    saved(again, seconds)
    disk = again.core.tiers.disk
    assert set(again.folder.files) == set(disk.hashes())
