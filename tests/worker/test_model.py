"""Our logits against those of `transformers`, through the paged pool."""

import json
import random

import pytest
import torch

from tests.worker.tiny_models import item, logits_of, random_tensors, tiny_config, tiny_model
from worker.models import LlamaModel, ModelConfig, Rope, UnsupportedModel
from worker.runner import TorchRunner

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("LlamaConfig", {"num_key_value_heads": 1}),
    "llama-no-groups": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}


def reference(name):
    """A tiny random model of `transformers` in fp32, and its `config.json` as an object."""
    config_class, changes = CASES[name]
    config = getattr(transformers, config_class)(
        **{
            "vocab_size": 101,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "attn_implementation": "eager",
            **changes,
        }
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.3)
    raw = json.loads(config.to_json_string(use_diff=False))
    raw["architectures"] = [type(model).__name__]
    return model, raw


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name):
    """Two sequences in scattered blocks: whole prefill, chunks, suffixes and decodes together."""
    model, raw = reference(name)
    config = ModelConfig.from_hf(raw)
    runner = TorchRunner(LlamaModel(config, model.state_dict(), torch.float32), 40, 4)
    generator = random.Random(1)
    blocks = list(range(1, 41))
    generator.shuffle(blocks)
    one, two, three = (
        [generator.randrange(config.vocab_size) for _ in range(length)] for length in (50, 31, 18)
    )
    tables = [blocks[:13], blocks[13:21], blocks[21:26]]
    sequences = [one, two, three]
    with torch.no_grad():
        expected = [model(torch.tensor([tokens])).logits[0] for tokens in sequences]
    # Each step: (sequence, first token, last token). Chunk of 7, of 1, over block edges, decodes.
    steps = [
        [(0, 0, 7), (1, 0, 31)],
        [(0, 7, 8), (2, 0, 15)],
        [(2, 15, 16), (0, 8, 24)],
        [(0, 24, 47), (2, 16, 17)],
        [(0, 47, 48), (2, 17, 18)],
        [(0, 48, 49)],
        [(0, 49, 50)],
    ]
    for step in steps:
        batch = [
            item(sequences[which][first:last], first, tables[which]) for which, first, last in step
        ]
        for (which, first, last), logits in zip(step, logits_of(runner, batch), strict=True):
            torch.testing.assert_close(
                logits,
                expected[which][first:last],
                atol=2e-4,
                rtol=2e-5,
            )


def test_a_suffix_on_another_sequences_blocks_equals_computing_all():
    """The point of it all: blocks that one sequence wrote serve another with the same stem."""
    model = tiny_model()
    runner = TorchRunner(model, 20, 4)
    stem, tail = list(range(1, 13)), [40, 41, 42, 43, 44]
    logits_of(runner, [item([*stem, 7, 7], 0, [9, 3, 14, 5])])
    reused = logits_of(runner, [item(tail, 12, [9, 3, 14, 1, 2])])[0]
    whole = logits_of(runner, [item([*stem, *tail], 0, [11, 12, 13, 15, 16])])[0][12:]
    torch.testing.assert_close(reused, whole, atol=1e-4, rtol=1e-5)


def test_bfloat16_stays_near_float32():
    tokens = list(range(1, 30))
    full = logits_of(TorchRunner(tiny_model(), 8, 4), [item(tokens, 0, list(range(1, 9)))])[0]
    half_model = tiny_model(dtype=torch.bfloat16)
    half = logits_of(TorchRunner(half_model, 8, 4), [item(tokens, 0, list(range(1, 9)))])[0]
    assert half.dtype == torch.float32
    correlation = torch.corrcoef(torch.stack([full.flatten(), half.flatten()]))[0, 1]
    assert correlation > 0.999


def test_a_sliding_window_bounds_the_context():
    _, raw = reference("mistral")
    assert ModelConfig.from_hf({**raw, "sliding_window": 64}).context_tokens == 64
    assert ModelConfig.from_hf(raw).context_tokens == 256
    _, raw = reference("qwen2")
    unused = {**raw, "sliding_window": 64, "use_sliding_window": False}
    assert ModelConfig.from_hf(unused).context_tokens == 256


