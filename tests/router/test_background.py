"""Long work of one request runs in threads, so that the event loop goes on."""

import asyncio
import threading

import pytest

import router.gateway
from router.background import HUGE, Background
from router.chat_template import ChatTemplate
from router.gateway import PARSED_AT_ONCE
from router.tokenization import AT_ONCE_BYTES
from tests.router.support import Rig

LOOP = threading.current_thread().name


def thread(name: str) -> str:
    """A thread's name without its number within its pool."""
    return name.rpartition("_")[0] or name


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, LOOP), (9, LOOP), (10, "long work"), (HUGE, "long work"), (HUGE + 1, "huge work")],
)
async def test_work_runs_at_once_or_in_threads_by_its_size(size, expected):
    background = Background()
    try:
        name = await background.run(size, 9, lambda: threading.current_thread().name)
        assert thread(name) == expected
    finally:
        background.close()


async def test_huge_work_leaves_a_thread_for_smaller_work():
    background = Background()
    started, go_on = threading.Event(), threading.Event()

    def huge() -> bool:
        started.set()
        return go_on.wait(30)

    pending = [asyncio.create_task(background.run(HUGE + 1, 0, huge)) for _ in range(3)]
    try:
        await background.run(1, 0, lambda: started.wait(30))
        assert await background.run(2, 0, lambda: "small") == "small"
        assert not any(each.done() for each in pending)
    finally:
        go_on.set()
        await asyncio.gather(*pending)
        background.close()


@pytest.mark.parametrize(
    ("size", "parsed", "rendered"),
    [
        (100, LOOP, LOOP),
        (AT_ONCE_BYTES + 1, LOOP, "long work"),
        (PARSED_AT_ONCE + 1, "long work", "long work"),
        (HUGE + 1, "huge work", "huge work"),
    ],
)
async def test_large_bodies_are_parsed_and_rendered_off_the_loop(
    monkeypatch, size, parsed, rendered
):
    seen = {}
    parse, render = router.gateway.parse_chat, ChatTemplate.render

    def parsing(*arguments):
        seen["parsed"] = thread(threading.current_thread().name)
        return parse(*arguments)

    def rendering(*arguments):
        seen["rendered"] = thread(threading.current_thread().name)
        return render(*arguments)

    monkeypatch.setattr(router.gateway, "parse_chat", parsing)
    monkeypatch.setattr(ChatTemplate, "render", rendering)
    async with Rig() as rig:
        await rig.complete()  # the tokenizer is fetched
        messages = [{"role": "user", "content": "x" * size}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 1}
        status, _, answer = await rig.post("/v1/chat/completions", body)
        if size == 100:
            assert status == 200
        else:
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert seen == {"parsed": parsed, "rendered": rendered}
