"""Policies by name: `locality`, `dynamo:overlap_weight=1.0,temperature=0.5`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from router.policies import affinity, peers, scores, spreading
from router.policies.base import Function, NoParameters, Policy, PolicyError
from router.policies.hotspot import HotspotState


class _Entry(NamedTuple):
    function: Function
    parameters: type[msgspec.Struct] = NoParameters
    new_state: Callable[[], Any] = lambda: None


_REGISTRY: dict[str, _Entry] = {
    "round_robin": _Entry(spreading.round_robin, new_state=spreading.RoundRobinState),
    "random": _Entry(spreading.random_choice),
    "least_requests": _Entry(spreading.least_requests),
    "power_of_two": _Entry(spreading.power_of_two),
    "least_tokens": _Entry(spreading.least_tokens),
    "prefix_only": _Entry(affinity.prefix_only),
    "consistent_hash": _Entry(affinity.consistent_hash, affinity.ConsistentHashParameters),
    "sglang": _Entry(peers.sglang, peers.SglangParameters),
    "dynamo": _Entry(peers.dynamo, peers.DynamoParameters),
    "llmd": _Entry(peers.llmd, peers.LlmdParameters),
    "aibrix": _Entry(peers.aibrix, peers.AibrixParameters),
    "vllm": _Entry(spreading.vllm),
    "additive": _Entry(scores.additive),
    "ttft": _Entry(scores.ttft, scores.TieParameters),
    "locality": _Entry(scores.locality, scores.LocalityParameters, HotspotState),
    "marginal": _Entry(scores.marginal),
}


def available() -> list[str]:
    """Names of all policies."""
    return list(_REGISTRY)


def parse_policy(text: str) -> Policy:
    """Make a policy, with fresh state, of `name` or `name:parameter=value,parameter=value`.

    Raises PolicyError for an unknown name, an unknown parameter or an unusable value.
    """
    name, _, rest = text.strip().partition(":")
    entry = _REGISTRY.get(name)
    if entry is None:
        raise PolicyError(f"there is no policy {name!r}: use one of {', '.join(available())}")
    values: dict[str, str] = {}
    for part in rest.split(",") if rest else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise PolicyError(f"policy {text!r}: {part!r} is not of the form parameter=value")
        if key in values:
            raise PolicyError(f"policy {text!r}: parameter {key!r} is given twice")
        values[key] = value
    known = entry.parameters.__struct_fields__
    for key in values:
        if key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise PolicyError(f"policy {name!r} has no parameter {key!r}; {has}")
    try:
        parameters = msgspec.convert(values, entry.parameters, strict=False)
    except msgspec.ValidationError as error:
        raise PolicyError(f"policy {text!r}: {error}") from error
    given = ",".join(f"{key}={value}" for key, value in values.items())
    return Policy(
        f"{name}:{given}" if given else name, entry.function, parameters, entry.new_state()
    )
