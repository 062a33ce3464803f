"""Where a request goes: pure functions over arrays.

The gateway and the simulator call the same objects. A policy receives its candidates as arrays
with one entry per worker, its state and a random number generator. It returns the chosen entry and
the cost of every entry, so that each decision can be explained. The least cost wins.

    base.py       candidates, decisions, the tie rule, which workers have room
    spreading.py  policies that use load alone
    affinity.py   policies that use the prefix alone, or first
    peers.py      the scores of other routers
    scores.py     LMetric's score and its relatives, in tokens and in seconds
    hotspot.py    the guard against a prefix that draws all traffic to its holders
    registry.py   policies by name, with parameters
"""

from router.policies.base import (
    LEFT_OUT,
    Candidates,
    Columns,
    Decision,
    Policy,
    PolicyError,
    least,
    only_with_room,
    with_room,
)
from router.policies.registry import available, parse_policy

__all__ = [
    "LEFT_OUT",
    "Candidates",
    "Columns",
    "Decision",
    "Policy",
    "PolicyError",
    "available",
    "least",
    "only_with_room",
    "parse_policy",
    "with_room",
]
