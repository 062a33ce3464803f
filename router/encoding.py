"""Exact tokens of a text, from the fastest library that agrees with the model's tokenizer.

`fastokens` encodes 20 to 200 times as fast as `tokenizers`. It is used only for tokenizers with
which both libraries return the same tokens for all of `router/encoding_check.py`. `tokenizers`
encodes for all others, and single texts that `fastokens` refuses.

Both release the GIL while they encode a long text, so a call in a thread does not block others.
"""

from __future__ import annotations

import os
from importlib.metadata import version

import fastokens
import msgspec
import tokenizers
from fastokens._native import Tokenizer as FastTokenizer

from cluster.blocks import pack_tokens
from cluster.protocol import RequestError
from router.encoding_check import check_texts
from router.token_bound import token_bound

os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
# Read at the first encoding. With more threads, a text takes half as much CPU time again and
# occupies all cores.


class EncoderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Which library encodes for a tokenizer.

    tokenizer   digest of the tokenizer, as in the namespace
    model       a model that uses the tokenizer
    library     "fastokens" or "tokenizers"
    version     version of the library
    reason      why fastokens is not used; "" if it is
    """

    tokenizer: str
    model: str
    library: str
    version: str
    reason: str = ""


class TooManyTokens(Exception):
    """A text has more tokens than allowed: `tokens`, or at least so many if not `exact`."""

    def __init__(self, tokens: int, *, exact: bool) -> None:
        super().__init__(f"{tokens} tokens")
        self.tokens = tokens
        self.exact = exact


class TextEncoder:
    """Encodes texts with one tokenizer. Thread-safe.

    tokenizer_json   contents of a tokenizer.json; ValueError or Exception if invalid

    Building takes some 0.3 s and checks `fastokens` against `tokenizers`, which also warms it up.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._exact = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._exact.no_truncation()
        self._exact.no_padding()
        self.vocabulary: int = self._exact.get_vocab_size(with_added_tokens=True)
        self._bound = token_bound(tokenizer_json, self._exact.get_vocab(with_added_tokens=False))
        self._fast: FastTokenizer | None = None
        self.reason = self._try_fast(tokenizer_json)

    def token_id(self, token: str) -> int | None:
        """The id of a token; None if it is not in the vocabulary."""
        found: int | None = self._exact.token_to_id(token)
        return found

    def info(self, tokenizer: str, model: str) -> EncoderInfo:
        """Which library encodes."""
        library = tokenizers if self._fast is None else fastokens
        name = library.__name__
        return EncoderInfo(
            tokenizer=tokenizer,
            model=model,
            library=name,
            version=version(name),
            reason=self.reason,
        )

    def encode(self, text: str, most: int | None = None) -> bytes:
        """Packed tokens (little-endian u32) of `text`, without a bos token.

        Raises TooManyTokens for more than `most` tokens, and RequestError (400) for a text with an
        unpaired surrogate.
        """
        self.check_size(text, most)
        packed = _encode_fast(self._fast, text) if self._fast is not None else None
        if packed is None:
            # a batch of one releases the GIL and computes no offsets
            encoded = self._exact.encode_batch_fast([text], add_special_tokens=False)[0]
            if most is not None and len(encoded) > most:
                raise TooManyTokens(len(encoded), exact=True)
            return pack_tokens(encoded.ids)
        if most is not None and len(packed) > 4 * most:
            raise TooManyTokens(len(packed) // 4, exact=True)
        return packed

    def check_size(self, text: str, most: int | None) -> None:
        """Raises TooManyTokens if the size of `text` implies more than `most` tokens, and
        RequestError (400) if it has an unpaired surrogate."""
        if not text.isascii():
            _check_unicode(text)
        if most is not None and self._bound is not None:
            fewest = self._bound.fewest_tokens(text, most)
            if fewest > most:
                raise TooManyTokens(fewest, exact=False)

    def _try_fast(self, tokenizer_json: str) -> str:
        """Use fastokens if it agrees. Returns the reason if it is not used, otherwise ""."""
        try:
            fast = FastTokenizer.from_json_str(_in_one_split(tokenizer_json))
            fast.no_truncation()
            fast.no_padding()
        except Exception as error:
            return f"fastokens refuses the tokenizer: {error}"
        added = [token.content for token in self._exact.get_added_tokens_decoder().values()]
        texts = check_texts(added)
        expected = self._exact.encode_batch_fast(texts, add_special_tokens=False)
        for text, encoded in zip(texts, expected, strict=True):
            if _encode_fast(fast, text) != pack_tokens(encoded.ids):
                return f"fastokens gives other tokens for {text!r}"
        self._fast = fast
        return ""


SPACE = r"\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}"
"""White space of Unicode. To the expressions of fastokens, `\\s` also has U+180E."""

DIGIT = r"\p{N}\x{11DE0}-\x{11DE9}\x{16FF4}-\x{16FF6}"
"""Digits to the step `Digits`, which knows Unicode 17; `\\p{N}` alone is older."""

DIGITS_AND_WORDS = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+"
    rf"|[{DIGIT}]| ?[^{SPACE}{DIGIT}\p{{L}}]+|[{SPACE}]+(?![^{SPACE}{DIGIT}])|[{SPACE}]+"
)
"""Equivalent to a split at every digit, then GPT-2's expression between: white space before a digit
ends its part, so it stays together."""


def _in_one_split(tokenizer_json: str) -> str:
    """The tokenizer, with the two splits of SmolLM and StarCoder merged into one: fastokens then
    takes a third of the time."""
    tree = msgspec.json.decode(tokenizer_json, type=dict[str, msgspec.Raw])
    steps = msgspec.json.decode(tree.get("pre_tokenizer", b"null"))
    match steps:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True} as byte_level,
            ],
        }:
            split = {
                "type": "Split",
                "pattern": {"Regex": DIGITS_AND_WORDS},
                "behavior": "Isolated",
                "invert": False,
            }
            steps["pretokenizers"] = [split, {**byte_level, "use_regex": False}]
            tree["pre_tokenizer"] = msgspec.Raw(msgspec.json.encode(steps))
            return msgspec.json.encode(tree).decode()
    return tokenizer_json


def _encode_fast(fast: FastTokenizer, text: str) -> bytes | None:
    """None if fastokens refuses the text, such as a million white spaces in a row."""
    try:
        packed: bytes = fast.encode_batch_flat([text])[0]
    except ValueError:
        return None
    except BaseException as error:
        if (
            type(error).__name__ == "PanicException"
        ):  # a panic of Rust code, which is not an Exception
            return None
        raise
    return packed


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            "the text has an unpaired surrogate, which is not valid Unicode: send valid UTF-8"
        ) from error
