"""The engines' own faults: a token that no model has, and new weights while requests run."""

from __future__ import annotations

import asyncio

import httpx

from tests.chaos.driving import Result, drive, fault
from tests.chaos.load import asks
from tests.chaos.processes import PartFailed
from tests.chaos.rig import EXTRA_TOKEN, MODEL, Needs, Rig

BEYOND: tuple[str | list[int], ...] = (
    f"Say {EXTRA_TOKEN} again",
    [5, 6, 259],  # the same token: the tokenizer knows it, the embedding has no row for it
    [5, 6, 10_000_000],
    [5, 6, 2**31 - 1],
)
"""Prompts with a token that the tiny model's embedding has no row for."""
RELOAD_TIMEOUT_S = 240.0
LONG_TOKENS = (900, 1300)
HEALTH_CHECK_PERIOD_S = 0.5
"""Streams of a tiny model end within seconds: health checks come as quickly, so that several of
them meet a replica that drains before it loads other weights."""


@fault(
    "token-beyond",
    "a prompt's token id beyond the model's embedding",
    Needs(serve=False, workers=2, engine="tiny", extra_token=True),
)
async def token_beyond(rig: Rig, seconds: float) -> Result:
    """It is refused with 400, and nobody else notices."""
    statuses: list[int] = []

    async def strike() -> None:
        async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
            for prompt in BEYOND:
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
                answer = await http.post(rig.urls[0] + "/v1/completions", json=body)
                statuses.append(answer.status_code)

    result = await drive(rig, seconds, strike)
    result.notes.append(f"the statuses are {statuses}")
    result.expect(statuses == [400] * len(BEYOND), f"statuses {statuses} instead of 400")
    return result


@fault(
    "reload",
    "new weights under load",
    Needs(workers=2, engine="tiny", health_check_period_s=HEALTH_CHECK_PERIOD_S),
)
async def reload(rig: Rig, seconds: float) -> Result:
    """All requests finish, with the old weights or the new ones; afterwards all are new."""
    told, told_after, new = "", list[str](), 0
    long = asks(MODEL, 12, LONG_TOKENS, first=2000)

    async def strike() -> None:
        nonlocal told
        body = {"model": str(rig.models[1]), "worker": ""}
        async with httpx.AsyncClient(timeout=RELOAD_TIMEOUT_S, trust_env=False) as http:
            answer = await http.post(rig.urls[0] + "/admin/weights", json=body)
        told = f"{answer.status_code}"
        if answer.status_code != 200:
            told += f" {answer.text[:200]}"

    async def after() -> None:
        nonlocal new
        try:
            await rig.learn(long)
        except PartFailed as error:
            told_after.append(str(error))
        new = sum(len(rig.references[ask.number]) > 1 for ask in long)

    result = await drive(rig, seconds, strike, chosen=long, rate=rig.rate / 2, after=after)
    result.notes += [f"reload answered {told}", f"{new} of {len(long)} answers are of new weights"]
    result.notes += told_after
    result.expect(told.startswith("200"), "reload failed")
    result.expect(new == len(long), f"only {new} of {len(long)} answers are of the new weights")
    await asyncio.to_thread(_reload_back, rig)
    return result


def _reload_back(rig: Rig) -> None:
    """The next fault on this rig finds the weights that it has learned answers of."""
    body = {"model": str(rig.models[0]), "worker": ""}
    httpx.post(rig.urls[0] + "/admin/weights", json=body, timeout=RELOAD_TIMEOUT_S, trust_env=False)
