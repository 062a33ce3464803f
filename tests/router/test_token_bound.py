"""The fewest tokens of a text are never more than it has."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.token_bound import token_bound
from tests.router.test_encoding import ADDED, KINDS, encoders, texts


def bound_of(tree: dict):
    return token_bound(json.dumps(tree), tree["model"]["vocab"])


def tree_of(kind: str) -> dict:
    return json.loads(encoders(kind)[0].to_str())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(st.one_of(texts, st.sampled_from([*ADDED, " ", "\n", "\x04", "e\u0301", "\u0344"])))
def test_no_text_has_fewer(kind, text):
    library, encoder = encoders(kind)
    bound = encoder._bound
    assert bound is not None
    for whole in (text, text * 20):
        assert bound.fewest_tokens(whole, 0) <= len(library.encode(whole).ids)


def test_the_longest_token_sets_the_bound():
    library, encoder = encoders("GPT-2")
    longest = max(library.get_vocab(), key=len)
    text = longest.replace("Ġ", " ") * 50
    most = encoder._bound.fewest_tokens(text, 0)
    assert most == len(text) // len(longest) == 50
    assert encoder._bound.fewest_tokens(text, 10**6) == 0  # not even counted


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "b"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": None},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "ByteLevel"},
                    {"type": "Split", "behavior": "Removed", "pattern": {"String": " "}},
                ],
            }
        },
        {"added_tokens": [{"content": "<mask>", "lstrip": True}]},
        {"added_tokens": [{"content": "<mask>", "rstrip": True}]},
    ],
)
def test_what_may_swallow_text_sets_no_bound(change):
    tree = tree_of("GPT-2")
    assert bound_of(tree) is not None
    assert bound_of(tree | change) is None


def test_bytes_that_the_vocabulary_lacks_do_not_count():
    tree = tree_of("GPT-2")
    del tree["model"]["vocab"]["Ą"]  # byte 4
    bound = bound_of(tree)
    assert bound.dropped == b"\x04"
    assert bound.fewest_tokens("\x04" * 10_000, 0) == 0
    tree = tree_of("Llama 2")
    del tree["model"]["vocab"]["<0x04>"]
    assert bound_of(tree) is None
