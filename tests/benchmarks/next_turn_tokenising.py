"""Tokenising and hashing a conversation's next turn, against doing so with the whole text.

The whole text goes through the tokenizer library, as without any memory of earlier prompts; beside
that stands the gateway's own way for a conversation that it does not know, whose words it does.
"""

from __future__ import annotations

import asyncio
import random
import time

from tokenizers import Tokenizer

from cluster.blocks import Namespace, hash_blocks, pack_tokens
from cluster.protocol import ModelInfo, WorkerCard
from router.openai_api import ApiRequest
from router.tokenization import Encoder, Prompt, Tokenization

HISTORY_TOKENS = (1_000, 4_000, 16_000, 32_000)
BAR_RATIO = 0.1
"""A next turn behind the longest history costs at most this share of the whole text."""

ROUNDS = 7
WORDS = [
    *("the", "a", "router", "sends", "every", "request", "to", "the", "worker", "that", "holds"),
    *("its", "prefix", "unless", "it", "is", "too", "busy", "then", "another", "computes", "anew"),
    *(
        "Grüße",
        "aus",
        "Köln",
        "你好",
        "世界",
        "naïve",
        "café",
        "👍🏽",
        "😀",
        "x = 3.14159",
        "def f(x):",
    ),
]
NAMESPACE = Namespace(
    weights="w", tokenizer="t", kv_dtype="bfloat16", block_size=16, positions="rope:1"
)


def run() -> int:
    """Prints both costs for each history; the longest decides."""
    try:
        from tests.real_tokenizer import smollm2

        real = smollm2()
    except Exception as error:
        print(f"next_turn_tokenising: cannot run: {error}")
        return 2
    info = ModelInfo(
        model="m",
        namespace=NAMESPACE,
        tokenizer_json=real.tokenizer_json,
        chat_template=real.chat_template,
        special_tokens={},
        context_tokens=10**6,
    )
    ratio = asyncio.run(_measure(info))
    print(f"next_turn_tokenising: {ratio:.3f} of tokenising the whole text (bar {BAR_RATIO})")
    return int(ratio > BAR_RATIO)


async def _measure(info: ModelInfo) -> float:
    encoder = Encoder(info)
    library = Tokenizer.from_str(info.tokenizer_json)
    rng = random.Random(1)
    ratio = 1.0
    for history in HISTORY_TOKENS:
        whole, unknown, turn, tokens = [], [], [], 0
        for _ in range(ROUNDS):
            messages = _conversation(rng, history)
            before, after = messages[:-2], messages
            fresh, kept = _tokenization(), _tokenization()
            await _prompt(kept, before, encoder)
            seconds, prompt = await _prompt(kept, after, encoder)
            turn.append(seconds)
            seconds, expected = await _prompt(fresh, after, encoder)
            unknown.append(seconds)
            seconds, plain = _whole(library, encoder, after)
            whole.append(seconds)
            assert prompt == expected
            assert (prompt.token_ids, prompt.chain) == plain
            tokens = prompt.tokens
            fresh.close()
            kept.close()
        ratio = min(turn) / min(whole)
        print(
            f"{tokens} tokens: whole {min(whole) * 1e3:.2f} ms, an unknown conversation "
            f"{min(unknown) * 1e3:.2f} ms, next turn {min(turn) * 1e3:.2f} ms ({ratio:.3f})"
        )
    return ratio


def _whole(
    library: Tokenizer, encoder: Encoder, messages: list[dict[str, str]]
) -> tuple[float, tuple[bytes, list[bytes]]]:
    """Seconds, and packed tokens and block hashes, without anything kept from before."""
    began = time.perf_counter()
    text = encoder.render(_asked(messages))
    packed = pack_tokens(library.encode(text, add_special_tokens=False).ids)
    chain = hash_blocks(NAMESPACE.root(b"secret"), packed, NAMESPACE.block_size)
    return time.perf_counter() - began, (packed, chain)


def _conversation(rng: random.Random, tokens: int) -> list[dict[str, str]]:
    """Turns of some 150 tokens; the last two messages are the new turn."""
    messages = [{"role": "system", "content": _words(rng, 200)}]
    for number in range(2 * max(1, tokens // 300)):
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, "content": _words(rng, 100)})
    messages.append({"role": "user", "content": _words(rng, 100)})
    messages.append({"role": "assistant", "content": _words(rng, 100)})
    messages.append({"role": "user", "content": _words(rng, 30)})
    return messages


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _tokenization() -> Tokenization:
    async def nobody(card: WorkerCard) -> ModelInfo:
        raise OSError("the encoder is at hand")

    return Tokenization(nobody, b"secret")


def _asked(messages: list[dict[str, str]]) -> ApiRequest:
    return ApiRequest(
        kind="chat",
        model="m",
        sampling=None,  # type: ignore[arg-type]
        max_tokens=None,
        messages=messages,
    )


async def _prompt(
    tokenization: Tokenization, messages: list[dict[str, str]], encoder: Encoder
) -> tuple[float, Prompt]:
    """Seconds and result; rendering the chat template is part of it."""
    began = time.perf_counter()
    prompt = await tokenization.prompt(_asked(messages), encoder, NAMESPACE)
    return time.perf_counter() - began, prompt
