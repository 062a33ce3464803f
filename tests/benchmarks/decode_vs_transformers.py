"""Decode and prefill throughput against `transformers`: same weights, fp32, one thread.

Both of its ways are measured, padded `generate` and continuous batching (`generate_batch`), and
the quicker one at each batch size is what we compare with. The engines take turns, round by
round; the value is the median over the rounds of the decode ratio at batch 8.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import time
from pathlib import Path

import torch

from tests.benchmarks.decoding import (
    BATCH_SIZES,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    ROUNDS,
    Timing,
    agreement,
    our_engine,
    prompts,
    time_ours,
)
from worker.weights import MissingModel, load_model

NAME = "decode_vs_transformers"
BAR = 1.5
BAR_BATCH = 8


def run() -> int:
    """Exit code: 0 met, 1 missed, 2 could not run."""
    try:
        import transformers

        load_model("smollm2", torch.float32)
    except (ModuleNotFoundError, MissingModel) as error:
        print(f"{NAME}: could not run: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    theirs = Transformers(transformers)
    core = our_engine("float32")
    print(
        f"SmolLM2-135M, fp32, 1 thread, prompts of {PROMPT_TOKENS} tokens, {OUTPUT_TOKENS} outputs; "
        f"transformers {transformers.__version__}, torch {torch.__version__}"
    )
    time_ours(core, prompts(2, 1), 3)
    theirs.generate(prompts(2, 1), 3)
    at_bar = 0.0
    for batch_size in BATCH_SIZES:
        rounds = []
        for number in range(ROUNDS):
            batch = prompts(batch_size, 100 * batch_size + number)
            ours, padded = time_ours(core, batch), theirs.generate(batch)
            rounds.append((ours, padded))
            if number == 0:
                continuous = theirs.generate_batch(batch)
                print(f"batch {batch_size:2}: tokens: {agreement(ours.tokens, padded.tokens)}")
        padded_step = statistics.median(padded.step_s for _, padded in rounds)
        ours_step = statistics.median(ours.step_s for ours, _ in rounds)
        decode = statistics.median(padded.step_s / ours.step_s for ours, padded in rounds)
        prefill = statistics.median(padded.prefill_s / ours.prefill_s for ours, padded in rounds)
        if continuous.step_s < padded_step:
            decode = statistics.median(continuous.step_s / ours.step_s for ours, _ in rounds)
        prefill_speed = batch_size * PROMPT_TOKENS / min(ours.prefill_s for ours, _ in rounds)
        print(
            f"batch {batch_size:2}: decode {batch_size / ours_step:6.1f} tok/s, generate "
            f"{batch_size / padded_step:6.1f}, generate_batch {batch_size / continuous.step_s:6.1f}: "
            f"{decode:.2f} times the quicker; prefill {prefill_speed:.0f} tok/s, {prefill:.2f} "
            "times generate",
            flush=True,
        )
        if batch_size == BAR_BATCH:
            at_bar = decode
    print(f"{NAME}: {at_bar:.2f} (bar {BAR})")
    return 0 if at_bar >= BAR else 1


class Transformers:
    """The model in `transformers`, from the same converted directory."""

    def __init__(self, transformers) -> None:
        self._transformers = transformers
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            converted_directory(), dtype=torch.float32
        ).eval()

    def generate(self, batch: list[list[int]], outputs: int = OUTPUT_TOKENS) -> Timing:
        """Padded `generate`; all prompts are of one length, so there is no padding."""
        stamps: list[float] = []

        class Stamp(self._transformers.StoppingCriteria):
            def __call__(self, input_ids, scores, **_):
                stamps.append(time.perf_counter())
                return torch.zeros(len(input_ids), dtype=torch.bool)

        ids = torch.tensor(batch)
        start = time.perf_counter()
        answer = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=outputs,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=self._transformers.StoppingCriteriaList([Stamp()]),
        )
        gaps = [later - earlier for earlier, later in zip(stamps, stamps[1:], strict=False)]
        tokens = answer[:, len(batch[0]) :].tolist()
        return Timing(stamps[0] - start, statistics.median(gaps), tokens)

    def generate_batch(self, batch: list[list[int]]) -> Timing:
        """Continuous batching, with a cache sized for the batch as ours is."""
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
        ordered = [answers[key] for key in sorted(answers, key=lambda key: int(key.split("_")[-1]))]
        start = min(answer.created_time for answer in ordered)
        began = max(answer.timestamps[0] for answer in ordered)
        later = sorted(
            {stamp for answer in ordered for stamp in answer.timestamps if stamp >= began}
        )
        steps = [second - first for first, second in zip(later, later[1:], strict=False)]
        # Tokens of one step are stamped one after the other; only gaps between steps count.
        longest = max(steps)
        gaps = [step for step in steps if step > longest / 4]
        return Timing(
            began - start,
            statistics.median(gaps),
            [list(answer.generated_tokens) for answer in ordered],
        )


def converted_directory() -> Path:
    """Where `load_model` put the demo model's fp32 weights."""
    found = sorted((Path.home() / ".cache" / "stemroute" / "converted").glob("*-float32"))
    if not found:
        raise MissingModel("the converted weights are not in ~/.cache/stemroute")
    return found[-1]
