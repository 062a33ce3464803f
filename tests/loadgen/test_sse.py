import itertools

from hypothesis import given
from hypothesis import strategies as st

from loadgen.sse import EventParser

STREAM = 'data: {"a": "é"}\n\n: comment\n\ndata:one\r\ndata: two\r\n\r\ndata: [DONE]\n\n'.encode()
EVENTS = ['{"a": "é"}'.encode(), b"one\ntwo", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM))))
def test_events_do_not_depend_on_where_bytes_are_cut(cuts):
    parser = EventParser()
    edges = [0, *sorted(cuts), len(STREAM)]
    found = [
        event
        for start, end in itertools.pairwise(edges)
        for event in parser.feed(STREAM[start:end])
    ]
    assert found == EVENTS
    assert not parser.pending


def test_an_event_without_its_blank_line_is_pending():
    parser = EventParser()
    assert parser.feed(b"data: half") == []
    assert parser.pending
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\n") == [b"half"]
