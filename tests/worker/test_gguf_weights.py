"""GGUF files: converted to what a Hugging Face directory holds, once, and refused in words."""

import json
import threading

import gguf
import numpy as np
import pytest
import torch

from tests.worker.loading import MERGES, VOCABULARY, load
from tests.worker.tiny_models import random_tensors, tiny_config
from worker import gguf_weights
from worker.gguf_weights import unpermute
from worker.models import LlamaModel, ModelConfig, ModelError, Rope, UnsupportedModel


def permute(tensor, heads):
    """As the converter of llama.cpp stores q and k: halves interleaved."""
    rows = tensor.shape[0]
    halves = tensor.reshape(heads, 2, rows // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    file, config, tensors, architecture="llama", extra=(), split="smollm", fill=lambda writer: None
):
    """A GGUF file of a model given by Hugging Face names; `fill` adds metadata."""
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, *[1] * (len(VOCABULARY) - 2)])
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages }}")
    fill(writer)
    names = {target: source for source, target in gguf_weights.LAYER_NAMES.items()}
    globals_ = {target: source for source, target in gguf_weights.GLOBAL_NAMES.items()}
    for name, tensor in tensors.items():
        stem, kind = name.rsplit(".", 1)
        if stem in globals_:
            target = globals_[stem]
        else:
            _, _, index, inner = stem.split(".", 3)
            target = f"blk.{index}.{names[inner]}"
        values = tensor.numpy()
        if architecture == "llama" and "q_proj" in name:
            values = permute(values, config.query_heads)
        if architecture == "llama" and "k_proj" in name:
            values = permute(values, config.kv_heads)
        writer.add_tensor(f"{target}.{kind}", np.ascontiguousarray(values))
    for name, values in extra:
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def gguf_file(tmp_path):
    config = tiny_config()
    return write_gguf(tmp_path / "tiny.gguf", config, random_tensors(config))


def test_a_gguf_file_gives_the_weights_it_was_made_of(gguf_file, tmp_path):
    loaded = load(gguf_file, tmp_path)
    assert loaded.config == tiny_config()
    expected = random_tensors(tiny_config())
    assert loaded.tensors.keys() == expected.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in expected.items())
    assert loaded.name == "tiny"
    assert loaded.chat_template == "{{ messages }}"
    assert loaded.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert loaded.eos_token_ids == [1]
    assert not loaded.add_bos


def test_a_tied_qwen2_with_biases_is_not_permuted(tmp_path):
    config = tiny_config(tied_embeddings=True, family="qwen2", qkv_bias=True)
    tensors = random_tensors(config)
    for index in range(config.layers):
        for name, heads in (("q", config.query_heads), ("k", 2), ("v", 2)):
            tensors[f"model.layers.{index}.self_attn.{name}_proj.bias"] = torch.randn(heads * 8)
    file = write_gguf(tmp_path / "tiny.gguf", config, tensors, "qwen2")
    loaded = load(file, tmp_path)
    assert loaded.config == config
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in tensors.items())
    LlamaModel(loaded.config, loaded.tensors, torch.float32)


def test_rope_factors_of_a_gguf_file_rotate_as_llama_3_does(tmp_path):
    llama3 = Rope(theta=500.0, kind="llama3", factor=8.0, original_context_tokens=64)
    plain = Rope(theta=500.0)
    factors = plain.inverse_frequencies(8) / llama3.inverse_frequencies(8)
    config = tiny_config(rope=plain)
    file = write_gguf(
        tmp_path / "tiny.gguf",
        config,
        random_tensors(config),
        extra=[("rope_freqs.weight", factors.numpy())],
    )
    rope = load(file, tmp_path).config.rope
    torch.testing.assert_close(rope.inverse_frequencies(8), llama3.inverse_frequencies(8))
    assert not torch.allclose(plain.inverse_frequencies(8), llama3.inverse_frequencies(8))


@pytest.mark.parametrize(
    ("split", "said", "expected"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("smollm", True, True),
    ],
)
def test_llama_3_begins_with_bos_where_the_file_does_not_say(tmp_path, split, said, expected):
    def fill(writer):
        if said is not None:
            writer.add_add_bos_token(said)

    config = tiny_config()
    file = write_gguf(
        tmp_path / "tiny.gguf", config, random_tensors(config), split=split, fill=fill
    )
    assert load(file, tmp_path).add_bos == expected


