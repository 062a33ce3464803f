"""The demo model itself: its tokenizer, its logits beside `transformers`, a sensible answer."""

import shutil

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from tests.worker.tiny_models import item, logits_of
from worker.models import LlamaModel
from worker.runner import TorchRunner
from worker.weights import MissingModel, demo_model_file, load_model

TEXT = "In 1969, Apollo 11 landed on the Moon.\n\n  def f(x):\n\treturn x**2  # naïve 你好 👍🏽"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Cache directory in which the model has been converted to fp32."""
    try:
        demo_model_file()
    except MissingModel as error:
        pytest.skip(str(error))
    torch.set_num_threads(1)
    cache = tmp_path_factory.mktemp("cache")
    load_model("smollm2", torch.float32, cache)
    yield cache
    shutil.rmtree(cache)  # half a gigabyte that pytest would keep


@pytest.fixture(scope="module")
def loaded(directory):
    return load_model("smollm2", torch.float32, directory)


@pytest.fixture(scope="module")
def runner(loaded):
    return TorchRunner(LlamaModel(loaded.config, loaded.tensors, torch.float32), 64, 16)


def test_what_the_file_says_of_itself(loaded):
    config = loaded.config
    assert (config.layers, config.hidden_size, config.query_heads, config.kv_heads) == (
        30,
        576,
        9,
        3,
    )
    assert config.vocab_size == 49152
    assert config.tied_embeddings
    assert config.positions == "rope:100000.0"
    assert loaded.name == "smollm2"
    assert loaded.special_tokens["eos_token"] == "<|im_end|>"
    assert loaded.eos_token_ids == [0, 2]


def test_the_tokenizer_splits_digits_and_knows_the_chat_marks(loaded):
    tokenizer = Tokenizer.from_str(loaded.tokenizer_json)
    encoded = tokenizer.encode("<|im_start|>user\n2024<|im_end|>", add_special_tokens=False)
    assert encoded.tokens == ["<|im_start|>", "user", "Ċ", "2", "0", "2", "4", "<|im_end|>"]
    assert (encoded.ids[0], encoded.ids[-1]) == (1, 2)
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == TEXT
    assert max(ids) < loaded.config.vocab_size


def test_logits_equal_those_of_transformers(loaded, runner, directory):
    transformers = pytest.importorskip("transformers")
    (converted,) = (directory / "converted").iterdir()
    model = transformers.AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    ids = Tokenizer.from_str(loaded.tokenizer_json).encode(TEXT, add_special_tokens=False).ids
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    table = [7, 3, 9, 1]
    first = logits_of(runner, [item(ids[:19], 0, table)])[0]
    last = logits_of(runner, [item(ids[19:], 19, table)])[0]
    ours = torch.cat([first, last])
    torch.testing.assert_close(ours, expected, atol=2e-3, rtol=1e-4)
    assert torch.equal(ours.argmax(dim=1), expected.argmax(dim=1))


def test_a_greedy_answer_to_a_chat_is_sensible_english(loaded, runner):
    tokenizer = Tokenizer.from_str(loaded.tokenizer_json)
    prompt = jinja2.Template(loaded.chat_template).render(
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
    )
    tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    length = len(tokens)
    table = list(range(20, 30))
    tokens += runner.execute([item(tokens, 0, table)])
    while tokens[-1] not in loaded.eos_token_ids:
        assert len(tokens) < length + 30, tokenizer.decode(tokens[length:])
        tokens += runner.execute([item(tokens[-1:], len(tokens) - 1, table)])
    assert tokenizer.decode(tokens[length:]) == "The capital of France is Paris."
