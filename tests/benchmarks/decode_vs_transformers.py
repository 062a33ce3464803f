"""Decode and prefill throughput against `transformers`: same weights, fp32, one thread.

Both load one directory, so every weight has the same value, and both compute in fp32. How they keep
the weights in memory differs: `transformers` in fp32, our engine in fp16 where that changes no
value, which for this model is every matrix.

The engines take turns step by step (`decoding.in_turns`) on prompts of equal length, which padded
`generate` likes best; the value is the median ratio of decode steps at batch 8. At that batch its
continuous batching (`generate_batch`) is measured too, and is what counts where it is quicker.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from tests.benchmarks.decoding import (
    BATCH_SIZES,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    agreement,
    in_turns,
    our_engine,
    prompts,
    ratio,
)
from worker.weights import DEMO_MODEL, MissingModel, converted_directory, load_model

NAME = "decode_vs_transformers"
BAR = 1.5
BAR_BATCH = 8


def run() -> int:
    """Exit code: 0 met, 1 missed, 2 could not run."""
    try:
        import transformers

        digest = load_model(DEMO_MODEL, torch.float32).weights_digest
    except (ModuleNotFoundError, MissingModel) as error:
        print(f"{NAME}: could not run: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    cache = Path.home() / ".cache" / "stemroute"
    theirs = Transformers(transformers, converted_directory(digest, torch.float32, cache))
    core = our_engine("float32")
    print(
        f"SmolLM2-135M, fp32, 1 thread, {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} output tokens; "
        f"transformers {transformers.__version__}, torch {torch.__version__}. Equal values of the "
        "weights, kept in fp32 by transformers and, where that changes none, in fp16 by ours"
    )
    warm = prompts(2, 1)
    in_turns(core, warm, theirs.generate(warm, 3), 3)
    at_bar = 0.0
    for size in BATCH_SIZES:
        batch = prompts(size, size)
        ours, padded = in_turns(core, batch, theirs.generate(batch))
        decode = ratio(ours, padded)
        prefilled = size * PROMPT_TOKENS
        print(
            f"batch {size:2}: decode {size / ours.decode_s:6.1f} tok/s against "
            f"{size / padded.decode_s:6.1f}, {decode:.2f} times; prefill "
            f"{prefilled / ours.prefill_s:4.0f} tok/s against {prefilled / padded.prefill_s:4.0f}; "
            f"{agreement(ours, padded)}",
            flush=True,
        )
        if size == BAR_BATCH:
            at_bar = decode
            step_s = theirs.continuous_step_s(batch)
            print(f"          generate_batch: decode {size / step_s:6.1f} tok/s", flush=True)
            if step_s < padded.decode_s:
                at_bar = step_s / ours.decode_s
    print(f"{NAME}: {at_bar:.2f} (bar {BAR})")
    return 0 if at_bar >= BAR else 1


class Transformers:
    """The model in `transformers`, from the directory that our engine has loaded."""

    def __init__(self, transformers: ModuleType, directory: Path) -> None:
        self._transformers = transformers
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        ).eval()

    def generate(
        self, batch: list[list[int]], outputs: int = OUTPUT_TOKENS
    ) -> Callable[[Callable[[], None]], list[list[int]]]:
        """`generate` on the batch, calling back after every token."""

        class AfterStep(self._transformers.StoppingCriteria):  # type: ignore[misc, name-defined]
            def __init__(self, on_step: Callable[[], None]) -> None:
                self._on_step = on_step

            def __call__(self, input_ids, scores, **_):  # type: ignore[no-untyped-def]
                self._on_step()
                return torch.zeros(len(input_ids), dtype=torch.bool)

        def body(on_step: Callable[[], None]) -> list[list[int]]:
            torch.set_num_threads(1)  # OpenMP counts them for each thread that calls torch
            ids = torch.tensor(batch)
            answer = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=outputs,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=self._transformers.StoppingCriteriaList([AfterStep(on_step)]),
            )
            tokens: list[list[int]] = answer[:, len(batch[0]) :].tolist()
            return tokens

        return body

    def continuous_step_s(self, batch: list[list[int]]) -> float:
        """Median seconds of a decode step of continuous batching, with a cache as large as ours."""
        with contextlib.redirect_stderr(io.StringIO()):
            answers = self._model.generate_batch(
                inputs=batch,
                generation_config=self._transformers.GenerationConfig(
                    max_new_tokens=OUTPUT_TOKENS, do_sample=False, eos_token_id=-1
                ),
                continuous_batching_config=self._transformers.ContinuousBatchingConfig(
                    num_blocks=2 * len(batch) + 8, max_batch_tokens=2048
                ),
                record_timestamps=True,
                progress_bar=False,
            )
        # One sequence's tokens, from when all had begun.
        began = max(answer.timestamps[0] for answer in answers.values())
        stamps = [s for s in next(iter(answers.values())).timestamps if s >= began]
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(stamps))
