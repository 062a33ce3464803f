"""Workers whose requests fail: avoided, tried again, never all at once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.failures import FIRST_WAIT_S, LONGEST_WAIT_S, WEIGHT, Failures
from router.fleet import Fleet
from tests.router.asking import CHAIN, PROMPT, Clock, names, slot_of
from tests.router.support import card, report


class Pool:
    """A fleet whose requests end as the test says."""

    def __init__(self, *workers: str) -> None:
        self.clock = Clock()
        self.fleet = Fleet(clock=self.clock)
        for worker in workers:
            self.fleet.on_card(card(worker))
        self.serial = 0

    def begin(self, worker: str):
        self.serial += 1
        slot = slot_of(self.fleet, worker)
        return self.fleet.book(slot, f"r{self.serial}", CHAIN, PROMPT, 0)

    def end(self, booking, outcome: bool | None) -> None:
        """True: it failed. None: nobody knows, because its client left."""
        if outcome is not None:
            self.fleet.trust.note(booking, failed=outcome)
        self.fleet.release(booking)

    def outcomes(self, worker: str, *failed: bool | None) -> None:
        for each in failed:
            self.end(self.begin(worker), each)

    def member(self, worker: str):
        return next(m for m in self.fleet.members() if m.card.worker == worker)

    @property
    def serving(self) -> set[str]:
        return names(self.fleet)


@pytest.fixture
def pool():
    made = Pool("a", "b", "c")
    yield made
    made.fleet.check()


def test_a_worker_is_avoided_after_four_failures_of_five_requests(pool):
    pool.outcomes("a", *[False] * 50, True, True, True)
    assert pool.serving == {"a", "b", "c"}
    pool.outcomes("a", True)
    assert pool.serving == {"b", "c"}
    assert pool.member("a").left_out == "it failed 4 of its last 4 requests"
    pool.outcomes("b", True, True, True, False, True)
    assert pool.serving == {"c"}
    assert pool.member("b").left_out == "it failed 4 of its last 5 requests"


def test_now_and_then_a_failure_is_no_reason(pool):
    pool.outcomes("a", *[True, False] * 20)
    assert pool.serving == {"a", "b", "c"}


def test_after_a_wait_it_gets_one_request_at_a_time_until_one_succeeds(pool):
    pool.outcomes("a", *[True] * 4)
    wait_s = FIRST_WAIT_S
    for _ in range(7):
        assert pool.fleet.trust.next_return_s() == pytest.approx(wait_s)
        pool.clock.now += 0.99 * wait_s
        assert pool.serving == {"b", "c"}
        pool.clock.now += 0.02 * wait_s
        assert pool.serving == {"a", "b", "c"}
        trial = pool.begin("a")
        assert pool.serving == {"b", "c"}
        pool.end(trial, True)
        assert pool.serving == {"b", "c"}
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    pool.clock.now += LONGEST_WAIT_S
    pool.outcomes("a", False)
    assert pool.serving == {"a", "b", "c"}
    pool.outcomes("a", True, True, True)
    assert pool.serving == {"a", "b", "c"}, "it begins anew"


def test_a_trial_whose_client_left_decides_nothing(pool):
    pool.outcomes("a", *[True] * 4)
    pool.clock.now += FIRST_WAIT_S
    pool.outcomes("a", None)
    assert pool.serving == {"a", "b", "c"}
    pool.outcomes("a", True)
    assert pool.fleet.trust.next_return_s() == pytest.approx(2 * FIRST_WAIT_S)


def test_requests_that_began_before_do_not_decide(pool):
    early = [pool.begin("a") for _ in range(4)]
    pool.outcomes("a", *[True] * 4)
    pool.end(early[0], False)
    assert pool.serving == {"b", "c"}
    pool.end(early[1], True)
    assert pool.fleet.trust.next_return_s() == pytest.approx(FIRST_WAIT_S)
    pool.clock.now += FIRST_WAIT_S
    trial = pool.begin("a")
    pool.end(early[2], False)
    assert pool.serving == {"b", "c"}
    pool.end(trial, False)
    assert pool.serving == {"a", "b", "c"}
    pool.end(early[3], True)
    assert pool.serving == {"a", "b", "c"}


def test_where_all_fail_the_least_bad_ones_serve(pool):
    pool.outcomes("a", *[True] * 6)
    pool.outcomes("b", *[True] * 4)
    pool.outcomes("c", *[True] * 4)
    assert pool.serving == {"b", "c"}
    pool.outcomes("b", True)
    assert pool.serving == {"c"}
    pool.outcomes("c", False)
    assert pool.serving == {"c"}
    assert pool.member("c").avoided == ""
    assert pool.member("b").left_out == "it failed 5 of its last 5 requests"


def test_a_worker_alone_always_serves():
    pool = Pool("a")
    pool.outcomes("a", *[True] * 20)
    assert pool.serving == {"a"}
    assert pool.member("a").avoided == "it failed 5 of its last 5 requests"
    pool.fleet.check()


def test_a_worker_that_leaves_or_begins_anew_is_not_avoided(pool):
    pool.outcomes("a", *[True] * 4)
    pool.fleet.on_card(card("a", epoch=2))
    assert pool.serving == {"a", "b", "c"}
    pool.outcomes("b", *[True] * 4)
    pool.fleet.on_gone("b", "it has left")
    pool.fleet.on_card(card("b"))
    assert pool.serving == {"a", "b", "c"}


def test_when_the_wait_is_over_it_is_shown_to_serve_without_any_request(pool):
    pool.outcomes("a", *[True] * 4)
    assert not pool.member("a").serves
    pool.clock.now += FIRST_WAIT_S
    assert pool.member("a").serves
    assert pool.member("a").left_out == ""


def test_a_report_does_not_bring_it_back(pool):
    pool.outcomes("a", *[True] * 4)
    pool.fleet.on_report(report("a"))
    assert pool.serving == {"b", "c"}


def test_a_failure_can_be_forgiven_or_be_proof(pool):
    pool.outcomes("a", *[True] * 4)
    pool.fleet.trust.forgive("a")
    assert pool.serving == {"a", "b", "c"}
    pool.outcomes("a", True)
    assert pool.serving == {"b", "c"}
    pool.fleet.trust.at_fault("b")
    assert pool.serving == {"c"}
    assert pool.member("b").left_out == "it failed the gateway's own request"


def test_what_no_longer_matters_is_forgotten():
    failures = Failures()
    failures.note("a", 1, 1, 0.0, failed=False)
    assert not failures
    failures.note("a", 2, 2, 0.0, failed=True)
    for serial in range(3, 8):
        assert failures
        failures.note("a", serial, serial, 0.0, failed=False)
    assert not failures


WORKERS = ("a", "b")


class ModelWorker:
    """The same of one worker, kept as a plain list of outcomes and a state in words."""

    def __init__(self) -> None:
        self.outcomes: list[bool] = []
        self.state = "serves"
        self.wait_s = self.until = 0.0
        self.decides: set[int] = set()  # serials of requests placed since it is avoided
        self.trial = 0

    @property
    def rate(self) -> float:
        return sum(
            WEIGHT * (1 - WEIGHT) ** age
            for age, failed in enumerate(reversed(self.outcomes))
            if failed
        )

    def avoid(self, wait_s: float, now: float) -> None:
        self.state, self.wait_s, self.until = "avoided", wait_s, now + wait_s
        self.decides, self.trial = set(), 0

    def begin(self, serial: int) -> None:
        if self.state == "avoided":
            self.decides.add(serial)
            self.trial = serial

    def note(self, serial: int, failed: bool, now: float) -> None:
        self.outcomes.append(failed)
        if self.state == "serves":
            if self.rate > 0.5:
                self.avoid(FIRST_WAIT_S, now)
            elif not any(self.outcomes[-5:]):
                self.outcomes.clear()
        elif serial in self.decides:
            if failed:
                self.avoid(min(2 * self.wait_s, LONGEST_WAIT_S), now)
            else:
                self.__init__()

    def end(self, serial: int) -> None:
        if self.trial == serial:
            self.trial = 0

    def avoided(self, now: float) -> bool:
        return self.state == "avoided" and (now < self.until or bool(self.trial))


class FailureMachine(RuleBasedStateMachine):
    """The fleet against the model, over requests that begin and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(*WORKERS)
        self.model = {worker: ModelWorker() for worker in WORKERS}
        self.open: list[tuple[str, object]] = []

    @rule(worker=st.sampled_from(WORKERS))
    def begin(self, worker):
        if worker in self.pool.serving:
            booking = self.pool.begin(worker)
            self.model[worker].begin(booking.serial)
            self.open.append((worker, booking))

    @rule(index=st.integers(0, 99), outcome=st.sampled_from([True, True, False, None]))
    def end(self, index, outcome):
        if not self.open:
            return
        worker, booking = self.open.pop(index % len(self.open))
        model, now = self.model[worker], self.pool.clock.now
        if outcome is not None:
            model.note(booking.serial, outcome, now)
        model.end(booking.serial)
        self.pool.end(booking, outcome)

    @rule(worker=st.sampled_from(WORKERS), count=st.integers(1, 5))
    def fail_often(self, worker, count):
        for _ in range(count):
            if worker in self.pool.serving:
                self.begin(worker)
                self.end(len(self.open) - 1, True)

    @rule(seconds=st.sampled_from([0.3, 1.0, 5.0, 40.0]))
    def wait(self, seconds):
        self.pool.clock.now += seconds

    @rule(worker=st.sampled_from(WORKERS))
    def suspect(self, worker):
        self.pool.fleet.trust.suspect(worker, "test")
        self.pool.fleet.trust.alive(worker)

    @invariant()
    def those_serve_that_the_model_says(self):
        now = self.pool.clock.now
        serving = {worker for worker, model in self.model.items() if not model.avoided(now)}
        if not serving:
            least = min(model.rate for model in self.model.values())
            serving = {w for w, model in self.model.items() if model.rate == pytest.approx(least)}
        found = self.pool.serving
        assert found, "never all at once"
        assert found <= serving
        assert found == serving or all(model.avoided(now) for model in self.model.values())
        self.pool.fleet.check()


FailureMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFailureMachine = FailureMachine.TestCase
