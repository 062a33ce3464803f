"""Tokens of a text word by word are those of the whole text."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from cluster.blocks import pack_tokens, unpack_tokens
from router.words import LEARNED_AT_ONCE, MAX_WORD_CHARACTERS, SPLITS, Words, may_be_cut
from tests.router.test_segments import CORPUS, TEXTS, tokenizer_of

PROSE = [
    *TEXTS,
    " a",
    "b ",
    "  c",
    " \n d",
    "\u00a0 e",
    "\u3000 f",
    "\x1c g",
    "\u200b h",
    "x' s",
    "'s t",
    "1 u",
    "12 345 v",
    ". W",
    "\r\n x",
    "\t y",
    "é z",
    "e\u0301 a",
    " \u0301b",
    " Ｃ",
    " ﬁ",
    "word.",
    "word.Word",
    "word,\u0301 word",
    "word\n",
    "word\nWord",
    ".\nword",
    "\n\nword",
    "x \nword",
    "\r\nword",
    "1\na",
    "\u00a0\na",
    "<|im_start|>user\nword",
    "word<word",
    " word<|im_end|>\n",
    "word  1",
    "e\u0327",
]
texts = st.lists(
    st.one_of(st.sampled_from(PROSE), st.text(max_size=8), st.text(" ab\n.,'1é<", max_size=8)),
    max_size=12,
).map("".join)


def split_by(pattern: str) -> Tokenizer:
    """As in Llama 3's and Qwen's tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", " <pad>"])
    return tokenizer


CUT = {pattern[:12]: split_by(pattern) for pattern in sorted(SPLITS)}


def words_of(tokenizer: Tokenizer) -> Words:
    return Words(tokenizer, json_of(tokenizer))


@cache
def json_of(tokenizer: Tokenizer) -> str:
    return tokenizer.to_str()


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", [*CUT, "smollm2", "byte level", "byte level after NFC"])
@settings(max_examples=100, deadline=None)
@given(text=texts)
def test_a_text_has_the_tokens_of_its_pieces(kind, text):
    tokenizer = CUT[kind] if kind in CUT else tokenizer_of(kind)
    words = words_of(tokenizer)
    assert words._cuts
    for _ in range(2):  # the second time every piece is known
        assert unpack_tokens(words.encode(text)) == whole(tokenizer, text)


@pytest.mark.parametrize(
    "kind",
    ["byte level without regex", "byte level with prefix space", "metaspace, first", "word piece"],
)
def test_tokenizers_of_other_kinds_get_whole_texts(kind):
    tokenizer = tokenizer_of(kind)
    assert not may_be_cut(tokenizer.to_str())
    text = "it's we'll go, go, go 12 times"
    assert words_of(tokenizer).encode(text) == pack_tokens(whole(tokenizer, text))


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("good day", normalized=False),
        AddedToken("<a.b>", normalized=False),
        AddedToken("a<b", normalized=False),
        AddedToken(".\na", normalized=False),
        AddedToken("<a>", rstrip=True),
        AddedToken("<a>", lstrip=True),
        AddedToken("go", single_word=True),
    ],
)
def test_added_tokens_that_reach_over_a_cut_forbid_it(token):
    tokenizer = Tokenizer.from_str(tokenizer_of("byte level").to_str())
    assert may_be_cut(tokenizer.to_str())
    tokenizer.add_tokens([token])
    assert not may_be_cut(tokenizer.to_str())


def test_an_unknown_expression_or_a_drawn_merge_forbids_cuts():
    tree = json.loads(CUT[min(CUT)].to_str())
    assert may_be_cut(json.dumps(tree))
    tree["model"]["dropout"] = 0.1
    assert not may_be_cut(json.dumps(tree))
    tree["model"]["dropout"] = None
    tree["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\w+ \w+"}
    assert not may_be_cut(json.dumps(tree))


def test_words_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr("router.words.MAX_WORDS", 20)
    tokenizer = tokenizer_of("byte level")
    words = words_of(tokenizer)
    for number in range(30):
        text = f"the dog number {number} x{number} jumps {'y' * MAX_WORD_CHARACTERS}"
        assert unpack_tokens(words.encode(text)) == whole(tokenizer, text)
        assert len(words._known) <= 20
        assert all(len(word) <= MAX_WORD_CHARACTERS for word in words._known)


def test_half_a_surrogate_pair_is_no_text():
    words = words_of(tokenizer_of("byte level"))
    with pytest.raises(TypeError):
        words.encode("half a \ud83d pair")


def test_words_of_the_vocabulary_are_known_before_anybody_asks():
    tokenizer = tokenizer_of("smollm2")
    words = words_of(tokenizer)
    words.learn(tokenizer.get_vocab(), lambda: False)
    assert len(words._known) > 10_000
    assert {" house", " the"} <= words._known.keys()
    some = list(words._known)[::97]
    assert [words._known[w] for w in some] == [pack_tokens(whole(tokenizer, w)) for w in some]


def test_learning_ends_when_it_is_told_to():
    tokenizer = tokenizer_of("smollm2")
    words = words_of(tokenizer)
    stops = iter([False, True])
    words.learn(tokenizer.get_vocab(), lambda: next(stops))
    assert 1 < len(words._known) <= LEARNED_AT_ONCE + 1
