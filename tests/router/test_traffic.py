"""What a router sees of its own requests: how often they come and how long they stay."""

from math import exp

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


def plain_rate(arrivals, now):
    """Of all arrivals since the first one, each weighed by its age."""
    known_s = max(5.0, now - arrivals[0])
    weight = sum(exp((at - now) / 60) for at in arrivals)
    return weight / (60 * (1 - exp(-known_s / 60)))


@pytest.mark.parametrize("every_s", [0.5, 7.0, 59.0, 61.0, 90.0, 900.0])
def test_with_traffic_that_never_ceases_all_arrivals_count_however_rare_they_are(every_s):
    traffic = Traffic()
    arrivals = [number * every_s for number in range(100)]
    for at in arrivals:
        traffic.come(at)
        assert traffic.per_s(at + 1.0) == pytest.approx(
            plain_rate([each for each in arrivals if each <= at], at + 1.0), rel=1e-9
        )


def test_a_pause_of_a_minute_is_no_end_of_the_traffic():
    traffic = Traffic()
    busy = [number * 0.1 for number in range(1000)]
    arrivals = [*busy, *(busy[-1] + 59.0 + at for at in busy)]
    for at in arrivals:
        traffic.come(at)
    assert traffic.per_s(at) == pytest.approx(plain_rate(arrivals, at), rel=1e-9)


@pytest.mark.parametrize("idle_s", [61.0, 300.0, 1e5])
@pytest.mark.parametrize("strays", [0, 1, 4])
def test_after_idling_the_rate_is_right_as_soon_as_it_is_at_the_beginning(idle_s, strays):
    """Also where a few requests have come alone meanwhile."""
    fresh, traffic = Traffic(), Traffic()
    now = come(traffic, 0.0, 3000, 0.1) + idle_s
    for _ in range(strays):
        now = come(traffic, now, 1, idle_s)
    come(traffic, now, 4, 0.5)
    come(fresh, 0.0, 4, 0.5)
    for number in range(4, 300):
        traffic.come(now + number * 0.5)
        fresh.come(number * 0.5)
        assert traffic.per_s(now + number * 0.5) == pytest.approx(fresh.per_s(number * 0.5))


def test_after_idling_the_stay_is_not_overestimated():
    traffic = Traffic()
    now = come(traffic, 0.0, 3000, 0.1)
    for _ in range(3000):
        traffic.end()
    now = come(traffic, now + 600, 30, 0.1)
    for _ in range(100):  # ten a second, each for three seconds
        traffic.end()
        now = come(traffic, now, 1, 0.1)
    assert traffic.stay_s(now) == pytest.approx(3, rel=0.05)
