"""Bodies in frames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.blocks import pack_tokens
from cluster.frames import FrameReader, error_frame, frame

lines = st.lists(
    st.binary(max_size=12).map(lambda raw: b"data: " + raw.replace(b"\n", b"")), max_size=3
)
bodies = lines.map(lambda each: b"".join(line + b"\n\n" for line in each))
ids = st.lists(st.integers(0, 2**32 - 1), max_size=3).map(pack_tokens)


@given(st.lists(st.tuples(bodies, ids), max_size=6), st.data())
def test_only_whole_frames_are_passed_on_however_the_body_arrives(frames, data):
    sent = [frame(body, packed, last=False) for body, packed in frames]
    whole = b"".join(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    end = cuts[-1] if cuts else 0
    reader, got = FrameReader(), b""
    for start, stop in zip([0, *cuts], cuts, strict=False):
        got += reader.feed(whole[start:stop])
    done = 0
    while done < len(sent) and sum(map(len, sent[: done + 1])) <= end:
        done += 1
    assert got == b"".join(body for body, _ in frames[:done])
    assert reader.ids == b"".join(packed for _, packed in frames[:done])
    assert not reader.last


def test_the_last_frame_and_an_error_are_told_apart():
    reader = FrameReader()
    assert reader.feed(frame(b"", pack_tokens([5]))) == b""
    assert reader.feed(frame(b'{"a":1}\n', pack_tokens([6]), last=True)) == b'{"a":1}\n'
    assert (reader.last, reader.error, reader.ids) == (True, b"", pack_tokens([5, 6]))
    reader = FrameReader()
    assert reader.feed(frame(b"data: 1\n\n", pack_tokens([5])) + error_frame(b"{}")) == (
        b"data: 1\n\n"
    )
    assert (reader.last, reader.error, reader.ids) == (False, b"{}", pack_tokens([5]))


def test_a_frame_whose_mark_cannot_be_read_is_not_passed_on():
    reader = FrameReader()
    told = frame(b"data: 1\n\n", pack_tokens([5])) + b"data: 2\n\n:no\n"
    assert reader.feed(told + frame(b"data: 3\n\n", pack_tokens([7]))) == b"data: 1\n\n"
    assert (reader.ids, reader.last) == (pack_tokens([5]), False)
    assert reader.error == b"the mark of a frame is not hexadecimal"
