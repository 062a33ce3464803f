"""The measured time between starts of waiting requests."""

from cluster.start_rate import MEMORY_STARTS, StartRate


def observe(rate, now, started, waiting, idle=False):
    rate.observe(now, started, waiting=waiting, idle=idle)


def test_nothing_is_measured_while_no_request_has_to_wait():
    rate = StartRate()
    for second in range(10):
        observe(rate, float(second), 3, False)
    assert rate.interval_s(100.0) == 0.0


def test_it_is_the_time_from_start_to_start_while_others_wait():
    rate = StartRate()
    observe(rate, 9.0, 1, False)
    observe(rate, 10.0, 0, True)  # it began to wait after 9
    for second in (11.0, 13.0, 15.0):
        observe(rate, second, 1, True)
    assert rate.interval_s(15.0) == 2.0


def test_several_starts_at_once_share_the_time():
    rate = StartRate()
    observe(rate, 0.0, 0, True)
    observe(rate, 8.0, 4, True)
    assert rate.interval_s(8.0) == 2.0


def test_time_without_waiting_requests_does_not_count():
    rate = StartRate()
    observe(rate, 0.0, 0, True)
    observe(rate, 1.0, 1, False)
    observe(rate, 50.0, 0, False)
    observe(rate, 100.0, 1, True, idle=True)
    observe(rate, 103.0, 1, False)
    assert rate.interval_s(500.0) == 2.0


def test_a_present_interval_counts_before_it_ends_if_it_is_longer():
    rate = StartRate()
    observe(rate, 0.0, 0, True)
    assert rate.interval_s(3.0) == 3.0
    observe(rate, 4.0, 1, True)
    assert rate.interval_s(5.0) == 4.0
    assert rate.interval_s(16.0) == 8.0


def test_how_often_it_is_told_of_the_same_wait_changes_nothing():
    often, seldom = StartRate(), StartRate()
    for rate, moments in ((often, (1.0, 2.0, 3.0, 4.0)), (seldom, (4.0,))):
        observe(rate, 0.5, 0, False)
        for moment in moments:
            observe(rate, moment, 0, True)
        observe(rate, 5.0, 1, True)
    assert often.interval_s(6.0) == seldom.interval_s(6.0) == 4.5


def test_old_starts_are_forgotten():
    rate = StartRate()
    observe(rate, 0.0, 0, True)
    now = 0.0
    for interval in [10.0] * MEMORY_STARTS + [1.0] * 40 * MEMORY_STARTS:
        now += interval
        observe(rate, now, 1, True)
    assert rate.interval_s(now) == 1.0
