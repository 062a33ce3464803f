"""A dispatcher over workers whose load a test says, and a prompt to place, without any HTTP."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from cluster.blocks import pack_tokens
from cluster.protocol import Load
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.metrics import Metrics
from router.policies import Policy, parse_policy
from router.recent_decisions import RecentDecisions
from router.tokenization import Prompt
from tests.router.support import NAMESPACE, FakeStatus, card, chain_of, report


def prompt_of(tokens: int) -> Prompt:
    """The tokens 0, 1, …"""
    return Prompt(pack_tokens(range(tokens)), chain_of(range(tokens)), NAMESPACE)


def dispatcher_of(
    batches: Sequence[int],
    policy: str | Policy = "locality",
    stored: Mapping[int, list[bytes]] | None = None,
    *,
    recent: RecentDecisions | None = None,
    holds_back: bool = False,
    **load,
) -> Dispatcher:
    """Workers w000, w001, … run these batches; those in `stored` hold these blocks."""
    fleet = Fleet(clock=lambda: 7.0)
    for number, batch in enumerate(batches):
        name = f"w{number:03d}"
        held = (stored or {}).get(number, [])
        told = Load(running=batch, free_blocks=1000, cached_blocks=len(held), **load)
        fleet.on_card(card(name))
        fleet.on_report(report(name, stored=held, load=told))
    chosen = parse_policy(policy) if isinstance(policy, str) else policy
    return Dispatcher(
        fleet,
        chosen,
        Metrics(fleet, FakeStatus),
        random.Random(3),
        recent=recent,
        holds_back=holds_back,
    )
