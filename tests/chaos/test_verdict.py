"""The measure itself: each way in which an answer can be bad is seen, by a server that does it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
from aiohttp import web

from tests.chaos.load import Ask, Client, Outcome, asks, replay
from tests.chaos.verdict import Reference, Tally, judge

WORDS = ("one ", "two ", "three ", "four")
RIGHT = {0: [Reference("".join(WORDS), len(WORDS), 0.1)]}
SILENCE_S = 0.2
"""That this file's judge allows."""

Write = Callable[[bytes], Awaitable[None]]


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


END = (
    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n'
)


async def well(write: Write) -> None:
    for word in WORDS:
        await write(event(word))
    await write(END % len(WORDS))


async def stops_early(write: Write) -> None:
    await write(event(WORDS[0]))


async def error_event(write: Write) -> None:
    await write(event(WORDS[0]) + b'data: {"error": {"message": "the worker is gone"}}\n\n')
    await write(b"data: [DONE]\n\n")


async def repeats_a_word(write: Write) -> None:
    for word in (*WORDS[:2], *WORDS[1:]):
        await write(event(word))
    await write(END % len(WORDS))


async def leaves_a_word_out(write: Write) -> None:
    for word in WORDS[1:]:
        await write(event(word))
    await write(END % len(WORDS))


async def counts_twice(write: Write) -> None:
    for word in WORDS:
        await write(event(word))
    await write(END % (2 * len(WORDS)))


async def never_ends(write: Write) -> None:
    await write(event(WORDS[0]))
    await asyncio.get_running_loop().create_future()


ask = Ask(0, "completion", {"model": "m", "stream": True}, "x")


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[object], Awaitable[str]]]:
    """Starts a server whose every answer is one stream, or one status; gives its URL."""
    runners: list[web.AppRunner] = []

    async def start(what: object) -> str:
        async def answer(request: web.Request) -> web.StreamResponse:
            await request.read()
            if isinstance(what, int):
                return web.json_response({"error": {"message": "no"}}, status=what)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            assert callable(what)
            await what(response.write)
            return response

        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runners.append(web.AppRunner(app, shutdown_timeout=0.1))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        return site.name

    yield start
    for runner in runners:
        await runner.cleanup()


async def outcome_of(url: str, patience_s: float = 5.0) -> Outcome:
    async with Client([url]) as client:
        chosen = await replay(client, [ask], rate=1e6, seconds=1e-5, patience_s=patience_s)
    return chosen[0]


def counts(tally: Tally) -> dict[str, int]:
    names = ("accepted", "refused", "failed", "broken", "wrong", "hung")
    return {name: getattr(tally, name) for name in names if getattr(tally, name)}


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (well, {"accepted": 1}),
        (stops_early, {"accepted": 1, "broken": 1}),
        (error_event, {"accepted": 1, "broken": 1}),
        (repeats_a_word, {"accepted": 1, "wrong": 1}),
        (leaves_a_word_out, {"accepted": 1, "wrong": 1}),
        (counts_twice, {"accepted": 1, "wrong": 1}),
        (429, {"refused": 1}),
        (500, {"failed": 1}),
        (503, {"failed": 1}),
    ],
)
async def test_every_way_to_be_bad_is_counted(
    serve: Callable[[object], Awaitable[str]], what: object, expected: dict[str, int]
) -> None:
    outcome = await outcome_of(await serve(what))
    assert counts(judge([outcome], RIGHT, allowed_silence_s=60)) == expected


async def test_a_stream_without_an_end_hangs_and_is_broken(
    serve: Callable[[object], Awaitable[str]],
) -> None:
    outcome = await outcome_of(await serve(never_ends), patience_s=2 * SILENCE_S)
    tally = judge([outcome], RIGHT, allowed_silence_s=SILENCE_S)
    assert counts(tally) == {"accepted": 1, "broken": 1, "hung": 1}
    assert tally.silence_s > SILENCE_S
    assert tally.bad_at == outcome.sent_at


async def test_a_gateway_that_does_not_listen_is_passed_over(
    serve: Callable[[object], Awaitable[str]], unused_tcp_port: int
) -> None:
    dead = f"http://127.0.0.1:{unused_tcp_port}"
    async with Client([dead, await serve(well)]) as client:
        assert (await client.send(ask, gateway=0)).finished
    async with Client([dead]) as client:
        outcome = await client.send(ask)
    assert counts(judge([outcome], RIGHT)) == {"failed": 1}


def test_a_broken_stream_must_be_the_beginning_of_the_right_answer() -> None:
    outcome = Outcome(0, stream=True, sent_at=0.0, status=200, text="one three ", error="gone")
    assert counts(judge([outcome], RIGHT)) == {"accepted": 1, "broken": 1, "wrong": 1}


def test_a_whole_answer_may_be_silent_for_as_long_as_it_usually_takes() -> None:
    usual = {0: [Reference("x", 1, elapsed_s=10.0)]}
    slow = Outcome(0, stream=False, sent_at=0.0, status=200, text="x", finished=True)
    slow.completion_tokens, slow.silence_s = 1, 10.0 + SILENCE_S
    assert not judge([slow], usual, allowed_silence_s=2 * SILENCE_S).hung
    assert judge([slow], usual, allowed_silence_s=SILENCE_S / 2).hung


def test_the_same_arguments_give_the_same_requests() -> None:
    assert asks("m", 20, (3, 9)) == asks("m", 20, (3, 9))
    numbers = [each.number for each in asks("m", 20, (3, 9), first=7)]
    assert numbers == list(range(7, 27))


def test_a_serial_changes_the_prompt_and_neither_its_length_nor_its_end() -> None:
    for each in asks("m", 4, (3, 9)):
        first, other = (repr(replace(each, serial=serial).body) for serial in (1, 23456789))
        assert first != other
        assert len(first) == len(other)
        assert first[-20:] == other[-20:]
