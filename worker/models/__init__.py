"""Models of the Llama family: Llama, Mistral, Qwen2, Qwen3 (dense), SmolLM2."""

from worker.models.config import ModelConfig, ModelError, Rope, UnsupportedModel
from worker.models.llama import LlamaModel

__all__ = ["LlamaModel", "ModelConfig", "ModelError", "Rope", "UnsupportedModel"]
