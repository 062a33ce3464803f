"""Tokens of a text word by word, each word tokenised once.

Byte-level BPE first splits a text with a regular expression, into words above all, and merges
within each split only. The expressions in use agree that a split begins at a space before a
letter, whatever precedes it, that one ends where letters are followed by white space or a
punctuation mark, and that a single line break ends one before a letter. So a text may be cut
there, and the tokens of its pieces, one after the other, are its tokens. Texts repeat their
words: nearly all pieces are known, and looking them up takes a tenth of the time of tokenising
them. The words that are one token each, which are the most frequent ones, are tokenised before
anybody sends them. Tokenizers of other kinds get whole texts.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable
from typing import Any

import tokenizers

from cluster.blocks import pack_tokens

MAX_WORDS = 300_000
"""Kept pieces, some 150 bytes each; when there are more, all are forgotten."""

LEARNED_AT_ONCE = 256
"""Words: a millisecond or two in which other threads wait for Python."""

MAX_WORD_CHARACTERS = 64
"""Longer pieces are tokenised each time."""

SPLITS = frozenset(
    {
        # GPT-2; Llama 3; Qwen 2 and 3
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Expressions whose splits begin at a space before a letter, and end at the end of a word."""

_PIECE = re.compile(
    r" ?[A-Za-z]+(?=[ \n.,:;?!<]|\Z)| ?[^ \n]*\S\n(?=[A-Za-z])| ?[^ ]*(?: (?![A-Za-z])[^ ]*)*"
)
"""A word, the end of a line before a letter, or what stands before the next space and letter."""

_CUT = re.compile(r"(?<!\A) [A-Za-z]|[A-Za-z][ \n.,:;?!<]|\S\n[A-Za-z]")


class Words:
    """Tokenises by known words. Thread-safe.

    tokenizer_json   the same tokenizer as the contents of a tokenizer.json
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, tokenizer_json: str) -> None:
        self._tokenizer = tokenizer
        self._cuts = may_be_cut(tokenizer_json)
        self._known: dict[str, bytes] = {"": b""}

    def encode(self, text: str) -> bytes:
        """Packed tokens of `text`. Raises TypeError for a text with lone surrogates."""
        if not self._cuts:
            return self._whole(text)
        pieces = _PIECE.findall(text)
        known = self._known  # another thread may put a new one in its place
        packed = list(map(known.get, pieces))
        if None not in packed:
            return b"".join(packed)  # type: ignore[arg-type]
        missing = {
            piece for piece, known_as in zip(pieces, packed, strict=True) if known_as is None
        }
        if len(known) + len(missing) > MAX_WORDS:
            self._known = {"": b""}
            known, missing = self._known, set(pieces)
        return self._learn(known, pieces, missing)

    def learn(self, vocabulary: Iterable[str], stop: Callable[[], bool]) -> None:
        """Tokenise the vocabulary's words, such as "Ġhouse", before they are asked for.

        That takes some ten microseconds a word; it ends early once `stop()`.
        """
        if not self._cuts:
            return
        words = [
            " " + t[1:] for t in vocabulary if t[:1] == "Ġ" and t.isalpha() and t[1:].isascii()
        ]
        known = self._known
        for at in range(0, len(words), LEARNED_AT_ONCE):
            some = [word for word in words[at : at + LEARNED_AT_ONCE] if word not in known]
            if stop() or known is not self._known or len(known) + len(some) > MAX_WORDS:
                return
            answers = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            known.update(zip(some, [pack_tokens(each.ids) for each in answers], strict=True))

    def _learn(self, known: dict[str, bytes], pieces: list[str], missing: Iterable[str]) -> bytes:
        new = {piece: self._whole(piece) for piece in missing}
        known.update((p, packed) for p, packed in new.items() if len(p) <= MAX_WORD_CHARACTERS)
        return b"".join([new.get(piece) or known[piece] for piece in pieces])

    def _whole(self, text: str) -> bytes:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return struct.pack(f"<{len(ids)}I", *ids) if len(ids) < 16 else pack_tokens(ids)


def may_be_cut(tokenizer_json: str) -> bool:
    """Whether the tokens of any text are those of its pieces."""
    tree: dict[str, Any] = json.loads(tokenizer_json)
    model, normalizer = tree["model"], tree.get("normalizer")
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and (normalizer is None or normalizer.get("type") == "NFC")
        and _splits_words(tree.get("pre_tokenizer"))
        and not any(_crosses(token) for token in tree.get("added_tokens") or [])
    )


def _splits_words(pre_tokenizer: dict[str, Any] | None) -> bool:
    outer = pre_tokenizer or {}
    steps: list[dict[str, Any]] = (
        outer["pretokenizers"] if outer.get("type") == "Sequence" else [outer]
    )
    splits = False
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel":
            if step.get("add_prefix_space"):
                return False
            splits = splits or bool(step.get("use_regex", True))
        elif kind == "Split":
            known = step.get("pattern", {}).get("Regex") in SPLITS
            if not known or step.get("behavior") != "Isolated" or step.get("invert"):
                return False
            splits = True
        elif kind != "Digits":
            return False
    return splits


def _crosses(token: dict[str, Any]) -> bool:
    """Whether an added token may match across a cut, or look beyond it."""
    content = token["content"]
    looks = any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word"))
    return looks or _CUT.search(content) is not None
