"""An engine on a tiny real model in fp32, and the plain reference that its answers must equal."""

from __future__ import annotations

import random

import torch

from cluster.blocks import pack_tokens
from cluster.protocol import Sampling
from tests.worker.plain_llama import first_difference
from tests.worker.tiny_models import random_tensors, tiny_config
from worker.engine import EngineCore
from worker.engine_config import EngineConfig
from worker.messages import EngineRequest, Output
from worker.models import LlamaModel
from worker.runner import TorchRunner
from worker.tiers.cold_tiers import ColdTiers

BLOCK = 8
MODEL_CONFIG = tiny_config()
TENSORS = random_tensors(MODEL_CONFIG, seed=5)
MODEL = LlamaModel(MODEL_CONFIG, TENSORS, torch.float32)
ROOT = b"r" * 32


def tokens_of(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(MODEL_CONFIG.vocab_size) for _ in range(length)]


class SmallEngine:
    """Greedy requests by name; `final` holds each one's last output."""

    def __init__(self, *, blocks: int = 64, **fields) -> None:
        extra = {name: fields.pop(name) for name in ("hash_block",) if name in fields}
        sizes = {
            "block_size": BLOCK,
            "capacity_blocks": blocks,
            "context_tokens": MODEL_CONFIG.context_tokens,
            "max_batch_size": 8,
            "token_budget": 256,
        }
        self.config = EngineConfig(**(sizes | fields))
        self.runner = TorchRunner(MODEL, blocks, BLOCK)
        self.core = EngineCore(self.config, self.runner, tiers=self.make_tiers(), **extra)
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.final: dict[str, Output] = {}

    def make_tiers(self) -> ColdTiers | None:
        """Cold tiers of the cache: none here."""
        return None

    def add(self, name: str, prompt: list[int], max_tokens: int = 12, root: bytes = ROOT) -> None:
        self.core.add(
            EngineRequest(
                request_id=name,
                token_ids=pack_tokens(prompt),
                namespace_root=root,
                sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            )
        )
        self.prompts[name], self.tokens[name] = list(prompt), []

    def step(self) -> None:
        for output in self.core.step():
            assert not output.error, output.error
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                self.final[output.request_id] = output
        self.core.check()

    def drain(self) -> None:
        """Let all end. Every answer is the reference's, and nothing is held any more."""
        while self.core.has_work():
            self.step()
        self.same_as_reference()
        assert self.core.load().free_blocks == self.config.capacity_blocks

    def run(self, name: str, prompt: list[int], **fields) -> int:
        """Serve one request to its end. Returns its hit in tokens."""
        self.add(name, prompt, **fields)
        self.drain()
        return self.final[name].hit_tokens

    def same_as_reference(self) -> None:
        for name, answer in self.tokens.items():
            if answer:
                sampling = Sampling(max_tokens=1, temperature=0.0)
                prompt = self.prompts[name]
                assert first_difference(MODEL_CONFIG, TENSORS, prompt, answer, sampling) is None
