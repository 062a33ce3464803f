"""Tokenising and hashing a conversation's next turn, against doing so for one never seen before.

Both render and encode the whole chat. What makes the next turn cheaper is that the tokens of known
messages and the hashes of known blocks are kept. Beside that stands the library `tokenizers`,
which keeps nothing.
"""

from __future__ import annotations

import asyncio
import random
import time

from tokenizers import Tokenizer

from cluster.blocks import Namespace, hash_blocks, pack_tokens
from cluster.protocol import ModelInfo, WorkerCard
from router.background import Background
from router.openai_api import ApiRequest
from router.tokenization import Encoder, Prompt, Tokenization

HISTORY_TOKENS = (1_000, 4_000, 16_000, 32_000)
BAR_RATIO = 0.5
"""A next turn behind the longest history costs at most this share of an unknown conversation.
Rendering, which is done anew, is most of it."""

ROUNDS = 7
CONTEXT_TOKENS = 10**6
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
        context_tokens=CONTEXT_TOKENS,
    )
    ratio = asyncio.run(_measure(info))
    print(f"next_turn_tokenising: {ratio:.3f} of an unknown conversation (bar {BAR_RATIO})")
    return int(ratio > BAR_RATIO)


async def _measure(info: ModelInfo) -> float:
    encoder = Encoder(info)
    library = Tokenizer.from_str(info.tokenizer_json)
    rng = random.Random(1)
    background = Background()
    tokenization = Tokenization(_nobody, b"secret", background)
    ratio = 1.0
    for history in HISTORY_TOKENS:
        unknown, turn, rendering, whole, tokens = [], [], [], [], 0
        for _ in range(ROUNDS):
            messages = _conversation(rng, history)
            seconds, _ = await _prompt(tokenization, messages[:-2], encoder)
            unknown.append(seconds)
            seconds, prompt = await _prompt(tokenization, messages, encoder)
            turn.append(seconds)
            began = time.perf_counter()
            encoder.render(_asked(messages))
            rendering.append(time.perf_counter() - began)
            seconds, plain = _whole(library, encoder, messages)
            whole.append(seconds)
            assert (prompt.token_ids, prompt.chain) == plain
            tokens = prompt.tokens
        ratio = min(turn) / min(unknown)
        print(
            f"{tokens} tokens: `tokenizers` {min(whole) * 1e3:.2f} ms, an unknown conversation "
            f"{min(unknown) * 1e3:.2f} ms, next turn {min(turn) * 1e3:.2f} ms ({ratio:.3f}), "
            f"rendering {min(rendering) * 1e3:.2f} ms of each"
        )
    background.close()
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


async def _nobody(card: WorkerCard) -> ModelInfo:
    raise OSError("the encoder is at hand")


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
    prompt = await tokenization.prompt(_asked(messages), encoder, NAMESPACE, CONTEXT_TOKENS)
    return time.perf_counter() - began, prompt
