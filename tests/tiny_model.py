"""A tiny random Llama as a Hugging Face directory: real weights, tokenizer and chat template.

It answers with nonsense, but deterministically and quickly, and goes through all the code that a
real model goes through.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONTEXT_TOKENS = 2048


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>", "<|pad|>"])
    return tokenizer


def write_tiny_llama(directory: Path, seed: int = 0) -> Path:
    """Write the model; another seed gives other weights. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    vocabulary, hidden, heads, kv_heads, middle = tokenizer.get_vocab_size(), 32, 4, 2, 64
    head_dim = hidden // heads
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {
        "model.embed_tokens.weight": weight(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": weight(vocabulary, hidden),
    }
    for index in range(2):
        layer = f"model.layers.{index}."
        tensors |= {
            layer + "input_layernorm.weight": torch.ones(hidden),
            layer + "post_attention_layernorm.weight": torch.ones(hidden),
            layer + "self_attn.q_proj.weight": weight(hidden, hidden),
            layer + "self_attn.k_proj.weight": weight(kv_heads * head_dim, hidden),
            layer + "self_attn.v_proj.weight": weight(kv_heads * head_dim, hidden),
            layer + "self_attn.o_proj.weight": weight(hidden, hidden),
            layer + "mlp.gate_proj.weight": weight(middle, hidden),
            layer + "mlp.up_proj.weight": weight(middle, hidden),
            layer + "mlp.down_proj.weight": weight(hidden, middle),
        }
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": middle,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|end|>"})
    )
    return directory