def test_the_older_spelling_of_rope_is_read():
    _, raw = reference("llama")
    del raw["rope_parameters"]
    config = ModelConfig.from_hf({**raw, "rope_theta": 500.0, "rope_scaling": LLAMA3})
    assert config.rope == ModelConfig.from_hf(reference("llama-3-rope")[1]).rope


def test_position_schemes_differ_where_rotations_differ():
    ropes = [
        Rope(theta=10_000.0),
        Rope(theta=100_000.0),
        Rope(theta=10_000.0, kind="linear", factor=2.0),
        Rope(theta=10_000.0, kind="llama3", factor=2.0),
        Rope(theta=10_000.0, kind="factors", factors=(1.0, 2.0)),
    ]
    assert len({rope.scheme for rope in ropes}) == len(ropes)
    assert ropes[1].scheme == "rope:100000.0"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel is not supported.*Llama"),
        ({"architectures": None}, "names none"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial rotary"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_key_value_heads": 3}, "multiple of KV heads"),
    ],
)
def test_what_cannot_run_is_refused_in_words(change, message):
    _, raw = reference("llama")
    with pytest.raises(UnsupportedModel, match=message):
        ModelConfig.from_hf({**raw, **change})


def test_weights_that_do_not_fit_the_configuration_are_refused():
    config = tiny_config()
    tensors = random_tensors(config)
    missing = {name: tensor for name, tensor in tensors.items() if "1.mlp.up" not in name}
    with pytest.raises(UnsupportedModel, match=r"lack the tensor model\.layers\.1\.mlp\.up_proj"):
        LlamaModel(config, missing, torch.float32)
    with pytest.raises(UnsupportedModel, match=r"does not use, such as extra\.weight"):
        LlamaModel(config, {**tensors, "extra.weight": torch.ones(1)}, torch.float32)
    with pytest.raises(UnsupportedModel, match=r"lm_head\.weight has the shape \(2, 2\)"):
        LlamaModel(config, {**tensors, "lm_head.weight": torch.ones(2, 2)}, torch.float32)


def test_the_model_keeps_no_hold_on_the_loaded_tensors():
    """They are mapped from files that may change under a running worker."""
    config = tiny_config()
    tensors = random_tensors(config)
    model = LlamaModel(config, tensors, torch.float32)
    before = logits_of(TorchRunner(model, 4, 4), [item([1, 2, 3], 0, [1])])[0]
    for tensor in tensors.values():
        tensor.zero_()
    after = logits_of(TorchRunner(model, 4, 4), [item([1, 2, 3], 0, [1])])[0]
    assert torch.equal(before, after)


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": True}, {"qkv_bias": True}])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_adopted_weights_give_the_other_models_logits(changes, stored):
    """Whatever layout they are in, also another than before."""
    config = tiny_config(**changes)

    def model(seed, **options):
        tensors = random_tensors(config, seed)
        if config.qkv_bias:
            for layer in range(config.layers):
                for name, heads in (("q", config.query_heads), ("k", config.kv_heads)):
                    bias = torch.full((heads * config.head_dim,), float(seed + layer))
                    tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias
                bias = torch.full((config.kv_heads * config.head_dim,), 0.5)
                tensors[f"model.layers.{layer}.self_attn.v_proj.bias"] = bias
        if seed:
            tensors = {name: tensor.to(stored) for name, tensor in tensors.items()}
        return LlamaModel(config, tensors, torch.float32, **options)

    def logits(model):
        return logits_of(TorchRunner(model, 8, 4), [item([5, 6, 7], 0, [2])])[0]

    mine, theirs = model(0), model(1)
    assert not torch.allclose(logits(mine), logits(theirs), atol=0.1)
    with torch.inference_mode():
        mine.adopt(theirs)
    assert torch.equal(logits(mine), logits(theirs))


def test_weights_for_another_device_have_its_layout():
    """A model prepared on the CPU for one on a GPU is not in the CPU's own layout."""
    config = tiny_config()
    plain = LlamaModel(config, random_tensors(config), torch.float32, runs_on=torch.device("cuda"))
    assert all(tensor.layout == torch.strided for tensor in plain.parameters())
