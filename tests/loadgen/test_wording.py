import math

import pytest

from loadgen.arrivals import Arrivals
from loadgen.ideal import Ideal
from loadgen.measures import Slo, measure
from loadgen.wording import arrivals_text, hits, slo_text
from tests.loadgen.test_measures import outcome

RAMP = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 5}


@pytest.mark.parametrize(
    ("arrivals", "text"),
    [
        (None, "as in the file"),
        (Arrivals(request_rate=2), "Poisson, 2 a second"),
        (Arrivals(request_rate=2, burstiness=0.5), "gamma, burstiness 0.5, 2 a second"),
        (Arrivals(burstiness=math.inf), "constant gaps, 2 a second"),
        (Arrivals(request_rate=math.inf), "all at once"),
        (Arrivals(**RAMP), "Poisson, linear ramp from 1 to 5 a second"),
    ],
)
def test_arrivals_are_said_in_words(arrivals, text):
    assert arrivals_text(arrivals) == text


def test_hits_stand_beside_the_ideal():
    arm = measure([outcome()], Slo())
    assert hits(arm, Ideal(0.713, 10)) == "40.0 / 71.3 %"
    assert hits(arm, None) == "40.0 %"


def test_bounds_are_said_in_words():
    assert slo_text(Slo(ttft_ms=2000, tpot_ms=100)) == "TTFT 2,000 ms, TPOT 100 ms"
    assert slo_text(Slo()) == ""
