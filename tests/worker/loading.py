"""What the tests of loading share: a byte-level vocabulary, and a cache of the test's own."""

import torch
from tokenizers import pre_tokenizers

from worker.weights import load_model

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = ["<|im_start|>", "<|im_end|>", *ALPHABET, "he", "Ġt"]
MERGES = [("h", "e"), ("Ġ", "t")]


def load(path, tmp_path, dtype=torch.float32):
    return load_model(path, dtype, tmp_path / "cache")
