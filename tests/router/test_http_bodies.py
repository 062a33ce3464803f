"""Bodies come out of their framing, however the bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http_bodies import MAX_LINE_BYTES, ChunkedBody, MalformedBody, SizedBody


def chunked(chunks, trailers=b"", extension=b""):
    body = b"".join(b"%x%s\r\n%s\r\n" % (len(c), extension, c) for c in chunks)
    return body + b"0\r\n" + trailers + b"\r\n"


def cut(data, places):
    places = sorted({place % (len(data) + 1) for place in places})
    starts, ends = [0, *places], [*places, len(data)]
    return [data[a:b] for a, b in zip(starts, ends, strict=True)]


@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    places=st.lists(st.integers(0, 400), max_size=12),
    trailers=st.sampled_from([b"", b"X-A: 1\r\n", b"X-A: 1\r\nX-B: 2\r\n"]),
    extension=st.sampled_from([b"", b";a=b", b" "]),
)
def test_chunks_give_their_content_however_they_are_cut(chunks, places, trailers, extension):
    body = ChunkedBody()
    data = chunked(chunks, trailers, extension)
    pieces = []
    for piece in cut(data, places):
        assert not body.ended or not piece
        pieces.append(body.feed(piece))
    assert b"".join(pieces) == b"".join(chunks)
    assert body.ended


def test_content_comes_out_before_its_chunk_is_whole():
    body = ChunkedBody()
    assert body.feed(b"5\r\nab") == b"ab"
    assert body.feed(b"cde\r") == b"cde"
    assert body.feed(b"\n0\r\n") == b""
    assert not body.ended
    assert body.feed(b"\r\n") == b""
    assert body.ended


def feed_bytewise(data):
    body = ChunkedBody()
    for number in range(len(data)):
        body.feed(data[number : number + 1])


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\n",
        b"\r\n",
        b"-1\r\n",
        b"2\r\nabc\r\n",
        b"2\r\nab\rc",
        b"2\r\nabcd",
        b"1" * (MAX_LINE_BYTES + 1),
    ],
)
def test_what_is_no_chunk_is_refused(data):
    with pytest.raises(MalformedBody):
        ChunkedBody().feed(data)
    with pytest.raises(MalformedBody):
        feed_bytewise(data)


def test_a_sized_body_ends_after_its_length_and_an_open_one_never():
    sized, empty, open_ended = SizedBody(3), SizedBody(0), SizedBody(None)
    assert empty.ended
    assert (sized.feed(b"ab"), sized.ended) == (b"ab", False)
    assert (sized.feed(b"cd"), sized.ended) == (b"c", True)
    assert (open_ended.feed(b"ab"), open_ended.ended) == (b"ab", False)
    assert open_ended.until_closed
    assert not sized.until_closed
