"""Throughput on a GPU, and the rates of the device that bound it."""

from __future__ import annotations

import statistics
import time

import torch

from tests.gpu.floors import DeviceRates, Speed, cost_of, decode_speed, prefill_speed
from tests.worker.tiny_models import item
from worker.decode_graphs import CudaCapture
from worker.kv_memory import blocks_that_fit
from worker.models import LlamaModel
from worker.runner import TorchRunner

BATCHES = (1, 8, 64, 256)
CONTEXT = 1024
PROMPTS = (1024, 8192)
BLOCK = 16
STEPS = 32
REPEATS = 7
COPY_BYTES = 1 << 30
MATRIX = 8192


def device_rates(dtype: torch.dtype) -> DeviceRates:
    """Measured: copying a GiB, and multiplying large matrices in `dtype`."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = event_seconds(lambda: target.copy_(source))
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda").to(dtype) for _ in range(2))
    product_s = event_seconds(lambda: torch.mm(left, right))
    return DeviceRates(2 * COPY_BYTES / copy_s, 2 * MATRIX**3 / product_s)


def event_seconds(work) -> float:
    """Median of some runs on the device."""
    work()
    seconds = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return statistics.median(seconds)


def throughput(model: LlamaModel, rates: DeviceRates) -> tuple[list[Speed], list[str]]:
    """Decoding at several batch sizes and prefilling prompts; what was left out, and why.

    Times are the host's, from batch to tokens. Prompts are computed in one step.
    """
    cost, left_out = cost_of(model), []
    longest = model.config.context_tokens
    context = min(CONTEXT, longest - STEPS - 8)
    blocks_each = -(-(context + STEPS + 8) // BLOCK)
    fitting = blocks_that_fit(model.config, BLOCK, model.dtype, model.device, 0.7)
    most = max(max(BATCHES) * blocks_each, -(-max(PROMPTS) // BLOCK))
    blocks = min(fitting, most)
    runner = TorchRunner(model, blocks, BLOCK)
    runner.capture_decodes(max(BATCHES), longest, CudaCapture())
    speeds = []
    for batch in BATCHES:
        if batch * blocks_each > blocks:
            left_out.append(f"decode at batch {batch}: the pool holds only {blocks} blocks")
            continue
        step_s = decode_seconds(runner, batch, context, blocks_each)
        speeds.append(decode_speed(cost, rates, batch, context + STEPS // 2, step_s))
    for tokens in PROMPTS:
        if tokens > min(longest, blocks * BLOCK):
            left_out.append(f"prefill of {tokens} tokens: longer than the context or the pool")
            continue
        speeds.append(prefill_speed(cost, rates, tokens, prefill_seconds(runner, tokens)))
    return speeds, left_out


def decode_seconds(runner: TorchRunner, batch: int, context: int, blocks_each: int) -> float:
    """Median time of a step of `batch` decodes after `context` tokens."""
    tables = [
        list(range(1 + index * blocks_each, 1 + (index + 1) * blocks_each))
        for index in range(batch)
    ]
    seconds = []
    for step in range(STEPS + 4):
        entries = [item([1 + index], context + step, table) for index, table in enumerate(tables)]
        begin = time.perf_counter()
        runner.execute(entries)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[4:])


def prefill_seconds(runner: TorchRunner, tokens: int) -> float:
    """Median time of one step that computes a prompt of `tokens` tokens."""
    vocabulary = runner.model.config.vocab_size
    prompt = [index % vocabulary for index in range(tokens)]
    table = list(range(1, 1 + -(-tokens // BLOCK)))
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        runner.execute([item(prompt, 0, table)])
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])
