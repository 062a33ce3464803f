"""What the server to clients makes of the bytes of a request, and how it answers."""

import asyncio
import json
import tracemalloc

import pytest

from router.http_messages import Response
from tests.router.http_site import CHUNKED_HEAD, GET, MAX_BODY_BYTES, Site, answer, closed, post


async def test_a_connection_serves_one_request_after_the_other():
    async with Site() as site:
        reader, writer = await site.connect()
        for number in range(3):
            writer.write(post(b"%d" % number, "/echo?a=b", "X-A: 1", "x-a: 2"))
            status, headers, body = await answer(reader)
            assert (status, headers["Content-Type"]) == (200, "application/json")
            assert headers["Date"].endswith("GMT")
            assert "Connection" not in headers
            assert json.loads(body) == {"path": "/echo", "body": str(number), "x": "1, 2"}


async def test_requests_come_in_any_pieces():
    async with Site() as site:
        reader, writer = await site.connect()
        for byte in post(b"body"):
            writer.write(bytes([byte]))
            await writer.drain()
        assert json.loads((await answer(reader))[2])["body"] == "body"


async def test_a_body_may_come_in_chunks_and_with_trailers():
    async with Site() as site:
        reader, writer = await site.connect()
        head = b"POST /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"2;a=b\r\nab\r\n3\r\ncde\r\n0\r\nX-A: late\r\n\r\n" + GET)
        told = json.loads((await answer(reader))[2])
        assert (told["body"], told["x"]) == ("abcde", None)
        assert (await answer(reader))[0] == 200


async def test_a_body_in_many_small_chunks_takes_no_more_memory_than_it_is_long():
    async with Site(max_body_bytes=200_000) as site:
        reader, writer = await site.connect()
        chunks = b"2\r\nab\r\n" * 100_000
        tracemalloc.start()
        try:
            writer.write(CHUNKED_HEAD + b"\r\n" + chunks + b"0\r\n\r\n")
            assert len((await answer(reader))[2]) > 200_000
            assert tracemalloc.get_traced_memory()[1] < 4_000_000  # whoever sends it included
        finally:
            tracemalloc.stop()


async def test_requests_sent_ahead_are_answered_in_their_order():
    async with Site() as site:
        reader, writer = await site.connect()
        stream = post(b"", "/stream")
        writer.write(post(b"a") + stream + post(b"b") + stream)
        bodies = [(await answer(reader))[2] for _ in range(4)]
        assert [b'"a"' in bodies[0], b'"b"' in bodies[2]] == [True, True]
        assert bodies[1] == bodies[3] == b"onetwo"
        writer.write(GET)
        assert (await answer(reader))[0] == 200


async def test_a_stream_to_an_old_client_ends_with_the_connection():
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(b"POST /stream HTTP/1.0\r\n\r\n")
        status, headers, body = await answer(reader)
        assert (status, headers["Connection"], body) == (200, "close", b"onetwo")


async def test_head_is_get_without_a_body():
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(GET.replace(b"GET", b"HEAD") + GET)
        status, headers, _ = await answer(reader, head_only=True)
        assert (status, int(headers["Content-Length"]) > 0) == (200, True)
        assert (await answer(reader))[0] == 200


async def test_a_client_that_asks_first_is_told_to_go_on():
    async with Site() as site:
        reader, writer = await site.connect()
        whole = post(b"body", "/echo", "Expect: 100-continue")
        writer.write(whole[:-4])
        assert (await answer(reader))[0] == 100
        writer.write(whole[-4:])
        assert json.loads((await answer(reader))[2])["body"] == "body"


async def test_offers_to_change_the_protocol_are_declined():
    async with Site() as site:
        reader, writer = await site.connect()
        offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA")
        whole = post(b"a body", "/echo", *offer)
        writer.write(whole[:-3])
        await writer.drain()
        writer.write(whole[-3:] + GET)
        assert json.loads((await answer(reader))[2])["body"] == "a body"
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize("blank", [" ", "\t", "  "])
async def test_a_body_beside_such_an_offer_is_never_taken_for_a_request(blank):
    """Some proxies pass blanks after a length on; the parser lets them through too."""
    async with Site() as site:
        reader, writer = await site.connect()
        length = f"Content-Length: {len(GET)}{blank}"
        lines = ("POST /echo HTTP/1.1", "Connection: upgrade", "Upgrade: x", length, "", "")
        writer.write("\r\n".join(lines).encode() + GET + post(b"next"))
        assert json.loads((await answer(reader))[2])["body"] == GET.decode()
        assert json.loads((await answer(reader))[2])["body"] == "next"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /echo\r\n\r\n", 505),
        (b"\x16\x03\x01 no HTTP at all\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nHost: h\r\n bad\r\nname\x00: x\r\n\r\n", 400),
        (b"POST /echo HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (CHUNKED_HEAD + b"Content-Length: 3\r\n\r\nabc", 400),
        (CHUNKED_HEAD + b"\r\nxyz\r\n", 400),
        (CHUNKED_HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n1\r\na\r\n0\r\n\r\n", 400),
        (b"GET /echo HTTP/1.1\r\nX-A: " + b"a" * 400_000, 431),
        (CHUNKED_HEAD + b"\r\n1;" + b"a" * 400_000, 431),
        (CHUNKED_HEAD.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\n\r\n0\r\n\r\n", 400),
        (b"GET http://[ HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT h:80 HTTP/1.1\r\n\r\n", 400),
        (post(b"x" * (MAX_BODY_BYTES + 1)), 413),
        (post(b"")[:-4].replace(b"Length: 0", b"Length: 99999999999") + b"\r\n\r\n", 413),
        (CHUNKED_HEAD + b"\r\n" + b"1f4\r\n" + b"x" * 500 + b"\r\n1f5\r\n" + b"x" * 501, 413),
    ],
)
async def test_what_cannot_be_read_is_refused_and_ends_the_connection(sent, status):
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(GET + sent)
        assert (await answer(reader))[0] == 200
        got, headers, body = await answer(reader)
        assert (got, headers["Connection"]) == (status, "close")
        message = json.loads(body)["error"]["message"]
        assert message
        assert "callback" not in message  # of the parser: that is no client's concern
        writer.write(b"x" * 100_000)  # it is still coming: nobody minds
        assert await closed(reader)


async def test_a_refused_body_is_read_over_and_the_connection_kept():
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(post(b"body", "/nowhere") + post(b"body", "/broken"))
        assert (await answer(reader))[0] == 404
        status, headers, _ = await answer(reader)
        assert (status, headers["Allow"]) == (405, "GET")
        writer.write(post(b"zip", "/echo", "Content-Encoding: gzip"))
        assert (await answer(reader))[0] == 415
        writer.write(GET)
        assert (await answer(reader))[0] == 200


async def test_a_stream_that_fails_is_not_taken_for_a_whole_one(caplog):
    async with Site() as site:
        reader, writer = await site.connect()
        writer.write(GET.replace(b"/echo", b"/broken"))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await answer(reader)
        assert "bug" in caplog.text


async def test_an_answer_that_cannot_be_sent_ends_its_connection_and_is_logged(caplog):
    async with Site() as site:

        async def odd(request):
            return Response(b"", headers={"X-A": "\ud800"})

        site.answer = odd
        reader, writer = await site.connect()
        writer.write(GET)
        assert await closed(reader)
        assert "failed to send a response" in caplog.text
