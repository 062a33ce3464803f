"""What tests of the router share."""

import asyncio

import pytest

from router.fleet import Fleet
from router.http_connection import ClientConnection
from tests.router.asking import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fleet(clock):
    fleet = Fleet(clock=clock)
    yield fleet
    fleet.check()


@pytest.fixture
async def held_back(monkeypatch):
    """Set once an answer is held back because its client does not read."""
    happened = asyncio.Event()
    pause = ClientConnection.pause_writing

    def noting(connection):
        pause(connection)
        happened.set()

    monkeypatch.setattr(ClientConnection, "pause_writing", noting)
    return happened
