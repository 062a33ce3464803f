"""The fewest tokens of a text are never more than it has."""

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from router.token_bound import BYTE_SYMBOLS, MOST_COMPOSED_BYTES, token_bound
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
        {
            "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            "added_tokens": [{"content": "a b c", "normalized": True}],
        },
    ],
)
def test_what_may_swallow_text_sets_no_bound(change):
    tree = tree_of("GPT-2")
    assert bound_of(tree) is not None
    assert bound_of(tree | change) is None


@pytest.mark.parametrize("affix", ["continuing_subword_prefix", "end_of_word_suffix"])
def test_symbols_that_depend_on_their_place_set_no_bound(affix):
    tree = tree_of("GPT-2")
    tree["model"][affix] = "@"
    assert bound_of(tree) is None


def test_composition_leaves_two_bytes_of_seven():
    decomposed, composed = "\u1fbe\u0308\u0301", "\u0390"
    assert unicodedata.normalize("NFC", decomposed) == composed
    pair = [BYTE_SYMBOLS[byte] for byte in composed.encode()]
    vocabulary = {symbol: number for number, symbol in enumerate([*BYTE_SYMBOLS, "".join(pair)])}
    library = Tokenizer(models.BPE(vocabulary, [tuple(pair)]))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bound = token_bound(library.to_str(), vocabulary)
    assert len(library.encode(decomposed * 100).ids) == 100
    assert bound.fewest_tokens(decomposed * 100, 0) <= 100


def test_no_character_is_composed_of_more_bytes():
    """The most bytes of a text with the canonical decomposition of one character."""
    longest: dict[str, int] = {}  # decomposition -> most bytes of a character that has it
    for code in [*range(0xD800), *range(0xE000, 0x110000)]:
        decomposed = unicodedata.normalize("NFD", chr(code))
        if decomposed != chr(code):
            longest[decomposed] = max(longest.get(decomposed, 0), len(chr(code).encode()))

    def size(part: str) -> int:
        return max(longest.get(part, 0), len(part.encode()) if len(part) == 1 else 0)

    for decomposed in longest:
        most = [0]
        for end in range(1, len(decomposed) + 1):
            most.append(max(most[b] + size(decomposed[b:end]) for b in range(end)))
        composed = unicodedata.normalize("NFC", decomposed)
        assert most[-1] <= MOST_COMPOSED_BYTES * len(composed.encode())


def test_bytes_that_the_vocabulary_lacks_do_not_count():
    tree = tree_of("GPT-2")
    del tree["model"]["vocab"]["Ą"]  # byte 4
    bound = bound_of(tree)
    assert bound.dropped == b"\x04"
    assert bound.fewest_tokens("\x04" * 10_000, 0) == 0
    tree = tree_of("Llama 2")
    del tree["model"]["vocab"]["<0x04>"]
    assert bound_of(tree) is None
