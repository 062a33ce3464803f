"""Build a `tokenizer.json` from the metadata of a GGUF file (byte-level BPE vocabularies)."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre

from worker.models.config import UnsupportedModel

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

END_TOKENS = frozenset({"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>"})
"""Control tokens that end an answer even if the metadata do not say so."""


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    CONTROL = 3
    USER_DEFINED = 4


class Metadata(Protocol):
    """Metadata of a GGUF file."""

    def get(self, key: str, default: Any = None) -> Any: ...

    def need(self, key: str) -> Any: ...


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    """Build the tokenizer that the metadata describe.

    Raises UnsupportedModel for another kind of vocabulary or an unknown pre-tokenizer.
    """
    kind = metadata.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UnsupportedModel(
            f"the tokenizer {kind!r} of the GGUF file is not supported, only byte-level BPE "
            "('gpt2'). Use the model's Hugging Face directory, whose tokenizer.json is complete"
        )
    split = metadata.get("tokenizer.ggml.pre", "default")
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.need("tokenizer.ggml.merges")]
    # Llama 3 looks up whole words before merging.
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=split == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    for index, token_type in enumerate(metadata.get("tokenizer.ggml.token_type", [])):
        if token_type in (TokenType.CONTROL, TokenType.USER_DEFINED):
            special = token_type == TokenType.CONTROL
            tokenizer.add_tokens([AddedToken(tokens[index], special=special, normalized=False)])
    return tokenizer


def adds_bos(metadata: Metadata) -> bool:
    """Whether texts begin with the bos token. If the file does not say, as in llama.cpp for this
    pre-tokenizer."""
    split = metadata.get("tokenizer.ggml.pre", "default")
    return bool(metadata.get("tokenizer.ggml.add_bos_token", split == "llama-bpe"))


def end_token_ids(metadata: Metadata, tokens: list[str]) -> list[int]:
    """Ids of the tokens that end an answer."""
    named = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    types = metadata.get("tokenizer.ggml.token_type", [])
    known = (
        index
        for index, token_type in enumerate(types)
        if token_type == TokenType.CONTROL and tokens[index] in END_TOKENS
    )
    return sorted({index for index in (*named, *known) if index is not None})


def _pre_tokenizer(split: str) -> pre.PreTokenizer:
    words = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    letters = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    match split:
        case "smollm":
            return pre.Sequence([pre.Digits(individual_digits=True), words])
        case "default" | "gpt-2":
            return words
        case "llama-bpe":
            return pre.Sequence([pre.Split(Regex(_WORDS % "{1,3}"), "isolated"), letters])
        case "qwen2":
            return pre.Sequence([pre.Split(Regex(_WORDS % ""), "isolated"), letters])
        case _:
            raise UnsupportedModel(
                f"the pre-tokenizer {split!r} of the GGUF file is not supported; "
                "use the model's Hugging Face directory"
            )
