"""Tokens of a text in segments are those of the whole text, for every tokenizer and language."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from cluster.blocks import hash_blocks, pack_tokens, unpack_tokens
from router.segments import Cutter, Node, SegmentTree, boundary_tokens, compute
from tests.real_tokenizer import smollm2
from worker.weights import MissingModel

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>"]
HINT = "<|im_start|><|im_end|>"
TEXTS = [
    "Grüß dich, wie geht's? ",
    "Il était une fois, à l'été… ",
    "你好，世界。今天天气怎么样？",
    "こんにちは世界！",
    "Привет, мир! ",
    "مرحبا بالعالم ",
    "नमस्ते दुनिया ",
    "สวัสดีชาวโลก",
    "한국어 텍스트 ",
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽 ",
    "e\u0301 ﬁ Ａ \u200b\u200d\ufeff",
    "  \n\n\t  ",
    "def f(x):\n    return x**2  # 3.14159\n",
    "it's we'll I'M 12345 ",
    "<|im_start|",
    "im_end|>",
    "<|im_<|im_start|>",
    "<|im_start|>",
    "<<|im_end|>>",
    "<s>",
]
CORPUS = [text * 3 for text in TEXTS[:14]] + ["the quick brown fox jumps over the lazy dog " * 5]


def byte_level(*, use_regex=True, prefix_space=False, normalizer=None):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=prefix_space, use_regex=use_regex
    )
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet)


def sentence_piece(scheme):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return tokenizer, trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"])


def llama_like():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer, trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"])


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=600, special_tokens=["<unk>"])


KINDS = {
    "byte level": byte_level,
    "byte level without regex": lambda: byte_level(use_regex=False),
    "byte level with prefix space": lambda: byte_level(prefix_space=True),
    "byte level after NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "byte level after strip": lambda: byte_level(normalizer=normalizers.Strip()),
    "metaspace, first": lambda: sentence_piece("first"),
    "metaspace, always": lambda: sentence_piece("always"),
    "prepend and replace": llama_like,
    "word piece": word_piece,
    "smollm2": None,
}


@cache
def tokenizer_of(kind) -> Tokenizer:
    if kind == "smollm2":
        try:
            return Tokenizer.from_str(smollm2().tokenizer_json)
        except MissingModel as error:
            pytest.skip(str(error))
    tokenizer, trainer = KINDS[kind]()
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


pieces = st.lists(st.one_of(st.sampled_from(TEXTS), st.text(max_size=12)), max_size=6).map("".join)
turns = st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), pieces), max_size=6)


def rendered(messages) -> str:
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return f"{said}<|im_start|>assistant\n"


def prompt_of(tree, cutter, tokenizer, text, block_size=4):
    encoded = []

    def encode(segment, first):
        encoded.append(segment)
        return pack_tokens(tokenizer.encode(segment, add_special_tokens=False).ids)

    found = tree.find("x", b"root", cutter.cut(text))
    computed = compute(
        found.path[-1], found.missing, encode, block_size, begins=len(found.path) == 1
    )
    path = tree.add(found, computed)
    packed = b"".join(node.packed for node in path)
    return packed, [block for node in path for block in node.hashes], encoded


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(conversation=turns, opening=pieces, others=turns)
def test_a_conversation_has_the_tokens_of_its_whole_text_at_every_turn(
    kind, conversation, opening, others
):
    tokenizer = tokenizer_of(kind)
    cutter = Cutter(boundary_tokens(tokenizer.to_str()), HINT)
    tree = SegmentTree()
    for messages in (
        *(conversation[:length] for length in range(len(conversation) + 1)),
        [*conversation[:2], *others],
    ):
        text = opening + rendered(messages)
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        packed, hashes, _ = prompt_of(tree, cutter, tokenizer, text)
        assert unpack_tokens(packed) == whole
        assert hashes == hash_blocks(b"root", pack_tokens(whole), 4)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([*TEXTS, *SPECIAL]), st.text()), max_size=8).map("".join))
def test_any_text_may_be_cut(text):
    tokenizer = tokenizer_of("byte level")
    segments = Cutter(boundary_tokens(tokenizer.to_str()), "").cut(text)
    assert "".join(segments) == text
    ids = [tokenizer.encode(segment, add_special_tokens=False).ids for segment in segments]
    assert [each for part in ids for each in part] == tokenizer.encode(
        text, add_special_tokens=False
    ).ids


def test_the_next_turn_tokenises_only_what_is_new():
    tokenizer = tokenizer_of("byte level")
    cutter, tree = Cutter(boundary_tokens(tokenizer.to_str()), HINT), SegmentTree()
    messages = [("system", "Be brief. " * 50), ("user", "one")]
    prompt_of(tree, cutter, tokenizer, rendered(messages))
    messages += [("assistant", "the answer"), ("user", "two")]
    _, _, encoded = prompt_of(tree, cutter, tokenizer, rendered(messages))
    assert encoded == [
        "<|im_start|>assistant\nthe answer",
        "<|im_end|>\n",
        "<|im_start|>user\ntwo",
        "<|im_end|>\n",
        "<|im_start|>assistant\n",
    ]
    assert prompt_of(tree, cutter, tokenizer, rendered(messages))[2] == []


def test_memory_is_bounded_and_shared_beginnings_are_kept_longest():
    tokenizer = tokenizer_of("byte level")
    cutter, tree = Cutter(boundary_tokens(tokenizer.to_str()), HINT), SegmentTree(5000)
    system = ("system", "Be brief. " * 50)
    for number in range(50):
        text = rendered([system, ("user", f"question {number}")])
        _, _, encoded = prompt_of(tree, cutter, tokenizer, text)
        assert ("<|im_start|>system\n" + system[1] in encoded) == (number == 0)
        assert tree._characters <= 5000
        tree.check()


def test_what_is_forgotten_while_it_is_continued_is_kept_anew():
    tree = SegmentTree(1500)

    def nodes(count):
        return [Node(b"", [], b"root", b"") for _ in range(count)]

    tree.add(tree.find("x", b"root", ["a", "b"]), nodes(2))
    found = tree.find("x", b"root", ["a", "b", "c"])
    for number in range(20):
        tree.add(tree.find("y", b"root", [f"{number}", "z"]), nodes(2))
        tree.check()
    assert tree.find("x", b"root", ["a"]).missing == ["a"]
    path = tree.add(found, nodes(1))
    tree.check()
    assert [node.name for node in path] == ["x", "a", "b", "c"]
    assert tree.find("x", b"root", ["a", "b", "c"]).path == path


def test_two_requests_that_compute_the_same_share_what_came_first():
    tree = SegmentTree()
    one, other = (tree.find("x", b"root", ["a", "b"]) for _ in range(2))
    first = tree.add(one, [Node(b"", [], b"root", b"") for _ in range(2)])
    second = tree.add(other, [Node(b"", [], b"root", b"") for _ in range(2)])
    assert first == second
    tree.check()


def with_tokens(*tokens):
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.add_tokens(list(tokens))
    return boundary_tokens(tokenizer.to_str())


def token(content, **flags):
    return AddedToken(content, **{"normalized": False, **flags})


def test_only_tokens_that_match_wherever_they_stand_are_boundaries():
    assert with_tokens(token("<a>"), token("<b>", special=True)) == ["<a>", "<b>"]
    for flag in ("lstrip", "rstrip", "single_word", "normalized"):
        assert with_tokens(token("<a>", **{flag: True})) == []
    assert with_tokens(token(" <a>")) == []
    assert with_tokens(token("<a>"), token("x<a>y")) == ["x<a>y"]  # hides <a>
    assert with_tokens(token("<|a"), token("z<")) == ["z<"]  # "z<|a" is z< and |a
    assert with_tokens(token("aa")) == []  # "aaa": where?
    assert json.loads(tokenizer_of("byte level").to_str())["added_tokens"]
    assert boundary_tokens(tokenizer_of("byte level").to_str()) == SPECIAL


def test_a_text_without_boundaries_stays_whole():
    assert Cutter([], "").cut("some text") == ["some text"]
    assert Cutter(["<s>"], "").cut("") == [""]
    assert Cutter(["<s>"], "").cut("<s>a<s>") == ["<s>a", "<s>"]
