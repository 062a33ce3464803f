"""An emulated accelerator: the real engine core with a runner that only waits.

Its tokens are deterministic and meaningless. A cost model gives the duration of a step. Its device
is reported as `emulated:PROFILE`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

from cluster.blocks import Namespace
from cluster.protocol import ModelInfo
from cluster.settings import WorkerSettings
from worker.batch import BatchItem
from worker.emulated_profiles import CostModel, ProfileError, profile_of
from worker.emulated_text import CHAT_TEMPLATE, END, byte_tokenizer, letters, token_id
from worker.engine import EngineCore
from worker.engine_config import EngineConfig
from worker.eviction.registry import parse_eviction
from worker.fingerprint import digest_fields
from worker.messages import EngineInfo
from worker.models.config import ModelError

EMULATED = "emulated:"
"""Prefix of emulated models; a profile's name or file follows."""


class EmulatedRunner:
    """Implements `worker.batch.Runner`. A step takes the time of the cost model.

    A step that continues a sequence of the previous step starts when that one ended: an engine on a
    real accelerator plans a step while another runs, so that planning is hidden as long as it takes
    no longer than the step.

    letters  token ids of which answers consist
    clock    in seconds; `wait` blocks for the given seconds
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
        self._ended = 0.0
        self._last: set[str] = set()

    def execute(self, batch: list[BatchItem]) -> list[int | None]:
        """Wait for the step's duration, then derive a token from the last token and the length."""
        began = self._clock()
        ids = {item.request_id for item in batch}
        if not self._last.isdisjoint(ids):
            began = self._ended
        self._last = ids
        end = began + self._cost.seconds((item.start, len(item.token_ids)) for item in batch)
        tokens = [self._token(item) if item.sample else None for item in batch]
        now = self._clock()
        if now < end:
            self._wait(end - now)
        self._ended = max(now, end)
        return tokens

    def _token(self, item: BatchItem) -> int:
        length = item.start + len(item.token_ids)
        number = zlib.crc32(item.token_ids[-1].to_bytes(4, "little"), length)
        return self._letters[number % len(self._letters)]


def build_emulated(settings: WorkerSettings) -> tuple[EngineCore, EngineInfo]:
    """An engine on the accelerator that `settings.model`, `emulated:PROFILE`, names.

    Raises ModelError for an unknown profile, ValueError for invalid settings.
    """
    if settings.cpu_tier_gb or settings.disk_tier_gb:
        raise ValueError(
            "an emulated accelerator has no KV to store in cold tiers; unset worker.cpu_tier_gb "
            "and worker.disk_tier_gb"
        )
    name = settings.model.removeprefix(EMULATED)
    try:
        profile = profile_of(name)
    except ProfileError as error:
        raise ModelError(str(error)) from error
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
        eos_token_ids=[token_id(tokenizer, END)],
        cache_share=settings.cache_share,
        pin_share=settings.pin_share,
    )
    runner = EmulatedRunner(profile.cost, letters(tokenizer))
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
        prefill=profile.cost.first_speed(config.chunk_limit),
    )
    return core, info
