"""What blocks in cold tiers are worth to a router, and how it keeps track of them."""

import pytest

from cluster.blocks import join_hashes
from cluster.protocol import ColdReport, Load
from router.cold_index import credit
from router.fleet import Fleet
from tests.router.support import BLOCK_SIZE, card, chain_of, report

PROMPT = 41
CHAIN = chain_of(range(PROMPT))
SPEED = Load(prefill_s_per_token=0.01, free_blocks=1000)


@pytest.fixture
def fleet():
    fleet = Fleet()
    fleet.on_card(card("a"))
    fleet.on_card(card("b"))
    yield fleet
    fleet.check()


def cold(cpu=(), disk=(), *, cpu_gone=(), disk_gone=(), cpu_s=0.0, disk_s=0.0, counts=None):
    cpu_blocks, disk_blocks = counts or (len(cpu), len(disk))
    return ColdReport(
        cpu_stored=join_hashes(list(cpu)),
        cpu_evicted=join_hashes(list(cpu_gone)),
        disk_stored=join_hashes(list(disk)),
        disk_evicted=join_hashes(list(disk_gone)),
        cpu_blocks=cpu_blocks,
        disk_blocks=disk_blocks,
        cpu_s_per_token=cpu_s,
        disk_s_per_token=disk_s,
    )


def hits(fleet):
    return fleet.candidates("tiny", CHAIN, PROMPT).hit_tokens.tolist()


def test_a_credit_is_the_share_of_computing_that_loading_saves():
    assert credit(0.001, 0.01) == pytest.approx(0.9)
    assert credit(0.02, 0.01) == 0.0
    assert credit(0.0, 0.01) == credit(0.01, 0.0) == 0.0


def test_a_cold_block_counts_by_its_tier(fleet):
    load = Load(prefill_s_per_token=0.01, cached_blocks=2)
    tiers = cold(CHAIN[:5], CHAIN[:9], cpu_s=0.0025, disk_s=0.005)
    assert fleet.on_report(report("a", stored=CHAIN[:2], load=load, cold=tiers)) is True
    expected = BLOCK_SIZE * (2 + 0.75 * 3 + 0.5 * 4)
    assert hits(fleet) == [expected, 0]


def test_device_blocks_count_once_though_they_are_cold_as_well(fleet):
    load = Load(prefill_s_per_token=0.01, cached_blocks=6)
    tiers = cold(CHAIN[:4], CHAIN[:4], cpu_s=0.001, disk_s=0.001)
    fleet.on_report(report("a", stored=CHAIN[:6], load=load, cold=tiers))
    assert hits(fleet) == [24, 0]


def test_what_leaves_a_tier_counts_no_more_and_a_wrong_number_is_noticed(fleet):
    fleet.on_report(report("a", load=SPEED, cold=cold(CHAIN[:4], cpu_s=0.005)))
    assert hits(fleet) == [8, 0]
    gone = cold(cpu_gone=CHAIN[2:4], cpu_s=0.005, counts=(2, 0))
    assert fleet.on_report(report("a", load=SPEED, cold=gone)) is True
    assert hits(fleet) == [4, 0]
    wrong = cold(cpu_s=0.005, counts=(3, 0))
    assert fleet.on_report(report("a", load=SPEED, cold=wrong)) is False


def test_a_snapshot_and_a_new_epoch_replace_what_was_known(fleet):
    fleet.on_report(report("a", load=SPEED, cold=cold(CHAIN[:4], cpu_s=0.005)))
    fleet.on_snapshot("a", 1, [])
    assert not fleet.cold
    fleet.on_cold_snapshot("a", 1, CHAIN[:2], CHAIN[:6])
    fleet.on_report(report("a", load=SPEED, cold=cold(cpu_s=0.005, disk_s=0.005, counts=(2, 6))))
    assert hits(fleet) == [12, 0]
    fleet.on_card(card("a", epoch=2))
    assert hits(fleet) == [0, 0]
    fleet.on_report(report("b", load=SPEED, cold=cold(CHAIN[:4], cpu_s=0.005)))
    fleet.on_gone("b", "left")
    assert not fleet.cold
