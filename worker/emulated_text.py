"""The emulated model's tokenizer and chat template. One byte is one token."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
FIRST_LETTER, LETTERS = ord("a"), 26
"""Answers consist of these letters; `letters` gives their token ids."""


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that different texts have different tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", END])
    return tokenizer


def letters(tokenizer: Tokenizer) -> list[int]:
    """Token ids of which answers consist."""
    return [token_id(tokenizer, chr(FIRST_LETTER + i)) for i in range(LETTERS)]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token in the vocabulary."""
    number = tokenizer.token_to_id(token)
    assert number is not None
    return number
