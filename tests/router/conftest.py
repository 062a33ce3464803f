"""What tests of the router share."""

import pytest

from router.fleet import Fleet
from tests.router.asking import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fleet(clock):
    fleet = Fleet(clock=clock)
    yield fleet
    fleet.check()
