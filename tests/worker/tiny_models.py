"""Tiny random models: small enough to run in milliseconds, random enough to tell errors apart."""

from __future__ import annotations

import msgspec
import torch

from cluster.protocol import Sampling
from worker.batch import BatchItem
from worker.models import LlamaModel, ModelConfig, Rope
from worker.runner import TorchRunner

GREEDY = Sampling(max_tokens=1, temperature=0.0)


def tiny_config(**changes) -> ModelConfig:
    config = ModelConfig(
        family="llama",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        layers=2,
        query_heads=4,
        kv_heads=2,
        head_dim=8,
        rms_eps=1e-5,
        rope=Rope(theta=10_000.0),
        context_tokens=512,
        tied_embeddings=False,
    )
    return msgspec.structs.replace(config, **changes)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Llama weights, large enough that greedy answers wander instead of repeating a token."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape):
        return torch.randn(shape, generator=generator) * 0.35

    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    tensors = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden) * 3,
        "model.norm.weight": 1 + matrix(hidden) * 0.1,
    }
    if not config.tied_embeddings:
        tensors["lm_head.weight"] = matrix(config.vocab_size, hidden)
    for index in range(config.layers):
        prefix = f"model.layers.{index}."
        tensors |= {
            prefix + "input_layernorm.weight": 1 + matrix(hidden) * 0.1,
            prefix + "self_attn.q_proj.weight": matrix(queries, hidden),
            prefix + "self_attn.k_proj.weight": matrix(keys, hidden),
            prefix + "self_attn.v_proj.weight": matrix(keys, hidden),
            prefix + "self_attn.o_proj.weight": matrix(hidden, queries),
            prefix + "post_attention_layernorm.weight": 1 + matrix(hidden) * 0.1,
            prefix + "mlp.gate_proj.weight": matrix(inner, hidden),
            prefix + "mlp.up_proj.weight": matrix(inner, hidden),
            prefix + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    return tensors


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes) -> LlamaModel:
    config = tiny_config(**changes)
    return LlamaModel(config, random_tensors(config, seed), dtype)


def item(
    token_ids, start, block_table, *, sample=True, request_id="r", sampling=GREEDY, output_index=0
):
    return BatchItem(request_id, token_ids, start, block_table, sample, sampling, output_index)


def logits_of(runner: TorchRunner, batch: list[BatchItem]) -> list[torch.Tensor]:
    """Run a batch; logits `[its tokens, vocabulary]` of every item, in the batch's order."""
    step = runner.lay_out(batch)
    rows = torch.arange(len(step.token_ids))
    logits = runner.forward(step._replace(logit_rows=rows))
    pieces = logits.split(step.attention.query_lens)
    # Items are laid out by length and context; where each went is told by its first slot.
    by_slot = {
        int(step.attention.slot_mapping[int(first)]): piece
        for first, piece in zip(step.attention.query_start_loc, pieces, strict=False)
    }
    size = runner.block_size
    return [
        by_slot[entry.block_table[entry.start // size] * size + entry.start % size]
        for entry in batch
    ]
