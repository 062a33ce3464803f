"""Tokens of a text in runs are those of the whole text, for every tokenizer and language."""

import json
import re
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
from router import known_texts
from router.boundaries import Boundaries
from router.known_texts import RUN_CHARACTERS, RUN_OVERHEAD_CHARACTERS, KnownTexts
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


class Prompts:
    """Prompts of texts, one after the other, with one memory."""

    def __init__(self, tokenizer, hint=HINT, known=None, block_size=4):
        self.tokenizer = tokenizer
        self.boundaries = Boundaries(tokenizer.to_str(), hint)
        self.known = known or KnownTexts()
        self.block_size = block_size
        self.encoded = []

    def encode(self, run):
        self.encoded.append(run)
        return pack_tokens(self.tokenizer.encode(run, add_special_tokens=False).ids)

    def check(self, text, bos=b"", root=b"root"):
        self.encoded.clear()
        packed, hashes = self.known.tokens_and_hashes(
            text,
            self.boundaries,
            self.encode,
            bos=bos,
            root=root,
            block_size=self.block_size,
        )
        whole = bos + pack_tokens(self.tokenizer.encode(text, add_special_tokens=False).ids)
        assert unpack_tokens(packed) == unpack_tokens(whole)
        assert hashes == hash_blocks(root, whole, self.block_size)


@pytest.mark.parametrize("run_characters", [1, 40, 300])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(conversation=turns, opening=pieces, others=turns)
def test_a_conversation_has_the_tokens_of_its_whole_text_at_every_turn(
    kind, run_characters, conversation, opening, others
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_texts, "RUN_CHARACTERS", run_characters)
        patch.setattr(known_texts, "TAIL_CHARACTERS", 1)
        prompts = Prompts(tokenizer_of(kind), known=KnownTexts(max_characters=2_000))
        for messages in (
            *(conversation[:length] for length in range(len(conversation) + 1)),
            [*conversation[:2], *others],
            conversation,
        ):
            prompts.check(opening + rendered(messages))


def test_a_token_that_is_a_single_word_matches_beside_every_cut():
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.add_tokens([token("mask", single_word=True), token("end>"), token("<end")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_texts, "RUN_CHARACTERS", 1)
        prompts = Prompts(tokenizer, hint="")
        prompts.check("mask<endmaskend>mask<end mask")
        assert len(prompts.encoded) == 3


@pytest.mark.parametrize("piece", [1, 2, 12, 13])
def test_boundaries_are_found_across_the_pieces_of_a_search(piece):
    text = "<|im_start|>a<<|im_end|>|><|im_start|><|im_end|><|im_end"
    boundaries = Boundaries(tokenizer_of("byte level").to_str(), "")
    expected = [m.start() for m in re.finditer(r"<\|im_(start|end)\|>", text)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.boundaries.PIECE_CHARACTERS", piece)
        found, place = [], boundaries.next_in(text, 0)
        while place is not None:
            found.append(place)
            place = boundaries.next_in(text, place + 1)
    assert found == expected


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([*TEXTS, *SPECIAL]), st.text()), max_size=8).map("".join))
def test_any_text_may_be_cut(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_texts, "RUN_CHARACTERS", 1)
        prompts = Prompts(tokenizer_of("byte level"), hint="")
        prompts.check(text)
        assert "".join(prompts.encoded) == text


def test_the_next_turn_encodes_only_what_is_new():
    prompts = Prompts(tokenizer_of("byte level"))
    messages = [("system", "Be brief. " * RUN_CHARACTERS), ("user", "one"), ("assistant", "1")]
    prompts.check(rendered(messages))
    prompts.check(rendered([*messages, ("user", "two")]))
    new = "".join(prompts.encoded)
    assert new.endswith("two<|im_end|>\n<|im_start|>assistant\n")
    assert len(new) < RUN_CHARACTERS


@pytest.mark.parametrize("answer", ["short", "s" * RUN_CHARACTERS])
def test_what_follows_the_last_run_is_not_encoded_again_in_the_next_turn(answer):
    prompts = Prompts(tokenizer_of("byte level"))
    messages = [("system", "Be brief. " * RUN_CHARACTERS), ("user", "a question " * 40)]
    prompts.check(rendered(messages))
    prompts.check(rendered([*messages, ("assistant", answer), ("user", "and?")]))
    assert not any("question" in text for text in prompts.encoded)
    prompts.check(rendered([messages[0], ("user", "a question "), ("assistant", answer)]))


def test_a_tail_is_not_cut_off_where_its_text_goes_on():
    prompts = Prompts(tokenizer_of("byte level"))
    said = f"<|im_start|>{'s' * RUN_CHARACTERS}<|im_end|>{'the quick brown fo' * 20}"
    for end in ("<|im_end|>", "x jumps over<|im_end|>", "x<|im_end|>"):
        prompts.check(said + end)


