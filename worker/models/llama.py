"""The Llama family in torch: RMS norm, rotary positions, grouped-query attention, gated MLP.

All rows of a step, prefill chunks and decodes alike, go through each layer together; only attention
depends on the sequence of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch.nn.functional import rms_norm, silu

from worker.attention.base import AttentionBackend, KvPool, Rows
from worker.models.config import ModelConfig, UnsupportedModel
from worker.models.linear import Linear, Projection, quickest


class Layer(NamedTuple):
    """Weights of one layer. `qkv` stacks query, key and value rows; `gate_up` likewise."""

    attention_norm: torch.Tensor
    qkv: Projection
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Projection
    mlp_norm: torch.Tensor
    gate_up: Projection
    down: Projection


class LlamaModel:
    """A model ready to run on one device, in one dtype.

    `tensors` are named as in a Hugging Face checkpoint; they are cast and moved as needed.
    `runs_on` is the device whose layout the weights use, if it differs: for a model that is only
    loaded to be adopted by one on that device.
    Raises UnsupportedModel if a tensor is missing, unexpected or of another shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        runs_on: torch.device | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        take = _Taker(tensors, dtype, self.device, runs_on or self.device)
        hidden, head_dim = config.hidden_size, config.head_dim
        self.embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
        self.layers = [_take_layer(take, config, index) for index in range(config.layers)]
        self.norm = take("model.norm.weight", hidden)
        head = self.embedding
        if config.tied_embeddings:
            take.taken.add("lm_head.weight")
        else:
            head = take("lm_head.weight", config.vocab_size, hidden)
        self.head = take.arranged(Linear(head, None))
        take.finish()
        self._inverse_frequencies = config.rope.inverse_frequencies(head_dim).to(self.device)

    def parameters(self) -> Iterator[torch.Tensor]:
        """All weights that are plain tensors, in an order that depends on the configuration only.
        On a CPU some are missing, because projections may have a layout of their own."""
        for part in (self.embedding, self.head, self.norm, *chain.from_iterable(self.layers)):
            if isinstance(part, torch.Tensor):
                yield part
            elif isinstance(part, Linear):
                yield from (tensor for tensor in part if tensor is not None)

    def adopt(self, other: LlamaModel) -> None:
        """Take over the weights of a model of the same configuration and dtype.

        On an accelerator they are copied in place: this needs no memory for a second copy, and the
        tensors' addresses stay valid. On the host both models then share them in their layout.
        Raises ValueError if `other` has another shape.
        """
        if (self.config, self.dtype) != (other.config, other.dtype):
            raise ValueError("only a model of the same configuration and dtype can be adopted")
        if self.device.type == other.device.type == "cpu":
            self.embedding, self.layers = other.embedding, other.layers
            self.norm, self.head = other.norm, other.head
        else:
            for mine, theirs in zip(self.parameters(), other.parameters(), strict=True):
                mine.copy_(theirs)

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        pools: list[KvPool],
        backend: AttentionBackend[object],
        plan: object,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """One step.

        token_ids, positions  [rows]
        pools                 per layer; the rows' keys and values are written to them
        plan                  of `backend`, for these rows
        logit_rows            [sampled] rows whose next token is sampled
        Returns logits        [sampled, vocabulary] in fp32
        """
        config = self.config
        rows = len(token_ids)
        rotated_heads = config.query_heads + config.kv_heads
        query_size = config.query_heads * config.head_dim
        key_size = config.kv_heads * config.head_dim
        angles = positions[:, None].float() * self._inverse_frequencies
        cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
        x = self.embedding.index_select(0, token_ids)
        for layer, pool in zip(self.layers, pools, strict=True):
            qkv = layer.qkv(self._normed(x, layer.attention_norm))
            heads = qkv[:, : query_size + key_size].view(rows, rotated_heads, config.head_dim)
            if layer.query_norm is not None and layer.key_norm is not None:
                query = self._normed(heads[:, : config.query_heads], layer.query_norm)
                key = self._normed(heads[:, config.query_heads :], layer.key_norm)
                heads = torch.cat((query, key), dim=1)
            heads = _rotate(heads, cos, sin)
            value = qkv[:, query_size + key_size :].view(rows, config.kv_heads, config.head_dim)
            attended = backend.attend(
                Rows(heads[:, : config.query_heads], heads[:, config.query_heads :], value),
                pool,
                plan,
            )
            x = x + layer.output(attended.reshape(rows, query_size))
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(silu(gate) * up)
        return self.head(self._normed(x.index_select(0, logit_rows), self.norm)).float()

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.shape, weight, self.config.rms_eps)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + head_dim / 2) of `[rows, heads, head_dim]`; computed in fp32.

    cos, sin are `[rows, 1, head_dim / 2]`.
    """
    first, second = heads.float().chunk(2, dim=-1)
    out = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return out.to(heads.dtype)


class _Taker:
    """Takes tensors by name; checks their shapes and that none is left."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        runs_on: torch.device,
    ) -> None:
        self.tensors = tensors
        self.dtype = dtype
        self.device = device
        self.runs_on = runs_on
        self.taken: set[str] = set()

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        """A copy of the tensor, because the mapped file may change or be removed."""
        return self.mapped(name, *shape).to(self.device, self.dtype, copy=True)

    def mapped(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise UnsupportedModel(f"the weights lack the tensor {name}, which config.json implies")
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(
                f"tensor {name} has the shape {tuple(tensor.shape)}, but config.json implies "
                f"{shape}"
            )
        self.taken.add(name)
        return tensor

    def linear(self, names: list[str], outs: list[int], into: int, bias: bool) -> Projection:
        """The projections with these names, stacked into one."""
        weight = torch.empty(sum(outs), into, dtype=self.dtype, device=self.device)
        stacked = torch.empty(sum(outs), dtype=self.dtype, device=self.device) if bias else None
        first = 0
        for name, out in zip(names, outs, strict=True):
            weight[first : first + out] = self.mapped(f"{name}.weight", out, into)
            if stacked is not None:
                stacked[first : first + out] = self.mapped(f"{name}.bias", out)
            first += out
        return self.arranged(Linear(weight, stacked))

    def arranged(self, plain: Linear) -> Projection:
        return quickest(plain) if self.runs_on.type == "cpu" else plain

    def finish(self) -> None:
        # Older checkpoints contain the rotary frequencies, which follow from the configuration.
        left = [
            name
            for name in sorted(self.tensors.keys() - self.taken)
            if not name.endswith("rotary_emb.inv_freq")
        ]
        if left:
            raise UnsupportedModel(
                f"the weights hold {len(left)} tensors that this architecture does not use, such "
                f"as {left[0]}"
            )


def _take_layer(take: _Taker, config: ModelConfig, index: int) -> Layer:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    return Layer(
        attention_norm=take(prefix + "input_layernorm.weight", hidden),
        qkv=take.linear(
            [attention + name for name in ("q_proj", "k_proj", "v_proj")],
            [queries, keys, keys],
            hidden,
            config.qkv_bias,
        ),
        query_norm=take(attention + "q_norm.weight", config.head_dim) if config.qk_norm else None,
        key_norm=take(attention + "k_norm.weight", config.head_dim) if config.qk_norm else None,
        output=take.linear([attention + "o_proj"], [hidden], queries, config.output_bias),
        mlp_norm=take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=take.linear(
            [mlp + "gate_proj", mlp + "up_proj"], [inner, inner], hidden, config.mlp_bias
        ),
        down=take.linear([mlp + "down_proj"], [hidden], inner, config.mlp_bias),
    )
