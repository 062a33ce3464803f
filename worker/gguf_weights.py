"""Convert a GGUF file to a Hugging Face directory.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantised tensors are
dequantised; to fp16 if the model will be used in fp32 (`stored_dtype`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from worker.gguf_tokenizer import adds_bos, build_tokenizer, end_token_ids
from worker.models.config import ModelConfig, ModelError, UnsupportedModel

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""GGUF architecture -> architecture in `config.json`. Mistral's files are named llama."""

PERMUTED = ("llama",)
"""Architectures whose q and k rows are stored in pairs that rotate together."""

HALF_MAX = 65_504.0
"""Greatest number of fp16."""

GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufFile:
    """Metadata and tensors of a GGUF file.

    Raises ModelError if the package gguf is missing or the file is not valid GGUF.
    """

    def __init__(self, file: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ModelError(
                "reading GGUF files needs the package gguf: pip install gguf"
            ) from error
        try:
            self._reader = gguf.GGUFReader(str(file))
        except (ValueError, IndexError, OSError) as error:
            raise ModelError(f"{file} cannot be read as GGUF: {error}") from error
        self._dequantize = gguf.quants.dequantize
        self.file = file
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """Value of a metadata key, or `default`."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """Value of a metadata key. Raises UnsupportedModel if the file lacks it."""
        value = self.get(key)
        if value is None:
            raise UnsupportedModel(f"{self.file} lacks the metadata key {key}")
        return value

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor in fp32, in the shape torch would give it."""
        tensor = self.tensors[name]
        try:
            values = self._dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{name} in {self.file} is quantised as {tensor.tensor_type.name}, which the "
                "package gguf cannot dequantise"
            ) from error
        shape = tuple(int(size) for size in reversed(tensor.shape))
        # Copy if nothing was dequantised: the pages mapped from the file are read-only.
        return np.require(values, dtype=np.float32, requirements=["C", "W"]).reshape(shape)


def convert_gguf(file: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write config.json, model.safetensors, tokenizer.json and related files to `directory`."""
    source = GgufFile(file)
    parts = int(source.get("split.count", 0))
    if parts > 1:
        raise UnsupportedModel(
            f"{file} is part {int(source.get('split.no', 0)) + 1} of {parts} of a model: merge "
            "them with `llama-gguf-split --merge FIRST_PART OUT.gguf` and load that file"
        )
    raw_config = _config_of(source)
    raw_config["torch_dtype"] = str(dtype).removeprefix("torch.")
    config = ModelConfig.from_hf(raw_config)
    tokenizer = build_tokenizer(source)
    permuted = source.get("general.architecture") in PERMUTED
    tensors = {}
    for name in source.tensors:
        target = _target_name(name)
        if target is None:
            continue
        values = source.values(name)
        if permuted and ".attn_q." in name:
            values = unpermute(values, config.query_heads)
        elif permuted and ".attn_k." in name:
            values = unpermute(values, config.kv_heads)
        kept = stored_dtype(values, source.tensors[name].tensor_type.name, dtype)
        tensors[target] = torch.from_numpy(values).to(kept).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    template = source.get("tokenizer.chat_template")
    if template:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokens = source.need("tokenizer.ggml.tokens")
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos(source),
    }
    for key, field in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        index = source.get(f"tokenizer.ggml.{field}")
        if index is not None:
            tokenizer_config[key] = tokens[index]
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    _write_json(
        directory / "generation_config.json", {"eos_token_id": end_token_ids(source, tokens)}
    )
    _write_json(directory / "config.json", raw_config)


def stored_dtype(
    values: npt.NDArray[np.float32], quantisation: str, dtype: torch.dtype
) -> torch.dtype:
    """dtype in which to store a tensor of a model that will be used in `dtype`.

    For fp32, tensors in fp32 or bf16 stay so. The rest is stored in fp16, because a CPU multiplies
    by fp16 weights in half the time (`worker.models.linear`). This rounds quantised values by at
    most 2^-12 of the value: little compared with quantisation to 4 to 8 bits, but more than fp32
    does. With SmolLM2 in Q4_1 it changed logits, whose standard deviation is 2, by at most 0.03.
    """
    if dtype != torch.float32 or quantisation in ("F32", "F64"):
        return dtype
    if quantisation == "BF16":
        return torch.bfloat16
    return torch.float16 if np.abs(values).max(initial=0.0) <= HALF_MAX else dtype


def unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Reorder rows `[heads * head_dim, ...]` from interleaved to half-split rotation order.

    GGUF stores the rows of a head as 0, d/2, 1, d/2 + 1, …; Hugging Face as 0, 1, 2, …
    """
    half = values.shape[0] // heads // 2
    paired = values.reshape(heads, half, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)


def _config_of(source: GgufFile) -> dict[str, Any]:
    """The `config.json` that the metadata and tensors imply."""
    architecture = source.need("general.architecture")
    if architecture not in ARCHITECTURES or source.get(f"{architecture}.expert_count"):
        what = "mixture of experts" if architecture in ARCHITECTURES else "architecture"
        raise UnsupportedModel(
            f"{source.file} has the unsupported {what} {architecture!r}; supported are dense "
            f"models of {', '.join(ARCHITECTURES)}"
        )
    hf_architecture, model_type = ARCHITECTURES[architecture]

    def need(key: str) -> Any:
        return source.need(f"{architecture}.{key}")

    def get(key: str, default: Any = None) -> Any:
        return source.get(f"{architecture}.{key}", default)

    query_heads = need("attention.head_count")
    head_dim = get("attention.key_length", need("embedding_length") // query_heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(
            f"{source.file} has partial rotary embeddings, which are not supported"
        )
    if "token_embd.weight" not in source.tensors:
        raise UnsupportedModel(f"{source.file} has no token embeddings")
    return {
        "architectures": [hf_architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "vocab_size": int(source.tensors["token_embd.weight"].shape[1]),
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": query_heads,
        "num_key_value_heads": get("attention.head_count_kv", query_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": need("context_length"),
        "sliding_window": get("attention.sliding_window"),
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in source.tensors,
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "rope_parameters": _rope_of(source, architecture),
    }


def _rope_of(source: GgufFile, architecture: str) -> dict[str, Any]:
    theta = _shortest(source.get(f"{architecture}.rope.freq_base", 10_000.0))
    if "rope_freqs.weight" in source.tensors:
        factors = [float(value) for value in source.values("rope_freqs.weight")]
        return {"rope_type": "factors", "rope_theta": theta, "factors": factors}
    kind = source.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = _shortest(source.need(f"{architecture}.rope.scaling.factor"))
    original = source.get(f"{architecture}.rope.scaling.original_context_length")
    return {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
    }


def _shortest(value: float) -> float:
    """The decimal number that an fp32 of GGUF stands for: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _target_name(name: str) -> str | None:
    """Hugging Face name of a tensor; None for one that the configuration replaces.

    Raises UnsupportedModel for a tensor that no supported model has.
    """
    if name == "rope_freqs.weight":
        return None
    stem, _, kind = name.rpartition(".")
    if stem in GLOBAL_NAMES:
        return f"{GLOBAL_NAMES[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{kind}"
    raise UnsupportedModel(f"the GGUF file has the tensor {name}, which no supported model has")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))
