"""Where a request goes: pure functions over arrays.

The gateway and the simulator call the same objects. A policy sees its candidates as arrays
with one entry a worker, gets its state and its random numbers passed in, and answers with the
chosen entry and the cost of every entry, so that each decision can be explained. The least
cost wins.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


class Candidates(NamedTuple):
    """The workers that may serve a request. Arrays are `[n]`, n at least 1, in one order.

    slots            a number for each worker, the same from request to request
    hit_tokens       prompt tokens that the worker is expected not to compute
    pending_tokens   prompt tokens that it still has to compute for others
    running          requests admitted
    waiting          requests not yet admitted, those on their way to it included
    batch            running + waiting
    free_blocks      KV blocks that no sequence references
    capacity_blocks  KV blocks in all
    prompt_tokens    tokens of this request's prompt
    block_size       tokens in a block
    """

    slots: IntArray
    hit_tokens: IntArray
    pending_tokens: IntArray
    running: IntArray
    waiting: IntArray
    batch: IntArray
    free_blocks: IntArray
    capacity_blocks: IntArray
    prompt_tokens: int
    block_size: int

    @property
    def new_tokens(self) -> IntArray:
        """Prompt tokens that each worker would have to compute: at least 1."""
        new: IntArray = np.maximum(1, self.prompt_tokens - self.hit_tokens)
        return new


class Decision(NamedTuple):
    """What a policy chose.

    chosen  entry of the candidates
    costs   `[n]`, what each entry was judged by; the least wins, near-ties by the tie rule
    """

    chosen: int
    costs: FloatArray


class PolicyError(ValueError):
    """A policy that cannot be had. Its text says which there are."""


class Policy(NamedTuple):
    """A policy with its parameters, ready to be asked.

    name     as in `parse_policy`, with the parameters that were given
    state    what it remembers between requests; None where it remembers nothing
    """

    name: str
    function: Callable[[Candidates, Any, Any, random.Random], Decision]
    parameters: msgspec.Struct
    state: Any

    def choose(self, candidates: Candidates, rng: random.Random) -> Decision:
        """Choose one of `candidates`. Raises ValueError where there is none."""
        if not len(candidates.slots):
            raise ValueError("a policy needs at least one candidate")
        return self.function(candidates, self.parameters, self.state, rng)


def least(costs: FloatArray, candidates: Candidates, tie: float, rng: random.Random) -> int:
    """The entry of least cost, by the tie rule.

    Entries within the share `tie` of the least cost are as good; of those the smallest batch
    wins, then the fewest pending tokens, then chance: never "the first", which would be the
    same worker each time.
    """
    near = np.flatnonzero(costs <= costs.min() * (1.0 + tie))
    for load in (candidates.batch, candidates.pending_tokens):
        if len(near) == 1:
            break
        loads = load[near]
        near = near[loads == loads.min()]
    return int(near[0] if len(near) == 1 else near[rng.randrange(len(near))])


class NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a policy that has nothing to set."""


class RoundRobinState(msgspec.Struct):
    """last   slot that served the latest request"""

    last: int = -1


def round_robin(
    candidates: Candidates, parameters: NoParameters, state: RoundRobinState, rng: random.Random
) -> Decision:
    """Every worker in turn, whatever it holds. Cost: its place in the turn, 0 is next.

    The turn goes by slot number, so it stays fair when workers come, go or are left out.
    """
    slots = candidates.slots
    ahead = slots - state.last
    after = np.where(ahead > 0, ahead - 1, ahead + max(state.last, int(slots.max())))
    costs: FloatArray = after.astype(np.float64)
    index = int(costs.argmin())
    state.last = int(slots[index])
    return Decision(index, costs)


def least_requests(
    candidates: Candidates, parameters: NoParameters, state: None, rng: random.Random
) -> Decision:
    """The worker with the fewest requests. Cost: its batch; ties by pending tokens, chance."""
    costs = candidates.batch.astype(np.float64)
    return Decision(least(costs, candidates, 0.0, rng), costs)


class LocalityParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """tie   costs that differ by no more than this share of the least are equal"""

    tie: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.01


def locality(
    candidates: Candidates, parameters: LocalityParameters, state: None, rng: random.Random
) -> Decision:
    """Expected hit minus pending prefill tokens, times batch size: the mission's score.

    With the sign turned, so that the least wins: `(pending + new) × (batch + 1)`, where
    `new = max(1, prompt − hit)`. Source: LMetric, arXiv 2603.15202.
    """
    work = candidates.pending_tokens + candidates.new_tokens
    costs = (work * (candidates.batch + 1)).astype(np.float64)
    return Decision(least(costs, candidates, parameters.tie, rng), costs)


class _Entry(NamedTuple):
    function: Callable[[Candidates, Any, Any, random.Random], Decision]
    parameters: type[msgspec.Struct]
    new_state: Callable[[], Any]


def _no_state() -> None:
    return None


_REGISTRY: dict[str, _Entry] = {
    "round_robin": _Entry(round_robin, NoParameters, RoundRobinState),
    "least_requests": _Entry(least_requests, NoParameters, _no_state),
    "locality": _Entry(locality, LocalityParameters, _no_state),
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
        raise PolicyError(f"there is no policy {name!r}; there are {', '.join(available())}")
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
