"""An emulated accelerator: the same engine core with a runner that only takes time.

Its tokens are deterministic and mean nothing; how long a step takes comes from a cost model.
Whatever it serves carries `emulated:PROFILE` as its device.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cluster.blocks import Namespace
from cluster.protocol import ModelInfo
from cluster.settings import WorkerSettings
from worker.emulated_profiles import CostModel, profile_of
from worker.engine import BatchItem, EngineConfig, EngineCore
from worker.eviction_choice import parse_eviction
from worker.fingerprint import digest_fields
from worker.messages import EngineInfo

EMULATED = "emulated:"
"""Models of that prefix are profiles."""

END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
FIRST_LETTER, LETTERS = ord("a"), 26
"""Answers are made of these letters; in the byte vocabulary they are found by `_letters`."""


class EmulatedRunner:
    """Implements `worker.engine.Runner`. A step lasts as long as its cost says, its own work
    included.

    letters  token ids that answers are made of
    clock    seconds; `wait` blocks for so many
    """

    def __init__(
        self,
        cost: CostModel,
        letters: list[int],
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._cost = cost
        self._letters = letters
        self._clock = clock
        self._wait = wait

    def execute(self, batch: list[BatchItem]) -> list[int | None]:
        """A token that follows from the sequence's last token and its length, once time is up."""
        end = self._clock() + self._cost.seconds(
            (item.start, len(item.token_ids)) for item in batch
        )
        tokens = [self._token(item) if item.sample else None for item in batch]
        left = end - self._clock()
        if left > 0:
            self._wait(left)
        return tokens

    def _token(self, item: BatchItem) -> int:
        length = item.start + len(item.token_ids)
        number = zlib.crc32(item.token_ids[-1].to_bytes(4, "little"), length)
        return self._letters[number % len(self._letters)]


def build_emulated(settings: WorkerSettings) -> tuple[EngineCore, EngineInfo]:
    """An engine on the accelerator that `settings.model`, `emulated:PROFILE`, names.

    Raises ModelError for an unknown profile, ValueError for settings that cannot work.
    """
    if settings.cpu_tier_gb or settings.disk_tier_gb:
        raise ValueError(
            "an emulated accelerator has no KV to keep: unset worker.cpu_tier_gb and "
            "worker.disk_tier_gb"
        )
    name = settings.model.removeprefix(EMULATED)
    profile = profile_of(name)
    tokenizer = byte_tokenizer()
    capacity = settings.kv_blocks or profile.kv_tokens // settings.block_size
    config = EngineConfig(
        block_size=settings.block_size,
        capacity_blocks=capacity,
        context_tokens=min(profile.context_tokens, settings.context_tokens or 1 << 62),
        max_batch_size=settings.max_batch_size,
        token_budget=settings.token_budget,
        chunk_tokens=settings.chunk_tokens,
        max_waiting=settings.max_waiting,
        eos_token_ids=[_token_id(tokenizer, END)],
        cache_share=settings.cache_share,
        pin_share=settings.pin_share,
    )
    runner = EmulatedRunner(profile.cost, _letters(tokenizer))
    core = EngineCore(config, runner, make_policy=parse_eviction(settings.eviction))
    info = EngineInfo(
        model=ModelInfo(
            model=settings.served_name or settings.model,
            namespace=Namespace(
                weights=digest_fields("stemroute/emulated/1", [name]),
                tokenizer=digest_fields("stemroute/emulated-tokenizer/1", [CHAT_TEMPLATE]),
                kv_dtype="none",
                block_size=settings.block_size,
                positions="none",
            ),
            tokenizer_json=tokenizer.to_str(),
            chat_template=CHAT_TEMPLATE,
            special_tokens={"eos_token": END},
            context_tokens=config.sequence_limit,
        ),
        capacity_blocks=capacity,
        context_tokens=config.sequence_limit,
        max_batch_size=settings.max_batch_size,
        token_budget=settings.token_budget,
        device=settings.model,
        kv_bytes_a_token=0,
    )
    return core, info


def byte_tokenizer() -> Tokenizer:
    """One token a byte: no vocabulary to ship, and different texts are different tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", END])
    return tokenizer


def _letters(tokenizer: Tokenizer) -> list[int]:
    return [_token_id(tokenizer, chr(FIRST_LETTER + i)) for i in range(LETTERS)]


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None
    return number
