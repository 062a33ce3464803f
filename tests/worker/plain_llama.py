"""A Llama in forty lines that knows no cache, no blocks and no batch: the reference for answers.

It shares no code with `worker.models`, `worker.attention` and the sampler, but for the number that
a seed and a place among the outputs mean.
"""

from __future__ import annotations

import torch

from cluster.protocol import Sampling
from worker.models import ModelConfig
from worker.sampler import uniform


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x is `[tokens, heads, head_dim]`, token p at position p."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(len(x), dtype=torch.float32)[:, None, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    turned_first = first * angles.cos() - second * angles.sin()
    return torch.cat((turned_first, second * angles.cos() + first * angles.sin()), dim=-1)


@torch.inference_mode()
def all_logits(
    config: ModelConfig, tensors: dict[str, torch.Tensor], tokens: list[int]
) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of one sequence, computed from its start in one go."""
    count, groups = len(tokens), config.query_heads // config.kv_heads
    future = torch.ones(count, count).triu(1).bool()
    x = tensors["model.embed_tokens.weight"][torch.tensor(tokens)]
    for index in range(config.layers):
        layer = f"model.layers.{index}."

        def weight(name: str, layer: str = layer) -> torch.Tensor:
            return tensors[layer + name + ".weight"]

        y = normed(x, weight("input_layernorm"), config.rms_eps)
        query, key, value = (
            (y @ weight(f"self_attn.{name}_proj").T).view(count, -1, config.head_dim)
            for name in "qkv"
        )
        query, key = rotated(query, config.rope.theta), rotated(key, config.rope.theta)
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / config.head_dim**0.5
        shares = scores.masked_fill(future, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares, value).reshape(count, -1)
        x = x + attended @ weight("self_attn.o_proj").T
        y = normed(x, weight("post_attention_layernorm"), config.rms_eps)
        gate = torch.nn.functional.silu(y @ weight("mlp.gate_proj").T)
        x = x + (gate * (y @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T
    return normed(x, tensors["model.norm.weight"], config.rms_eps) @ tensors["lm_head.weight"].T


ROUNDING = 1e-4
"""Logits of two ways to compute in fp32 differ by less; so do cumulative probabilities."""


def first_difference(
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    prompt: list[int],
    answer: list[int],
    sampling: Sampling,
) -> int | None:
    """Index of the first token of `answer` that the reference would not have given; else None.

    Each place is judged after the tokens before it, so None means that the reference alone gives
    this answer. Greedy: the greatest logit. Sampled: the token whose share of the cumulative
    distribution holds the number drawn for this place. Within rounding both neighbours are right.
    """
    logits = all_logits(config, tensors, prompt + answer)[len(prompt) - 1 : -1].double()
    for index, token in enumerate(answer):
        row = logits[index]
        if sampling.temperature == 0:
            right = row[token] >= row.max() - ROUNDING
        else:
            shares = (row / sampling.temperature).softmax(-1)
            end = shares.cumsum(-1)[token]
            number = uniform(sampling.seed or 0, index)
            right = end - shares[token] - ROUNDING <= number <= end + ROUNDING
        if not right:
            return index
    return None
