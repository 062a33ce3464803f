"""The bytes of all bodies that are not answered yet are bounded."""

import json

import pytest

from tests.router.http_site import CHUNKED_HEAD, GET, Site, answer, closed, post
from tests.router.test_http_connections import LOOPS


async def refused(reader):
    status, headers, body = await answer(reader)
    assert (status, headers["Connection"], headers["Retry-After"]) == (503, "close", "1")
    assert json.loads(body)["error"]["code"] == "too_many_bytes"
    assert await closed(reader)


@LOOPS
def test_a_body_beyond_the_bound_is_refused_until_others_have_ended(run):
    async def crowd():
        async with Site(max_held_body_bytes=1000) as site:
            first = await site.connect()
            first[1].write(post(b"x" * 700, "/wait"))
            await site.began.wait()
            assert site.server.held_bytes == 700
            second = await site.connect()
            second[1].write(post(b"y" * 301))
            await refused(second[0])
            third = await site.connect()
            third[1].write(post(b"z" * 300) + GET)
            assert (await answer(third[0]))[0] == (await answer(third[0]))[0] == 200
            assert site.server.held_bytes == 700
            first[1].transport.abort()
            await site.cancelled.wait()
            third[1].write(post(b"z" * 999))
            assert (await answer(third[0]))[0] == 200

    run(crowd())


@LOOPS
def test_a_body_counts_as_soon_as_its_length_is_known(run):
    async def crowd():
        async with Site(max_held_body_bytes=1000) as site:
            slow, other = await site.connect(), await site.connect()
            slow[1].write(post(b"x" * 900)[:-900])
            while site.server.held_bytes != 900:
                await slow[1].drain()
                other[1].write(GET)
                assert (await answer(other[0]))[0] == 200
            other[1].write(post(b"y" * 101))
            await refused(other[0])
            slow[1].write(b"x" * 900)
            assert (await answer(slow[0]))[0] == 200
            assert not site.server.held_bytes

    run(crowd())


@LOOPS
def test_a_body_in_chunks_counts_as_it_arrives(run):
    async def chunks():
        async with Site(max_held_body_bytes=500) as site:
            reader, writer = await site.connect()
            writer.write(CHUNKED_HEAD + b"\r\n" + b"190\r\n" + b"x" * 400 + b"\r\n")
            writer.write(b"65\r\n" + b"y" * 101 + b"\r\n")
            await refused(reader)
            reader, writer = await site.connect()
            writer.write(CHUNKED_HEAD + b"\r\n" + b"190\r\n" + b"x" * 400 + b"\r\n0\r\n\r\n")
            assert (await answer(reader))[0] == 200

    run(chunks())


@LOOPS
@pytest.mark.parametrize("sent", [0, 1, 899])
def test_a_client_that_leaves_in_its_body_gives_the_bytes_back(run, sent):
    async def leave():
        async with Site(max_held_body_bytes=1000) as site:
            other = await site.connect()
            _, writer = await site.connect()
            whole = post(b"x" * 900)
            writer.write(whole[: len(whole) - 900 + sent])
            while not site.server.held_bytes:
                other[1].write(GET)
                assert (await answer(other[0]))[0] == 200
            writer.transport.abort()
            while site.server.held_bytes:
                other[1].write(GET)
                assert (await answer(other[0]))[0] == 200

    run(leave())


@LOOPS
def test_requests_that_wait_for_their_turn_count_too(run):
    async def pipeline():
        async with Site(max_held_body_bytes=1000) as site:
            _, writer = await site.connect()
            other = await site.connect()
            writer.write(post(b"x" * 300, "/wait") + post(b"y" * 300) + post(b"z" * 300))
            await site.began.wait()
            while site.server.held_bytes != 900:
                other[1].write(GET)
                assert (await answer(other[0]))[0] == 200
            writer.transport.abort()
            await site.cancelled.wait()
            other[1].write(post(b"w" * 1000))
            assert (await answer(other[0]))[0] == 200

    run(pipeline())
