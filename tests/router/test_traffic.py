"""What a router sees of its own requests: how often they come and how long they stay."""

import pytest

from router.traffic import Traffic


def come(traffic, now, count, every_s):
    for _ in range(count):
        traffic.come(now)
        now += every_s
    return now


def test_nothing_is_known_before_the_first_request():
    assert (Traffic().per_s(1e6), Traffic().stay_s(1e6)) == (0, 0)


@pytest.mark.parametrize("every_s", [0.001, 0.1, 2.0])
def test_a_steady_stream_is_told_as_it_is_from_its_first_seconds_on(every_s):
    traffic, now = Traffic(), 50.0
    for _ in range(20):
        now = come(traffic, now, round(10 / every_s), every_s)
        assert traffic.per_s(now) == pytest.approx(1 / every_s, rel=0.02)


def test_a_burst_at_the_beginning_is_no_rate():
    traffic = Traffic()
    come(traffic, 0.0, 40, 1e-6)
    assert traffic.per_s(0.001) == pytest.approx(40 / 5, rel=0.05)  # as if over five seconds


def test_the_rate_follows_the_traffic_and_falls_while_nobody_comes():
    traffic = Traffic()
    now = come(traffic, 0.0, 3000, 0.1)
    now = come(traffic, now, 600, 0.5)  # 300 s at 2 a second
    assert traffic.per_s(now) == pytest.approx(2, rel=0.05)
    rates = [traffic.per_s(now + idle_s) for idle_s in (0, 30, 60, 600)]
    assert rates == sorted(rates, reverse=True)
    assert rates[2] == pytest.approx(2 / 2.718, rel=0.05)
    assert rates[3] < 0.001


def test_littles_law_tells_how_long_a_request_stays():
    traffic = Traffic()
    now = come(traffic, 0.0, 30, 0.1)
    for _ in range(2000):  # ten a second, each for three seconds
        traffic.end()
        now = come(traffic, now, 1, 0.1)
    assert traffic.in_flight == 30
    assert traffic.stay_s(now) == pytest.approx(3, rel=0.02)
    for _ in range(30):
        traffic.end()
    assert traffic.stay_s(now) == 0


@pytest.mark.parametrize("silent_s", [300.0, 3600.0, 43_000.0, 1e6])
def test_in_a_long_silence_no_stay_is_longer_than_all_that_time(silent_s):
    """43,000 s: the rate is so low that a request divided by it is no number any more."""
    traffic = Traffic()
    traffic.come(5.0)
    assert 60 <= traffic.stay_s(5.0 + silent_s) <= silent_s
