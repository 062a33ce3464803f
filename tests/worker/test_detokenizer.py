"""Text while tokens come: equal to decoding everything, never half a character."""

from itertools import pairwise

import msgspec
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

from cluster.protocol import GenerateRequest, Sampling
from worker.answers import Transcript
from worker.detokenizer import IncrementalDetokenizer, StopStringFilter

TEXTS = [
    "Hello, world! The  answer is 42.\n\tDone.",
    "naïve café — “quotes” … €100",
    "你好,世界。今天天气很好!日本語のテキスト、한국어",
    "👍🏽 family 👨‍👩‍👧‍👦 flags 🇩🇪🇯🇵 keycap 1️⃣",
    "עברית العربية हिन्दी ไทย",
    "combining: e\u0301 n\u0303, zero\u200bwidth, replacement \ufffd inside",
    "",
    "   leading and trailing   ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff",
]
SPECIAL = ["<|start|>", "<|end|>"]


def byte_level():
    """Byte-level BPE, as SmolLM2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("plain added ✓ token", special=False, normalized=False)])
    return tokenizer


def byte_fallback():
    """Pieces with a leading ▁ and single bytes for the rest, as Llama 2 and Mistral have it."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzHT,.!42", "▁t", "he", "▁the", "el", "lo", "é"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("▁", "t"), ("h", "e"), ("▁t", "he"), ("e", "l"), ("l", "o")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


TOKENIZERS = {"byte-level": byte_level(), "byte-fallback": byte_fallback()}


def stream(tokenizer, ids, sizes=(1,), skip_special=True):
    """Texts of pushes of the given sizes (the last one repeats), and of the end."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
    pieces, first, step = [], 0, 0
    while first < len(ids):
        size = sizes[min(step, len(sizes) - 1)]
        pieces.append(detokenizer.push(ids[first : first + size]))
        first, step = first + size, step + 1
    return [*pieces, detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_join_to_the_whole(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text).ids
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(stream(tokenizer, ids, (3, 1, 4))) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_the_pieces_join_to_the_whole_for_any_text(name, text, sizes):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text).ids
    assert "".join(stream(tokenizer, ids, sizes)) == tokenizer.decode(ids)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_ids_of_a_byte_level_vocabulary_decode_as_a_whole(data):
    """Ids that are no text at all too: invalid bytes, special and added tokens."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    for skip_special in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip_special)
        assert "".join(stream(tokenizer, ids, skip_special=skip_special)) == whole


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_bytes_that_are_no_text_keep_the_valid_characters_around_them(data):
    """With byte fallback a whole decode would spoil whole runs; text sent cannot be taken back."""
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    pieces = stream(tokenizer, ids)
    plain = [index for index in ids if index > len(SPECIAL) + 256]
    letters = "".join(tokenizer.id_to_token(index) for index in plain).replace("▁", " ")
    received = "".join(pieces)
    remaining = iter(received)
    assert all(letter in remaining for letter in letters.lstrip(" ").replace(" ", ""))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_half_character_is_emitted_and_the_first_whole_one_at_once(name):
    tokenizer = TOKENIZERS[name]
    ids = [tokenizer.token_to_id(piece) for piece in ("<0xF0>", "<0x9F>", "<0x91>", "<0x8D>")]
    if None in ids:
        byte_characters = "ðŁĳį"
        ids = [tokenizer.token_to_id(character) for character in byte_characters]
    assert stream(tokenizer, ids) == ["", "", "", "👍", ""]
    assert "".join(stream(tokenizer, ids[:3])).strip("\ufffd") == ""
    assert stream(tokenizer, ids[:3])[:3] == ["", "", ""]


def test_special_tokens_are_left_out_unless_asked_for():
    for tokenizer in TOKENIZERS.values():
        start, end = (tokenizer.token_to_id(token) for token in SPECIAL)
        ids = [start, *tokenizer.encode("the hello", add_special_tokens=False).ids, end]
        assert "".join(stream(tokenizer, ids)) == "the hello"
        shown = "".join(stream(tokenizer, ids, skip_special=False))
        assert shown == tokenizer.decode(ids, skip_special_tokens=False)
        assert "<|end|>" in shown


def test_a_space_after_a_special_token_survives():
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = tokenizer.encode("the", add_special_tokens=False).ids
    between = [*ids, tokenizer.token_to_id("<|end|>"), *ids]
    assert "".join(stream(tokenizer, between)) == "the the"


@pytest.mark.parametrize("pattern", ["text", "bytes", "special"])
def test_the_window_does_not_grow_with_the_answer(pattern):
    """What is decoded again for each token stays short, whatever comes."""
    tokenizer = TOKENIZERS["byte-fallback"]
    ids = {
        "text": tokenizer.encode("the hello " * 300).ids,
        "bytes": [tokenizer.token_to_id("<0xE4>")] * 2000,
        "special": [tokenizer.token_to_id("<|end|>")] * 2000,
    }[pattern]
    detokenizer = IncrementalDetokenizer(tokenizer)
    longest = 0
    for index in ids:
        detokenizer.push([index])
        longest = max(longest, len(detokenizer._decoder._window))
    assert longest <= 16


def brute_force(text, stops):
    """Text before the stop string that is complete first, and whether there is one."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if stop and text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 24), max_size=6),
)
@settings(max_examples=400, deadline=None)
def test_text_is_cut_before_the_first_stop_string_however_it_comes(text, stops, cuts):
    filter_ = StopStringFilter(stops)
    expected, stopped = brute_force(text, stops)
    received, saw_stop = "", False
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for first, last in pairwise(edges):
        emitted, saw_stop = filter_.push(text[first:last])
        received += emitted
        assert expected.startswith(received)
    assert filter_.stopped == saw_stop == stopped
    received += filter_.finish()
    assert received == expected


def test_only_what_may_become_a_stop_string_is_held_back():
    filter_ = StopStringFilter(["\n\nUser:"])
    assert filter_.push("Hello\n") == ("Hello", False)
    assert filter_.push("there") == ("\nthere", False)
    assert filter_.push("\n\nUse") == ("", False)
    assert filter_.push("r: more") == ("", True)
    assert filter_.push("later") == ("", True)
    assert filter_.finish() == ""


def test_what_was_held_back_comes_at_the_end():
    filter_ = StopStringFilter(["STOP"])
    assert filter_.push("a STO") == ("a ", False)
    assert filter_.finish() == "STO"
    assert filter_.finish() == ""


# Special tokens as stop strings


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_special_token_as_a_stop_string_stops(name):
    """It gives no text, and with `ignore_eos` the engine goes on after it."""
    tokenizer = TOKENIZERS[name]
    end = tokenizer.token_to_id("<|end|>")
    ids = tokenizer.encode("Hello, the 42", add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    request = GenerateRequest(
        request_id="r",
        model="m",
        kind="completion",
        token_ids=b"",
        sampling=Sampling(max_tokens=99, stop=["<|end|>", "never"], ignore_eos=True),
    )
    transcript = Transcript(request, tokenizer)
    assert transcript.push([*ids, end, *ids], "") == whole
    assert (transcript.finish_reason, transcript.completion_tokens) == ("stop", len(ids) + 1)
    other = msgspec.structs.replace(request.sampling, stop=["never"])
    transcript = Transcript(msgspec.structs.replace(request, sampling=other), tokenizer)
    transcript.push([*ids, end, *ids], "")
    assert transcript.finish_reason == ""
