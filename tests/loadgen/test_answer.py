import msgspec
import pytest

from loadgen.answer import Answer, error_message
from loadgen.outcomes import Outcome
from tests.loadgen.fake_gateway import chunk

USAGE = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}


def read(*events, end_s=9.0):
    """The outcome of `(seconds, chunk)` events."""
    blank = Outcome(arm="x", id="a", session="s", turn=0, group="g", intended_s=1.0)
    answer = Answer(blank)
    for now_s, data in events:
        answer.take(data.removeprefix(b"data: ").strip(), now_s)
    answer.end(end_s)
    return blank


def test_the_first_token_is_the_first_text_not_the_first_event():
    outcome = read(
        (2.0, chunk("", 0, **USAGE)), (3.5, chunk("late", 1, **USAGE)), (4.0, b"[DONE]"), end_s=4.0
    )
    assert outcome.first_token_s == 3.5
    assert outcome.ttft_ms == pytest.approx(2500)
    assert outcome.itl_ms == []


def test_a_gap_is_divided_among_the_tokens_of_its_chunk():
    outcome = read(
        (2.0, chunk("a", 1, **USAGE)),
        (2.6, chunk("b c d", 4, **USAGE)),
        (2.7, chunk("e", 5, finish="stop", **USAGE)),
        (2.8, b"[DONE]"),
        end_s=2.8,
    )
    assert outcome.itl_ms == pytest.approx([200, 200, 200, 100])
    assert outcome.completion_tokens == 5
    assert outcome.tpot_ms == pytest.approx(800 / 4)


def test_tokens_that_make_no_text_yet_count_with_their_time():
    outcome = read(
        (2.0, chunk("a", 1)), (2.1, chunk("", 2)), (2.3, chunk("é", 3)), (2.4, b"[DONE]")
    )
    assert outcome.itl_ms == pytest.approx([100, 200])


def test_without_running_usage_each_chunk_is_one_token_and_the_sum_comes_last():
    total = msgspec.json.encode({"choices": [], "usage": {"completion_tokens": 9, **USAGE}})
    outcome = read(
        (2.0, chunk("a")), (2.1, chunk("b")), (2.2, chunk("c")), (5.0, total), (5.0, b"[DONE]")
    )
    assert outcome.itl_ms == pytest.approx([100, 100])
    assert (outcome.completion_tokens, outcome.prompt_tokens) == (9, 10)


def test_an_answer_without_text_has_its_first_token_at_its_end():
    outcome = read((2.0, chunk("", 1, finish="stop")), (2.0, b"[DONE]"), end_s=2.5)
    assert outcome.status == "ok"
    assert outcome.first_token_s == 2.5


def test_completions_carry_their_text_in_another_place():
    piece = msgspec.json.encode({"choices": [{"text": "once", "finish_reason": "length"}]})
    outcome = read((2.0, piece), (2.1, b"[DONE]"))
    assert (outcome.text, outcome.finish_reason) == ("once", "length")


def test_an_error_after_text_is_a_failure_even_with_its_end():
    error = msgspec.json.encode({"error": {"message": "the engine died"}})
    outcome = read((2.0, chunk("a", 1)), (2.1, error), (2.2, b"[DONE]"))
    assert (outcome.status, outcome.error, outcome.text) == ("failed", "the engine died", "a")


def test_without_its_end_it_is_unfinished():
    assert read((2.0, chunk("a", 1, finish="stop"))).status == "unfinished"


@pytest.mark.parametrize(
    ("body", "message"),
    [(b'{"error": {"message": "full"}}', "full"), (b"<html>", ""), (b"{}", "")],
)
def test_the_message_of_an_error_object(body, message):
    assert error_message(body) == message
