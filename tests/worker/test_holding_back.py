"""Requests that wait for a prefix which another one computes right now."""

import pytest

from tests.worker.recording_runner import Rig
from tests.worker.scheduling import Counting, last, prompt_of


class TestHoldingBack:
    """Requests whose prefix another one is computing."""

    def rig(self, **overrides):
        return Rig(**({"chunk_tokens": 4, "token_budget": 100} | overrides))

    def test_a_shared_prefix_is_computed_once(self):
        rig = self.rig()
        for number in range(4):
            rig.add(str(number), [*prompt_of(16), number, 6])
        for _ in range(4):
            rig.step()
            assert list(last(rig)) == ["0"]
        rig.step()
        assert last(rig) == {
            "0": (16, 2, True),
            "1": (16, 2, True),
            "2": (16, 2, True),
            "3": (16, 2, True),
        }
        rig.drain()
        stats = rig.core.stats()
        assert (stats.computed_prompt_tokens, stats.reused_tokens) == (16 + 4 * 2, 3 * 16)
        assert (stats.held_requests, stats.duplicates) == (3, 0)

    def test_whoever_is_behind_a_held_request_is_not_held_with_it(self):
        rig = self.rig()
        rig.add("holder", [*prompt_of(16), 3])
        rig.add("held", [*prompt_of(16), 4])
        rig.add("other", prompt_of(6, first=5))
        rig.step()
        assert list(last(rig)) == ["holder", "other"]
        rig.drain()

    def test_the_wait_ends_where_the_prefixes_part(self):
        rig = self.rig()
        rig.add("holder", prompt_of(40))
        rig.add("held", [*prompt_of(8), 5, 5, 5])
        rig.step()
        rig.step()
        assert list(last(rig)) == ["holder"]
        rig.step()
        assert last(rig) == {"holder": (8, 4, False), "held": (8, 3, True)}
        rig.drain()

    def test_less_than_a_block_in_common_is_not_worth_it(self):
        rig = self.rig()
        rig.add("a", [*prompt_of(3), 3, 3, 3])
        rig.add("b", [*prompt_of(3), 4, 4, 4])
        rig.step()
        assert list(last(rig)) == ["a", "b"]

    def test_a_block_that_must_be_computed_anyway_is_not_waited_for(self):
        """Of a prompt of one full block nothing can be reused: its last token is to be computed."""
        rig = self.rig(chunk_tokens=2)
        rig.add("a", prompt_of(12))
        rig.add("b", prompt_of(4))
        rig.step()
        assert list(last(rig)) == ["a", "b"]
        rig.drain()

    def test_not_across_namespaces(self):
        rig = self.rig()
        rig.add("a", prompt_of(16))
        rig.add("b", prompt_of(16), root=b"q" * 32)
        rig.step()
        assert list(last(rig)) == ["a", "b"]
        rig.drain()
        assert rig.hit_tokens("b") == 0

    def test_not_without_a_cache(self):
        rig = self.rig(prefix_caching=False)
        rig.add("a", prompt_of(16))
        rig.add("b", prompt_of(16))
        rig.step()
        assert list(last(rig)) == ["a", "b"]
        rig.drain()

    def test_not_for_a_holder_that_is_far_behind(self):
        """The holder began before the first blocks were cached; computing is as quick."""
        rig = self.rig(token_budget=8, capacity_blocks=64)
        rig.add("leader", [*prompt_of(8), 3, 3])
        rig.add("holder", [*prompt_of(8), 4, 4, 4, 4], root=b"r" * 32)
        scheduler = rig.core._scheduler
        sequence = scheduler.waiting["holder"]
        flight = scheduler._in_flight
        flight.worth_waiting_for = lambda *_: 0  # so that both compute the same prefix
        rig.step()
        del flight.worth_waiting_for
        assert list(last(rig)) == ["leader", "holder"]
        rig.step()
        sequence.pending_tokens += 8  # as if it had got none of the budget
        hashes = self.newcomer(rig, [*prompt_of(8), 4, 4, 4, 4, 5]).hashes
        assert flight.worth_waiting_for(hashes, 2, 3) == 0
        sequence.pending_tokens -= 8
        assert flight.worth_waiting_for(hashes, 2, 3) == 3

    def newcomer(self, rig, prompt):
        name = f"newcomer-{prompt[-1]}"
        rig.add(name, prompt)
        return rig.core._scheduler.waiting[name]

    @pytest.mark.parametrize("steps", [1, 2, 3])
    def test_cancelling_the_holder_frees_those_who_wait(self, steps):
        rig = self.rig()
        rig.add("holder", [*prompt_of(16), 3])
        rig.add("held", [*prompt_of(16), 4])
        rig.add("third", [*prompt_of(16), 5])
        for _ in range(steps):
            rig.step()
        rig.cancel("holder")
        rig.step()
        assert last(rig) == {"held": (4 * steps, 4, False)}  # and "third" now waits for it
        rig.drain()
        assert rig.hit_tokens("held") == 4 * steps
        assert rig.hit_tokens("third") == 16

    def test_cancelling_a_held_request(self):
        rig = self.rig()
        rig.add("holder", [*prompt_of(16), 3])
        rig.add("held", [*prompt_of(16), 4])
        rig.step()
        assert rig.cancel("held")
        rig.drain()

    def test_a_failing_holder_frees_those_who_wait(self):
        rig = self.rig()
        rig.add("holder", [*prompt_of(16), 3])
        rig.add("held", [*prompt_of(16), 4])
        rig.step()
        rig.fail()
        assert rig.final["holder"].finish_reason == "error"
        rig.drain()
        assert rig.final["held"].finish_reason != "error"

    def test_a_flush_frees_those_who_wait(self):
        rig = self.rig()
        rig.add("holder", [*prompt_of(16), 3])
        rig.add("held", [*prompt_of(16), 4])
        rig.step()
        rig.core.flush()
        rig.step()
        assert last(rig) == {"holder": (4, 4, False), "held": (0, 4, False)}
        rig.drain()

    def test_preempting_the_holder_frees_those_who_wait(self):
        rig = self.rig(chunk_tokens=2, capacity_blocks=8)
        rig.add("decodes", prompt_of(4, first=3), max_tokens=20, ignore_eos=True)
        rig.add("holder", prompt_of(24))
        rig.add("held", [*prompt_of(16), 4])
        rig.step()
        rig.step()
        rig.step()
        assert "holder" in last(rig)
        assert rig.core._scheduler.waiting["held"].held_for is not None
        while not rig.core.stats().preemptions:
            rig.step()
        assert not rig.core._scheduler._in_flight.blocks
        rig.drain()


def test_a_held_request_costs_one_look_up_a_step():
    rig = Rig(chunk_tokens=4)
    rig.add("holder", [*prompt_of(40), 3])
    rig.add("held", [*prompt_of(40), 4])
    rig.step()
    sequence = rig.core._scheduler.waiting["held"]
    sequence.hashes = hashes = Counting(sequence.hashes)
    for _ in range(5):
        rig.step()
    assert rig.core.load().waiting == 1
    assert hashes.looks == 0
