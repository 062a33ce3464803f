"""The quick encoder gives the tokens of the tokenizer library, or that library serves."""

import json
import unicodedata
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cluster.blocks import unpack_tokens
from cluster.protocol import RequestError
from router import encoding
from router.encoding import TextEncoder, TooManyTokens
from router.encoding_check import TEXTS
from router.token_bound import BYTE_SYMBOLS
from tests.real_tokenizer import smollm2
from worker.weights import MissingModel

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA_3.replace("{1,3}", "")
ADDED = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|im|>"]
CORPUS = [*TEXTS, *TEXTS, "the house and the houses, there and then: 'tis 1,234 " * 20]


def byte_level(*, regex: str | None, nfc: bool = False, digits: bool = False) -> Tokenizer:
    """Byte-level BPE. Without `regex` with GPT-2's own."""
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
    steps = [last]
    if regex is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(regex), "isolated"))
    if digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else last
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=ADDED, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def sentencepiece(*, split: bool, prepend: bool) -> Tokenizer:
    """BPE on `▁` for spaces, with byte fallback: as Llama 2 (`prepend`) or as Gemma (`split`)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prepend else spaces
    )
    if split:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", *ADDED, *pieces],
        limit_alphabet=80,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tree = json.loads(tokenizer.to_str())
    special = {"<unk>", *ADDED}
    tree["added_tokens"] = [t for t in tree["added_tokens"] if t["content"] in special]
    return Tokenizer.from_str(json.dumps(tree))


def real() -> Tokenizer:
    try:
        return Tokenizer.from_str(smollm2().tokenizer_json)
    except MissingModel as error:
        pytest.skip(str(error))


KINDS = {
    "GPT-2": lambda: byte_level(regex=None),
    "Llama 3": lambda: byte_level(regex=LLAMA_3),
    "Qwen": lambda: byte_level(regex=QWEN, nfc=True),
    "Llama 2": lambda: sentencepiece(split=False, prepend=True),
    "Gemma": lambda: sentencepiece(split=True, prepend=False),
    "SmolLM2": real,
    "StarCoder": lambda: byte_level(regex=None, digits=True),
}


@cache
def encoders(kind: str) -> tuple[Tokenizer, TextEncoder]:
    library = KINDS[kind]()
    return library, TextEncoder(library.to_str())


pieces = st.one_of(
    st.sampled_from([*ADDED, "<|im", "_start|>", "<|endoftext|>", *TEXTS]),
    st.sampled_from(
        [
            " ",
            "  ",
            "\n",
            "\n\n",
            "\r\n",
            "\t",
            "\u3000",
            "'s",
            "'LL",
            "1",
            "123",
            "é",
            "\u180e",
        ]
    ),
    st.text(max_size=12),
    st.text(st.sampled_from("ab C1,.\n\t'_é\u0301あ😀\u200d"), max_size=30),
)
texts = st.lists(pieces, max_size=12).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts)
def test_tokens_are_those_of_the_library(kind, text):
    library, encoder = encoders(kind)
    expected = library.encode(text, add_special_tokens=False).ids
    assert unpack_tokens(encoder.encode(text)) == expected
    assert encoder.encode(text, len(expected)) == encoder.encode(text)
    if expected:
        with pytest.raises(TooManyTokens):
            encoder.encode(text, len(expected) - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_fastokens_serves_the_usual_kinds(kind):
    _, encoder = encoders(kind)
    info = encoder.info("digest", "model")
    assert (info.library, info.reason) == ("fastokens", "")


def test_the_split_at_digits_is_that_of_the_library():
    """Of a tokenizer that merges a few characters with any byte, so that each split shows."""
    beside = ["A", "!", "Ġ", "1"]
    pairs = [pair for c in beside for b in BYTE_SYMBOLS for pair in ((c, b), (b, c))]
    names = dict.fromkeys([*BYTE_SYMBOLS, *map("".join, pairs)])
    vocabulary = {name: number for number, name in enumerate(names)}
    library = Tokenizer(models.BPE(vocabulary, list(dict.fromkeys(pairs))))
    library.pre_tokenizer = KINDS["StarCoder"]().pre_tokenizer
    encoder = TextEncoder(library.to_str())
    assert encoder.reason == ""
    for code in [*range(0x3100), *range(0xA000, 0xB000), *range(0x10000, 0x20000)]:
        if unicodedata.category(chr(code))[0] in "NZC":
            text = "A?A ?A!?!  ? ?1?1  ??!?1 ?! ?A".replace("?", chr(code))
            assert unpack_tokens(encoder.encode(text)) == library.encode(text).ids, hex(code)


def test_a_tokenizer_that_fastokens_refuses_is_served_by_the_library():
    library = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    encoder = TextEncoder(library.to_str())
    info = encoder.info("digest", "model")
    assert info.library == "tokenizers"
    assert "refuses" in info.reason
    assert unpack_tokens(encoder.encode("ab")) == [1, 2]
    with pytest.raises(TooManyTokens):
        encoder.encode("ab", 1)
    with pytest.raises(RequestError, match="surrogate"):
        encoder.encode("a\ud800")


def test_where_fastokens_differs_the_library_serves(monkeypatch):
    library, _ = encoders("GPT-2")
    true = encoding._encode_fast

    def wrong_for_one(fast, text):
        packed = true(fast, text)
        return packed[4:] if text == TEXTS[5] else packed

    monkeypatch.setattr(encoding, "_encode_fast", wrong_for_one)
    encoder = TextEncoder(library.to_str())
    info = encoder.info("digest", "model")
    assert info.library == "tokenizers"
    assert "other tokens for" in info.reason
    assert unpack_tokens(encoder.encode(TEXTS[5])) == library.encode(TEXTS[5]).ids


@pytest.mark.parametrize("error", [ValueError, type("PanicException", (BaseException,), {})])
def test_a_text_that_fastokens_refuses_is_encoded_by_the_library(error):
    library, _ = encoders("GPT-2")
    encoder = TextEncoder(library.to_str())

    class Refusing:
        def encode_batch_flat(self, texts):
            raise error("no")

    encoder._fast = Refusing()
    assert unpack_tokens(encoder.encode("the house")) == library.encode("the house").ids


def test_a_million_white_spaces_have_the_tokens_of_the_library():
    library, encoder = encoders("GPT-2")
    text = " " * 1_100_000
    assert unpack_tokens(encoder.encode(text)) == library.encode(text).ids


@pytest.mark.parametrize("kind", ["GPT-2", "Llama 2"])
def test_half_a_surrogate_pair_is_refused_and_nul_is_a_character(kind):
    library, encoder = encoders(kind)
    for text in ("a\ud800b", "\udc00", "\ud83d\ude00"):
        with pytest.raises(RequestError, match="unpaired surrogate") as refusal:
            encoder.encode(text)
        assert refusal.value.status == 400
    assert unpack_tokens(encoder.encode("a\x00b")) == library.encode("a\x00b").ids


def test_truncation_and_padding_of_the_file_are_not_for_prompts():
    library = Tokenizer.from_str(encoders("GPT-2")[0].to_str())
    text = "the house and the houses"
    expected = library.encode(text).ids
    library.enable_truncation(2)
    library.enable_padding(length=50)
    assert unpack_tokens(TextEncoder(library.to_str()).encode(text)) == expected
