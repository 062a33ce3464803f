"""Decode and prefill throughput against llama.cpp (`xllamacpp`) on the same GGUF file, one thread.

llama.cpp computes with the file's 4-bit weights (5 bits with their scales); we keep them in fp16,
where there is hardware for it, and read three times as many bytes a step. So this has no bar: it
says where we stand. The value is our decode throughput at batch 8 over llama.cpp's. The runs follow
each other, batch size by batch size.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.benchmarks.decoding import (
    BATCH_SIZES,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Run,
    our_engine,
    prompts,
    steps_of_ours,
)
from worker.weights import MissingModel, demo_model_file

NAME = "decode_vs_llamacpp"
VALUE_BATCH = 8


def run() -> int:
    """Exit code: 0 measured, 2 could not run."""
    try:
        import xllamacpp

        file = demo_model_file()
    except ModuleNotFoundError:
        print(f"{NAME}: could not run: pip install --no-deps xllamacpp", file=sys.stderr)
        return 2
    except MissingModel as error:
        print(f"{NAME}: could not run: {error}", file=sys.stderr)
        return 2
    core = our_engine("float32")
    print(
        f"SmolLM2-135M, 1 thread, {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens; "
        "ours in fp32 on weights kept in fp16, llama.cpp in the file's Q4_1"
    )
    for _ in steps_of_ours(core, prompts(2, 1), 3):
        pass
    value = 0.0
    for size in BATCH_SIZES:
        batch = prompts(size, size)
        ours = Run([], [])
        for state in steps_of_ours(core, batch, OUTPUT_TOKENS):
            ours = state
        their_prefill_s, their_step_s = time_llamacpp(xllamacpp, file, batch)
        decode = their_step_s / ours.decode_s
        prefilled = size * PROMPT_TOKENS
        print(
            f"batch {size:2}: decode {size / ours.decode_s:6.1f} tok/s against "
            f"{size / their_step_s:6.1f}, {decode:.2f} times; prefill "
            f"{prefilled / ours.prefill_s:4.0f} tok/s against {prefilled / their_prefill_s:4.0f}",
            flush=True,
        )
        if size == VALUE_BATCH:
            value = decode
    print(f"{NAME}: {value:.2f} (bar none)")
    return 0


def time_llamacpp(xllamacpp: ModuleType, file: Path, batch: list[list[int]]) -> tuple[float, float]:
    """All prompts at once to a server with as many slots: (prefill seconds, seconds a step)."""
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel = len(batch)
    params.n_ctx = len(batch) * (PROMPT_TOKENS + OUTPUT_TOKENS + 64)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    stamps: list[list[float]] = [[] for _ in batch]
    start = time.perf_counter()
    threads = [
        threading.Thread(target=_complete, args=(server, prompt, stamps[index].append))
        for index, prompt in enumerate(batch)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del server
    # From when the last sequence had its first token until the first one ended, all decode.
    began = max(one[0] for one in stamps)
    ended = min(one[-1] for one in stamps)
    steps = [
        (within[-1] - within[0]) / (len(within) - 1)
        for within in ([s for s in one if began <= s <= ended] for one in stamps)
        if len(within) > 1
    ]
    if not steps:
        raise RuntimeError("llama.cpp never decoded all sequences at once; ask for more outputs")
    return began - start, statistics.median(steps)


def _complete(server: object, prompt: list[int], on_token: Callable[[float], object]) -> None:
    def on_chunk(chunk: dict) -> None:  # type: ignore[type-arg]
        if chunk["choices"][0]["finish_reason"] is None:
            on_token(time.perf_counter())

    request = {
        "prompt": prompt,
        "n_predict": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }
    server.handle_completions(request, on_chunk)  # type: ignore[attr-defined]
