import msgspec
import pytest

from loadgen.requests import (
    Request,
    RequestFileError,
    decode_requests,
    digest,
    encode_requests,
    prompt_text,
    read_request_file,
)

BODY = b'{"stream":  true, "messages":[{"role":"user","content":"hi"}]}'


def line(**changes):
    fields = {"id": "a", "intended_at_s": 0.0, "session": "s", "turn": 0, "group": "g"}
    return Request(**{**fields, "body": msgspec.Raw(BODY), **changes})


def test_bodies_come_back_byte_for_byte():
    data = encode_requests([line(), line(id="b", turn=1, intended_at_s=0.25)])
    requests = decode_requests(data)
    assert [bytes(r.body) for r in requests] == [BODY, BODY]
    assert encode_requests(requests) == data


def test_a_file_is_read_with_its_digest(tmp_path):
    data = encode_requests([line()])
    (tmp_path / "f").write_bytes(data)
    requests, sha256 = read_request_file(tmp_path / "f")
    assert [r.id for r in requests] == ["a"]
    assert sha256 == digest(data)


@pytest.mark.parametrize(
    ("requests", "what"),
    [
        ([], "no requests"),
        ([line(), line(turn=1)], "line 2: id 'a' occurs twice"),
        (
            [line(intended_at_s=2.0), line(id="b", turn=1, intended_at_s=1.0)],
            "before the line above",
        ),
        ([line(turn=1), line(id="b", turn=1)], "turn 1 of session 's'"),
        ([line(body=msgspec.Raw(b'{"messages":[]}'))], 'line 1: the body must set "stream": true'),
    ],
)
def test_what_cannot_be_replayed_is_named(requests, what):
    with pytest.raises(RequestFileError, match=what):
        decode_requests(encode_requests(requests))


def test_a_line_that_is_no_request_is_named():
    with pytest.raises(RequestFileError, match="line 2 is not a request"):
        decode_requests(encode_requests([line()]) + b"{}\n")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RequestFileError, match="nowhere"):
        read_request_file(tmp_path / "nowhere")


def test_the_text_of_a_longer_conversation_extends_the_shorter_one():
    def chat(*contents):
        messages = [{"role": "user", "content": c} for c in contents]
        body = msgspec.json.encode({"stream": True, "messages": messages})
        return prompt_text(line(body=msgspec.Raw(body)))

    assert chat("hello", "you").startswith(chat("hello"))
    assert chat("hello there").startswith(chat("hello"))
    assert not chat("other", "you").startswith(chat("hello"))