def test_tails_count_as_memory_until_a_run_has_their_text():
    prompts = Prompts(tokenizer_of("byte level"))
    messages = [("system", "s" * RUN_CHARACTERS)]
    for number in range(12):
        messages.append(("user", f"{number} " * 100))
        prompts.check(rendered(messages))
        prompts.check(rendered([*messages[:-1], ("user", "another " * 50)]))
        runs = prompts.known._young.items()
        kept = sum(
            len(text) + len(run.tail[0]) + RUN_OVERHEAD_CHARACTERS for (_, text), run in runs
        )
        assert prompts.known._characters == kept
        assert sum(bool(run.tail[0]) for _, run in runs) <= 1


def test_a_known_run_is_not_cut_off_where_its_text_goes_on():
    prompts = Prompts(tokenizer_of("byte level"))
    system, answer = ("system", "s" * RUN_CHARACTERS), "the quick brown fo" * RUN_CHARACTERS
    for said in (answer, f"{answer}x jumps over", answer):
        prompts.check(rendered([system, ("assistant", said), ("user", "and?")]))


@pytest.mark.parametrize("different", ["bos", "root"])
def test_equal_texts_of_other_roots_or_after_a_bos_token_are_others(different):
    prompts = Prompts(tokenizer_of("byte level"))
    text = rendered([("system", "Be brief. " * RUN_CHARACTERS)] * 3)
    prompts.check(text)
    prompts.check(text, **{different: pack_tokens([7])})


def test_memory_is_bounded_and_what_is_used_stays():
    prompts = Prompts(tokenizer_of("byte level"), known=KnownTexts(20 * RUN_CHARACTERS))
    system = ("system", "Be brief. " * (RUN_CHARACTERS // 8))
    for number in range(50):
        prompts.check(rendered([system, ("user", f"{number} " * RUN_CHARACTERS), ("user", "x")]))
        assert any(system[1] in run for run in prompts.encoded) == (number == 0)
        kept = [*prompts.known._young, *prompts.known._old]
        assert sum(len(run) for _, run in kept) <= 25 * RUN_CHARACTERS


def test_runs_whose_predecessor_is_forgotten_are_computed_anew():
    prompts = Prompts(tokenizer_of("byte level"))
    text = rendered([("system", f"{n} " * RUN_CHARACTERS) for n in range(3)])
    prompts.check(text)
    for generation in (prompts.known._young, prompts.known._old):
        for key in [key for key in generation if isinstance(key[0], bytes)]:
            del generation[key]
    prompts.check(text)
    assert "".join(prompts.encoded) == text


def with_tokens(*tokens):
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    tokenizer.add_tokens(list(tokens))
    return set(Boundaries(tokenizer.to_str(), "").tokens)


def token(content, **flags):
    return AddedToken(content, **{"normalized": False, **flags})


def test_only_tokens_that_match_wherever_they_stand_are_boundaries():
    assert with_tokens(token("<a>"), token("<b>", special=True)) == {"<a>", "<b>"}
    for flag in ("lstrip", "rstrip", "single_word", "normalized"):
        assert with_tokens(token("<a>", **{flag: True})) == set()
    for content in (" <a>", "a>", "_a>", "é>"):
        assert with_tokens(token(content)) == set()
    assert with_tokens(token("<a>"), token("[<a>]")) == {"[<a>]"}  # hides <a>
    assert with_tokens(token("<|a"), token("]<")) == {"]<"}  # "]<|a" is ]< and |a
    assert with_tokens(token("aa")) == set()  # "aaa": where?
    assert json.loads(tokenizer_of("byte level").to_str())["added_tokens"]
    assert set(Boundaries(tokenizer_of("byte level").to_str(), "").tokens) == set(SPECIAL)


def test_a_dropped_run_is_not_kept_by_the_one_before_it():
    added = {"added_tokens": [{"content": "<|im_start|>"}]}
    boundaries = Boundaries(json.dumps(added), HINT)
    known = KnownTexts(max_characters=40 * RUN_CHARACTERS)

    def look_up(*runs):
        text = "".join("<|im_start|>" + run for run in runs) + "<|im_start|>"
        known.tokens_and_hashes(
            text, boundaries, lambda run: pack_tokens([0]), bos=b"", root=b"r", block_size=16
        )

    first, long = "a" * RUN_CHARACTERS, "b" * 30 * RUN_CHARACTERS
    look_up(first, long)
    for number in range(4):  # generations in which the long one is not used
        look_up(*(f"{number} {each}" + "c" * RUN_CHARACTERS for each in range(10)))
        look_up(first)
    assert any(first in text for _, text in known._young)
    kept = [run.next for runs in (known._young, known._old) for run in runs.values()]
    assert not any(len(text) > len(long) for text in kept)