def test_linear_scaling_lengthens_the_context(tmp_path):
    def fill(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    config = tiny_config()
    file = write_gguf(tmp_path / "tiny.gguf", config, random_tensors(config), fill=fill)
    loaded = load(file, tmp_path).config
    assert loaded.rope == Rope(theta=10_000.0, kind="linear", factor=4.0)
    assert loaded.context_tokens == 4 * config.context_tokens


def test_the_first_part_of_a_split_file_is_refused_with_the_command_that_merges(tmp_path):
    def fill(writer):
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", 3)

    config = tiny_config()
    file = write_gguf(
        tmp_path / "tiny-00001-of-00003.gguf", config, random_tensors(config), fill=fill
    )
    with pytest.raises(UnsupportedModel) as refused:
        load(file, tmp_path)
    assert str(refused.value) == (
        f"{file} is part 1 of 3 of a model: merge them with "
        "`llama-gguf-split --merge FIRST_PART OUT.gguf` and load that file"
    )


def test_a_later_part_of_a_split_file_is_refused_likewise(tmp_path):
    """It holds tensors, and nothing of the model's metadata."""
    file = tmp_path / "tiny-00002-of-00003.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 3)
    writer.add_tensor("blk.1.attn_norm.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"part 2 of 3 of a model: merge them with"):
        load(file, tmp_path)


def test_quantised_tensors_are_dequantised(tmp_path):
    config = tiny_config()
    tensors = random_tensors(config)
    down = tensors.pop("model.layers.0.mlp.down_proj.weight")
    down = torch.nn.functional.pad(down, (0, 64 - down.shape[1]))
    packed = gguf.quants.quantize(down.numpy(), gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(str(tmp_path / "q.gguf"), "llama")
    writer.add_tensor("w", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = gguf_weights.GgufFile(tmp_path / "q.gguf").values("w")
    assert values.shape == tuple(down.shape)
    assert np.abs(values - down.numpy()).max() < np.abs(down.numpy()).max() / 127


@pytest.mark.parametrize(
    ("greatest", "quantisation", "dtype", "stored"),
    [
        (1.0, "Q4_1", torch.float32, torch.float16),
        (1.0, "F16", torch.float32, torch.float16),
        (1.0, "BF16", torch.float32, torch.bfloat16),
        (1.0, "F32", torch.float32, torch.float32),
        (70_000.0, "Q4_1", torch.float32, torch.float32),
        (1.0, "Q4_1", torch.bfloat16, torch.bfloat16),
    ],
)
def test_for_fp32_a_tensor_is_stored_in_as_many_bits_as_it_has(
    greatest, quantisation, dtype, stored
):
    values = np.array([-greatest, 0.5], dtype=np.float32)
    assert gguf_weights.stored_dtype(values, quantisation, dtype) == stored


def test_unpermuting_undoes_the_stored_order():
    values = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
    assert np.array_equal(unpermute(permute(values, 3), 3), values)
    assert unpermute(np.arange(8, dtype=np.float32), 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_a_gguf_file_is_converted_once_for_each_dtype(gguf_file, tmp_path, monkeypatch):
    first = load(gguf_file, tmp_path)
    half = load(gguf_file, tmp_path, torch.bfloat16)
    assert half.tensors["model.norm.weight"].dtype == torch.bfloat16
    assert half.weights_digest == first.weights_digest
    monkeypatch.setattr(gguf_weights, "convert_gguf", lambda *_: pytest.fail("converted again"))
    second = load(gguf_file, tmp_path)
    assert second.weights_digest == first.weights_digest
    assert second.tokenizer_digest == first.tokenizer_digest
    assert len(list((tmp_path / "cache" / "converted").iterdir())) == 2


def test_two_workers_may_convert_at_once(gguf_file, tmp_path, monkeypatch):
    """Both have begun before either is done; both succeed and nothing is left over."""
    both = threading.Barrier(2, timeout=30)
    convert = gguf_weights.convert_gguf

    def meeting(*arguments):
        both.wait()
        convert(*arguments)
        both.wait()

    monkeypatch.setattr(gguf_weights, "convert_gguf", meeting)
    loaded = []
    threads = [
        threading.Thread(target=lambda: loaded.append(load(gguf_file, tmp_path))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 2
    assert loaded[0].weights_digest == loaded[1].weights_digest
    assert [entry.is_dir() for entry in (tmp_path / "cache" / "converted").iterdir()] == [True]


def test_a_failed_conversion_leaves_nothing(gguf_file, tmp_path, monkeypatch):
    def failing(file, directory, dtype):
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(gguf_weights, "convert_gguf", failing)
    with pytest.raises(OSError, match="no space left"):
        load(gguf_file, tmp_path)
    assert list((tmp_path / "cache" / "converted").iterdir()) == []


def test_gguf_files_that_cannot_run_are_refused_in_words(tmp_path):
    config = tiny_config()
    file = write_gguf(tmp_path / "g.gguf", config, random_tensors(config), "gemma2")
    with pytest.raises(UnsupportedModel, match=r"architecture 'gemma2'; supported are dense"):
        load(file, tmp_path)
    (tmp_path / "text.gguf").write_bytes(b"not a model at all, just some text")
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        load(tmp_path / "text.gguf", tmp_path)
    write_gguf(
        tmp_path / "x.gguf",
        config,
        random_tensors(config),
        extra=[("blk.0.ssm_in.weight", np.ones((2, 2), dtype=np.float32))],
    )
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ssm_in\.weight"):
        load(tmp_path / "x.gguf", tmp_path)


# Settings


def test_the_converted_directory_is_one_that_transformers_reads(gguf_file, tmp_path):
    transformers = pytest.importorskip("transformers")
    load(gguf_file, tmp_path)
    (directory,) = (tmp_path / "cache" / "converted").iterdir()
    config = transformers.AutoConfig.from_pretrained(directory)
    assert ModelConfig.from_hf(json.loads(config.to_json_string(use_diff=False))) == tiny_config()
