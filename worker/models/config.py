"""Shape of a Llama-family model, read from the `config.json` of a Hugging Face directory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import torch


class ModelError(Exception):
    """A model that cannot be loaded. The message says why and what to do."""


class UnsupportedModel(ModelError):
    """A model that this engine cannot run. The message says why and what is supported."""


SUPPORTED = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architectures of `config.json` -> model family."""


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are computed from `theta`.

    kind "default": theta^(-2i/d). "linear": those divided by `factor`. "llama3": frequencies of
    long waves are divided by `factor`, those of short waves kept, and those between interpolated
    (Llama 3.1 model card).
    "factors": each of the d/2 frequencies is divided by its own entry of `factors`
    (the `rope_freqs` of a GGUF file).
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    factors: tuple[float, ...] = ()

    @property
    def scheme(self) -> str:
        """Position scheme in a namespace: equal text means equal rotations."""
        match self.kind:
            case "default":
                parts: list[object] = []
            case "linear":
                parts = [self.factor]
            case "llama3":
                parts = [
                    self.factor,
                    self.low_freq_factor,
                    self.high_freq_factor,
                    self.original_context_tokens,
                ]
            case "factors":
                parts = list(self.factors)
        kind = [] if self.kind == "default" else [self.kind]
        return ":".join(str(part) for part in ["rope", self.theta, *kind, *parts])

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Radians per position, `[head_dim / 2]`, fp32 on the CPU."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        plain = 1.0 / (self.theta**exponents)
        match self.kind:
            case "default":
                return plain
            case "linear":
                return plain / self.factor
            case "factors":
                return plain / torch.tensor(self.factors, dtype=torch.float32)
            case "llama3":
                waves = 2 * math.pi / plain
                low, high = self.low_freq_factor, self.high_freq_factor
                kept = (self.original_context_tokens / waves - low) / (high - low)
                kept = kept.clamp(0.0, 1.0)
                return kept * plain + (1 - kept) * plain / self.factor


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a model. Sizes are in elements.

    context_tokens  longest sequence with full attention, limited by a sliding window
    qkv_bias, output_bias, mlp_bias   which projections have a bias
    qk_norm         RMS norm of each query and key head before the rotation (Qwen3)
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: Rope
    context_tokens: int
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def positions(self) -> str:
        """Position scheme for the namespace, such as "rope:100000.0"."""
        return self.rope.scheme

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Parse the object of a `config.json`.

        Raises UnsupportedModel for another architecture, activation or rotation.
        """
        names = raw.get("architectures") or []
        family = next((SUPPORTED[name] for name in names if name in SUPPORTED), None)
        if family is None:
            raise UnsupportedModel(
                f"the architecture {', '.join(names) or 'of this config.json (it names none)'} "
                f"is not supported; supported are {', '.join(SUPPORTED)}"
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r} is not supported, only silu")
        if raw.get("quantization_config"):
            raise UnsupportedModel(
                "quantised Hugging Face weights are not supported; use the unquantised model, "
                "or its GGUF file"
            )
        try:
            query_heads = int(raw["num_attention_heads"])
            hidden_size = int(raw["hidden_size"])
            config = cls(
                family=family,
                vocab_size=int(raw["vocab_size"]),
                hidden_size=hidden_size,
                intermediate_size=int(raw["intermediate_size"]),
                layers=int(raw["num_hidden_layers"]),
                query_heads=query_heads,
                kv_heads=int(raw.get("num_key_value_heads") or query_heads),
                head_dim=int(raw.get("head_dim") or hidden_size // query_heads),
                rms_eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope=_parse_rope(raw),
                context_tokens=_context_tokens(raw, family),
                tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
                qkv_bias=family == "qwen2" or bool(raw.get("attention_bias", False)),
                output_bias=family != "qwen2" and bool(raw.get("attention_bias", False)),
                mlp_bias=bool(raw.get("mlp_bias", False)),
                qk_norm=family == "qwen3",
            )
        except KeyError as error:
            raise UnsupportedModel(f"config.json lacks {error.args[0]}") from error
        if config.query_heads % config.kv_heads or config.head_dim % 2:
            raise UnsupportedModel(
                f"{config.query_heads} query heads, {config.kv_heads} KV heads of "
                f"{config.head_dim}: query heads must be a multiple of KV heads, and the head "
                "size even"
            )
        return config


def _rope_scaling(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _parse_rope(raw: Mapping[str, Any]) -> Rope:
    """Both spellings: `rope_parameters`, and the older `rope_theta` with `rope_scaling`."""
    scaling = _rope_scaling(raw)
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if float(scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1) != 1:
        raise UnsupportedModel("partial rotary embeddings are not supported")
    match kind:
        case "default":
            return Rope(theta=theta)
        case "linear":
            return Rope(theta=theta, kind="linear", factor=float(scaling["factor"]))
        case "llama3":
            return Rope(
                theta=theta,
                kind="llama3",
                factor=float(scaling["factor"]),
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
                original_context_tokens=int(scaling["original_max_position_embeddings"]),
            )
        case "factors":
            return Rope(theta=theta, kind="factors", factors=tuple(scaling["factors"]))
        case _:
            raise UnsupportedModel(
                f"rope type {kind!r} is not supported; supported are default, linear and llama3"
            )


def _context_tokens(raw: Mapping[str, Any], family: str) -> int:
    """A sliding window limits the context, because within it attention is full.

    Linear scaling lengthens the context by its factor: `max_position_embeddings` is then what the
    model had before (documentation of `rope_scaling` in transformers), unless the configuration
    names the original length. For Llama 3's scaling it is the length after it.
    """
    context = int(raw["max_position_embeddings"])
    rope, scaling = _parse_rope(raw), _rope_scaling(raw)
    if rope.kind == "linear":
        original = scaling.get("original_max_position_embeddings") or context
        context = max(context, int(original * rope.factor))
    window = raw.get("sliding_window")
    windowed = family == "mistral" or bool(raw.get("use_sliding_window", False))
    return min(context, int(window)) if window and windowed else context
