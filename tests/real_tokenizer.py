"""The demo model's tokenizer and chat template, without its weights."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple


class RealTokenizer(NamedTuple):
    """As in `ModelInfo`."""

    tokenizer_json: str
    chat_template: str


@cache
def smollm2() -> RealTokenizer:
    """Raises worker.weights.MissingModel where the model's package is not installed."""
    from worker.gguf_tokenizer import build_tokenizer
    from worker.gguf_weights import GgufFile
    from worker.weights import demo_model_file

    metadata = GgufFile(demo_model_file())
    template = metadata.need("tokenizer.chat_template")
    return RealTokenizer(build_tokenizer(metadata).to_str(), template)
