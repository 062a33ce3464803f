"""The simulator: cases worked by hand, and what must hold of every run."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.simulation.fleet import MODEL, Latency
from loadgen.simulation.prompts import asked_of, ideal_of, packed_tokens
from loadgen.slowest import WORST, slowness
from router.policies import available
from tests.loadgen.simulating import BLOCK, COST, DECODE_ONLY, fleet_of, replay, request
from worker.engine import EngineCore


def prefill_s(start, count):
    return 1.0 + 0.1 * count + 0.01 * (count * start + count * (count + 1) / 2)


def decode_s(*contexts):
    return 1.0 + sum(0.25 + 0.001 * context for context in contexts)


def near(value):
    return pytest.approx(value, rel=1e-9)


def test_a_request_alone_takes_its_prefill_then_its_decodes():
    (one,) = replay([request(10.0, [1, 2], output_tokens=3)])
    first = 10.0 + prefill_s(0, 8)
    assert one.first_token_s == near(first)
    assert one.end_s == near(first + decode_s(9) + decode_s(10))
    assert one.itl_ms == [near(1e3 * decode_s(9)), near(1e3 * decode_s(10))]
    assert (one.status, one.finish_reason, one.completion_tokens) == ("ok", "length", 3)


def test_who_comes_during_a_step_waits_for_its_end_and_then_shares_the_steps():
    one, other = replay([request(0.0, [1, 2], output_tokens=3), request(0.5, [7])])
    begins = prefill_s(0, 8)
    second = begins + decode_s(9) + prefill_s(0, 4) - 1.0  # both in one step
    assert other.first_token_s == near(second)
    assert one.itl_ms[0] == near(1e3 * (second - begins))
    assert one.end_s == near(second + decode_s(10))


def test_a_prefix_that_is_cached_is_not_computed_again():
    later = request(100.0, [1, 2, 3], prompt_tokens=11)
    _, again = replay([request(0.0, [1, 2, 9]), later])
    assert again.cached_tokens == 8
    assert again.first_token_s == near(100.0 + prefill_s(8, 3))


def test_the_last_token_of_a_prompt_is_always_computed():
    _, again = replay([request(0.0, [1, 2]), request(100.0, [1, 2])])
    assert again.cached_tokens == 4


def test_a_partial_block_is_not_shared():
    _, again = replay([request(0.0, [1, 2], prompt_tokens=6), request(100.0, [1, 2, 3])])
    assert again.cached_tokens == 4


def test_who_comes_during_a_run_of_steady_steps_joins_at_the_next_step():
    long = request(0.0, [1], prompt_tokens=3, output_tokens=300)
    one, other = replay(
        [long, request(100.25, [7], prompt_tokens=2)], cost=DECODE_ONLY, block_size=512
    )
    assert other.first_token_s == near(102.0)  # 101 begins its step
    assert one.end_s == near(300.0)


def test_latencies_are_added_where_they_arise():
    latency = Latency(to_gateway_s=0.5, to_worker_s=0.25, to_client_s=2.0)
    (one,) = replay([request(0.0, [1, 2], output_tokens=2)], latency=latency)
    assert one.first_token_s == near(0.75 + prefill_s(0, 8) + 2.0)
    assert one.itl_ms == [near(1e3 * decode_s(9))]


def test_a_hit_is_expected_only_once_the_index_knows_of_it():
    soon, late = request(4.0, [1, 2, 3]), request(20.0, [1, 2, 3])
    first = request(0.0, [1, 2, 9])
    for second, expected in ((soon, 0), (late, 8)):
        _, again = replay([first, second], index_s=10.0)
        assert (again.predicted_hit_tokens, again.cached_tokens) == (expected, 8)


def test_blocks_that_are_being_computed_are_expected_at_once():
    _, again = replay([request(0.0, [1, 2, 9]), request(0.1, [1, 2, 3])], index_s=10.0)
    assert again.predicted_hit_tokens == 8


def test_a_router_that_learns_of_the_load_late_still_counts_what_it_sent():
    requests = [request(0.0, [n, n + 1, n + 2], output_tokens=9) for n in range(0, 12, 3)]
    outcomes = replay(requests, workers=4, policy="least_requests", load_s=1000.0)
    assert len({outcome.worker for outcome in outcomes}) == 4


def test_a_request_that_no_pool_can_hold_fails_and_says_why():
    too_long, fits = replay(
        [request(0.0, range(20)), request(1.0, [1])], kv_tokens=16, cost=DECODE_ONLY
    )
    assert (too_long.status, too_long.http_status) == ("failed", 400)
    assert "at most. Shorten" in too_long.error
    assert fits.status == "ok"


FILLS_THE_POOL = request(0.0, [1, 2, 3], output_tokens=4)  # until second 4
MEANWHILE = request(2.5, [7])


def test_without_a_queue_a_request_is_refused_while_no_block_is_free():
    _, second = replay([FILLS_THE_POOL, MEANWHILE], kv_tokens=16, cost=DECODE_ONLY)
    assert (second.status, second.http_status) == ("failed", 429)


def test_with_a_queue_it_waits_until_there_is_room():
    _, second = replay([FILLS_THE_POOL, MEANWHILE], kv_tokens=16, cost=DECODE_ONLY, queue=1)
    assert second.first_token_s == near(5.0)


def test_a_wait_for_room_ends_at_the_gateways_timeout():
    requests = [FILLS_THE_POOL, MEANWHILE, request(3.0, [8])]
    _, late, in_time = replay(
        requests, kv_tokens=16, cost=DECODE_ONLY, queue=2, queue_timeout_s=1.25
    )
    assert (late.status, late.http_status, late.end_s) == ("failed", 429, near(3.75))
    assert "room for the prompt within 1.25 s" in late.error
    assert in_time.first_token_s == near(5.0)


def test_a_request_that_would_wait_too_long_is_refused_at_once():
    """Places in the batch for one; each request takes it for 4 s. How long the first ones wait is
    not known until some have started."""
    ones = [request(second, [100 + second], output_tokens=4) for second in range(40)]
    limited = replay(ones, kv_tokens=400, cost=DECODE_ONLY, max_batch_size=1, max_wait_s=9.0)
    refused = [outcome for outcome in limited if outcome.status == "failed"]
    late = [o for o in limited if o.status == "ok" and o.sent_s >= 20]
    waits = [outcome.first_token_s - outcome.sent_s for outcome in late]
    assert refused
    assert all(outcome.http_status == 429 for outcome in refused)
    assert all(outcome.end_s == outcome.sent_s for outcome in refused)
    assert all("would wait about" in outcome.error for outcome in refused)
    assert max(waits) <= 9.0 + 4.0
    unlimited = replay(ones, kv_tokens=400, cost=DECODE_ONLY, max_batch_size=1)
    assert all(outcome.status == "ok" for outcome in unlimited)


def random_requests(seed, count=60, span_s=60.0):
    rng = random.Random(seed)
    stems = [[100 * stem + n for n in range(rng.randrange(1, 12))] for stem in range(4)]
    requests = []
    for number in range(count):
        stem = rng.choice(stems)
        shared = stem[: rng.randrange(1, len(stem) + 1)]
        own = [1000 + 10 * number + n for n in range(rng.randrange(1, 6))]
        length = BLOCK * (len(shared) + len(own)) - rng.randrange(1, BLOCK)
        requests.append(request(rng.uniform(0, span_s), shared + own, length, rng.randrange(1, 40)))
    return requests


@given(
    seed=st.integers(0, 1 << 30),
    policy=st.sampled_from(available()),
    workers=st.sampled_from([1, 3]),
    kv_tokens=st.sampled_from([200, 4000]),
    delay_s=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_tokens_in_are_tokens_computed_plus_tokens_reused(
    seed, policy, workers, kv_tokens, delay_s
):
    asked = asked_of(random_requests(seed), BLOCK)
    fleet = fleet_of(
        policy,
        workers=workers,
        kv_tokens=kv_tokens,
        load_s=delay_s,
        index_s=delay_s,
        queue=100,
        queue_timeout_s=1e6,
        token_budget=32,
    )
    outcomes = fleet.replay(asked, "arm")
    fleet.check()
    assert all(outcome.status == "ok" for outcome in outcomes)
    for name, stats in fleet.stats().items():
        mine = [outcome for outcome in outcomes if outcome.worker == name]
        reused = sum(outcome.cached_tokens for outcome in mine)
        assert reused == stats.reused_tokens
        computed = stats.computed_prompt_tokens
        if not stats.preemptions:
            assert sum(outcome.prompt_tokens for outcome in mine) == computed + reused
        assert stats.generated_tokens == sum(outcome.completion_tokens for outcome in mine)
    for outcome, sent in zip(outcomes, asked, strict=True):
        assert outcome.completion_tokens == sent.trace.output_tokens
        assert outcome.first_token_s > sent.arrival_s
        spent = outcome.first_token_s + sum(outcome.itl_ms) / 1e3
        assert outcome.end_s == pytest.approx(spent)
    ideal = ideal_of(asked, BLOCK)
    prompt = sum(outcome.prompt_tokens for outcome in outcomes)
    reused = sum(outcome.cached_tokens for outcome in outcomes)
    assert reused <= ideal.cached_token_ratio * prompt + 1e-6


def test_one_worker_with_room_for_all_reaches_the_ideal():
    asked = asked_of(random_requests(5, span_s=100_000.0), BLOCK)
    outcomes = fleet_of().replay(asked, "arm")
    reused = sum(outcome.cached_tokens for outcome in outcomes)
    prompt = sum(outcome.prompt_tokens for outcome in outcomes)
    assert reused / prompt == near(ideal_of(asked, BLOCK).cached_token_ratio)


@given(seed=st.integers(0, 1 << 30), block_size=st.sampled_from([4, 64, 512]))
@settings(max_examples=30, deadline=None)
def test_runs_of_steps_change_no_outcome(seed, block_size):
    requests = random_requests(seed)
    fields = {"workers": 2, "block_size": block_size, "kv_tokens": 20_480, "policy": "marginal"}
    by_runs = replay(requests, **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCore, "steady_steps", lambda self: 0)
        by_steps = replay(requests, **fields)
    for one, other in zip(by_runs, by_steps, strict=True):
        assert (one.worker, one.cached_tokens) == (other.worker, other.cached_tokens)
        assert one.first_token_s == pytest.approx(other.first_token_s)
        assert one.itl_ms == pytest.approx(other.itl_ms)


@pytest.mark.parametrize("policy", available())
def test_the_same_seed_gives_the_same_outcomes(policy):
    requests = random_requests(11)
    runs = [replay(requests, policy=policy, workers=3, seed=4) for _ in range(2)]
    assert runs[0] == runs[1]


def test_another_seed_draws_other_workers():
    requests = random_requests(11)
    runs = [
        [o.worker for o in replay(requests, policy="random", workers=3, seed=seed)]
        for seed in (1, 2)
    ]
    assert runs[0] != runs[1]


def test_a_thousand_workers_serve_one_request_each():
    requests = [request(0.001 * n, [2 * n, 2 * n + 1]) for n in range(1000)]
    outcomes = replay(requests, workers=1000, policy="locality")
    assert len({outcome.worker for outcome in outcomes}) == 1000
    assert {round(outcome.ttft_ms, 6) for outcome in outcomes} == {
        round(1e3 * COST.seconds([(0, 8)]), 6)
    }


def test_equal_ids_give_equal_tokens_and_others_others():
    one = packed_tokens(request(0.0, [1, 2, 3], prompt_tokens=10))
    other = packed_tokens(request(0.0, [1, 2, 4]))
    assert len(one) == 40
    assert one[:32] == other[:32]
    assert one[32:40] != other[32:40]


@pytest.mark.parametrize("load_s", [0.0, 0.5])
def test_workers_have_told_their_speed_before_the_first_request(load_s):
    fleet = fleet_of(workers=3, load_s=load_s, token_budget=10)
    seen = fleet.router.candidates(MODEL, [], 100)
    assert seen.columns.s_per_token.tolist() == near([0.1 + 1.0 / 10] * 3)
    assert seen.columns.s_per_pair.tolist() == near([0.01] * 3)


@pytest.mark.parametrize("gap_s", [0.01, 30.0])
def test_the_decisions_on_the_slowest_are_those_that_were_taken(gap_s):
    """Crowded, where each request is slower than those before, and one by one."""
    sent = [request(n * gap_s, [n % 3, 10 + n % 7], output_tokens=2) for n in range(30)]
    fleet = fleet_of(workers=3)
    told = fleet.explain_slowest()
    outcomes = fleet.replay(asked_of(sent, BLOCK), "arm")
    slowest = {o.id: o for o in sorted(outcomes, key=slowness)[-WORST:]}
    assert told.keys() == slowest.keys()
    for name, outcome in slowest.items():
        (chosen,) = (row for row in told[name].workers if row.chosen)
        assert chosen.worker == told[name].chosen == outcome.worker
        assert chosen.hit_tokens == outcome.predicted_hit_tokens
        assert told[name].prompt_tokens == outcome.prompt_tokens
        assert len(told[name].workers) == 3
