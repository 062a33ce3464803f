"""Build an engine from settings: load the model, size the pool, assemble the parts."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from cluster.blocks import Namespace
from cluster.protocol import ModelInfo
from cluster.settings import WorkerSettings
from worker.attention.registry import attention_backend
from worker.decode_graphs import CudaCapture
from worker.emulator import EMULATED, build_emulated
from worker.engine import EngineCore
from worker.engine_config import EngineConfig
from worker.eviction.registry import parse_eviction
from worker.first_speed import first_speed
from worker.kv_memory import blocks_that_fit, kv_block_bytes
from worker.messages import EngineInfo
from worker.models.config import ModelConfig
from worker.models.llama import LlamaModel
from worker.runner import TorchRunner
from worker.step_memory import StepLimits, graph_bytes, splits_of_sizes, step_bytes
from worker.tiers.opening import open_tiers
from worker.weights import LoadedModel, load_model, resolve_device, resolve_dtype

log = logging.getLogger(__name__)


def build_engine(settings: WorkerSettings) -> tuple[EngineCore, EngineInfo]:
    """An engine ready for requests, and its description for others.

    Raises ModelError if the model cannot be used, ValueError for invalid settings, MemoryError if
    the pool does not fit.
    """
    if settings.model.startswith(EMULATED):
        return build_emulated(settings)
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    if device.type == "cpu":
        torch.set_num_threads(settings.threads)
    loaded = load_model(settings.model, dtype, settings.cache_dir)
    model = LlamaModel(loaded.config, loaded.tensors, dtype, device)
    context_tokens = loaded.config.context_tokens
    if settings.context_tokens:
        context_tokens = min(context_tokens, settings.context_tokens)
    kv_blocks = settings.kv_blocks or blocks_that_fit(
        loaded.config,
        settings.block_size,
        dtype,
        device,
        settings.kv_memory_share,
        _reserved_bytes(settings, loaded.config, dtype, device, context_tokens),
    )
    config = EngineConfig(
        block_size=settings.block_size,
        capacity_blocks=kv_blocks,
        context_tokens=context_tokens,
        max_batch_size=settings.max_batch_size,
        token_budget=settings.token_budget,
        chunk_tokens=settings.chunk_tokens,
        max_waiting=settings.max_waiting,
        eos_token_ids=loaded.eos_token_ids,
        cache_share=settings.cache_share,
        pin_share=settings.pin_share,
        embedding_rows=loaded.config.vocab_size,
    )
    runner = TorchRunner(model, kv_blocks, settings.block_size, settings.attention)
    if device.type == "cuda" and settings.cuda_graphs and runner.replayable_decodes:
        runner.capture_decodes(settings.max_batch_size, config.sequence_limit, CudaCapture())
    fields = of_weights(loaded, dtype, settings.block_size)
    prefill = first_speed(
        runner,
        settings.block_size,
        config.sequence_limit,
        config.chunk_limit,
        time.perf_counter,
    )
    tiers = open_tiers(settings, runner, fields["namespace"], kv_blocks, prefill)
    make_policy = parse_eviction(settings.eviction)
    core = EngineCore(config, runner, make_policy=make_policy, tiers=tiers)
    info = EngineInfo(
        model=ModelInfo(
            model=settings.served_name or loaded.name,
            context_tokens=config.sequence_limit,
            **fields,
        ),
        capacity_blocks=kv_blocks,
        context_tokens=config.sequence_limit,
        max_batch_size=settings.max_batch_size,
        token_budget=settings.token_budget,
        device=_name_of(device),
        kv_bytes_a_token=kv_block_bytes(loaded.config, settings.block_size, dtype)
        // settings.block_size,
        prefill=prefill,
    )
    log.info(
        "%s on %s in %s: %d KV blocks of %d tokens (%.0f MiB), context %d tokens",
        info.model.model,
        info.device,
        info.model.namespace.kv_dtype,
        kv_blocks,
        settings.block_size,
        kv_blocks * settings.block_size * info.kv_bytes_a_token / 2**20,
        info.context_tokens,
    )
    return core, info


def _reserved_bytes(
    settings: WorkerSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    context_tokens: int,
) -> int:
    """Device memory to reserve for steps; 0 on a CPU, whose pool is small anyway."""
    if device.type != "cuda":
        return 0
    limits = StepLimits(
        settings.token_budget,
        min(settings.max_batch_size, settings.token_budget),
        -(-context_tokens // settings.block_size),
    )
    step, graphs = step_bytes(config, dtype, limits), 0
    # called first: it explains what to do if triton is missing
    backend = attention_backend(settings.attention, device)
    if settings.cuda_graphs and backend.replayable_decodes:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        splits = splits_of_sizes(config, settings.max_batch_size, context_tokens, processors)
        graphs = graph_bytes(config, dtype, limits, splits)
    log.info(
        "memory reserved for steps: %.0f MiB, for CUDA graphs: %.0f MiB",
        step / 2**20,
        graphs / 2**20,
    )
    return step + graphs


def of_weights(loaded: LoadedModel, dtype: torch.dtype, block_size: int) -> dict[str, Any]:
    """The fields of a ModelInfo that follow from the files of a model."""
    return {
        "namespace": Namespace(
            weights=loaded.weights_digest,
            tokenizer=loaded.tokenizer_digest,
            kv_dtype=str(dtype).removeprefix("torch."),
            block_size=block_size,
            positions=loaded.config.positions,
        ),
        "tokenizer_json": loaded.tokenizer_json,
        "chat_template": loaded.chat_template,
        "tool_chat_template": loaded.tool_chat_template,
        "special_tokens": loaded.special_tokens,
        "add_bos": loaded.add_bos,
        "embedding_rows": loaded.config.vocab_size,
    }


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda:{device.index or 0} {torch.cuda.get_device_name(device)}"
    return device.type
