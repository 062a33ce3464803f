"""How long an emulated accelerator takes for a step, and how large its KV pool is."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from worker.models.config import ModelError


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step, linear in what the step does.

    ```
    step_s                                        reading the weights, launching the kernels
    + prefill_token_s * prefill tokens            matrix products of the prompt
    + prefill_pair_s  * (prefill token, token it attends to)    attention: the quadratic part
    + context_token_s * context tokens of all decodes           reading their KV
    ```
    """

    step_s: float
    prefill_token_s: float = 0.0
    prefill_pair_s: float = 0.0
    context_token_s: float = 0.0

    def seconds(self, parts: Iterable[tuple[int, int]]) -> float:
        """Seconds of a step whose sequences compute `count` tokens after `start`: (start, count).

        One token is a decode. A prefill of `count` attends to
        `count * start + count * (count + 1) / 2` pairs.
        """
        total = self.step_s
        for start, count in parts:
            if count == 1:
                total += self.context_token_s * (start + 1)
            else:
                pairs = count * start + count * (count + 1) / 2
                total += self.prefill_token_s * count + self.prefill_pair_s * pairs
        return total


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """An accelerator with a model on it.

    kv_tokens   tokens that its KV pool holds, where the settings do not say
    """

    cost: CostModel
    kv_tokens: int
    context_tokens: int


PROFILES = {
    # Takes the same for every step: for measuring everything around the accelerator.
    "steady-25ms": Profile(
        cost=CostModel(step_s=0.025),
        kv_tokens=524_288,
        context_tokens=8192,
    ),
}


def profile_of(name: str) -> Profile:
    """The profile of that name. Raises ModelError for another, listing those there are."""
    if name not in PROFILES:
        raise ModelError(f"no emulated profile {name!r}; there are {', '.join(PROFILES)}")
    return PROFILES[name]
