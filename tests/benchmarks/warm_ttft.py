"""TTFT of a 1,024-token prompt whose first 1,008 tokens are cached, over the same prompt cold."""

from __future__ import annotations

import statistics
import sys
import time

from cluster.blocks import pack_tokens
from cluster.protocol import Sampling
from cluster.settings import WorkerSettings
from tests.benchmarks.decoding import ROOT
from worker.build import build_engine
from worker.engine import EngineCore
from worker.messages import EngineRequest
from worker.weights import MissingModel

NAME = "warm_ttft"
BAR = 0.08
PROMPT_TOKENS, CACHED_TOKENS = 1024, 1008
ROUNDS = 5


def run() -> int:
    """Exit code: 0 met, 1 missed, 2 could not run."""
    settings = WorkerSettings(model="smollm2", device="cpu", threads=1, kv_blocks=200)
    try:
        core, info = build_engine(settings)
    except MissingModel as error:
        print(f"{NAME}: could not run: {error}", file=sys.stderr)
        return 2
    print(f"SmolLM2-135M on {info.device}, {info.model.namespace.kv_dtype}, 1 thread")
    time_to_first_token(core, [7] * 40)
    ratios = []
    for number in range(ROUNDS):
        prompt = [(31 * position + number) % 40_000 + 100 for position in range(PROMPT_TOKENS)]
        core.flush()
        cold_s, cold_hit = time_to_first_token(core, prompt)
        core.flush()
        time_to_first_token(core, prompt[:CACHED_TOKENS])
        warm_s, warm_hit = time_to_first_token(core, prompt)
        if (cold_hit, warm_hit) != (0, CACHED_TOKENS):
            raise RuntimeError(f"hits of {cold_hit} and {warm_hit} tokens")
        ratios.append(warm_s / cold_s)
        print(f"cold {1000 * cold_s:7.0f} ms, warm {1000 * warm_s:6.1f} ms: {ratios[-1]:.4f}")
    value = statistics.median(ratios)
    print(f"{NAME}: {value:.4f} (bar {BAR})")
    return 0 if value <= BAR else 1


def time_to_first_token(core: EngineCore, prompt: list[int]) -> tuple[float, int]:
    """Seconds from adding the request to its only token, and how many tokens were reused."""
    request = EngineRequest(
        request_id="r",
        token_ids=pack_tokens(prompt),
        namespace_root=ROOT,
        sampling=Sampling(max_tokens=1, temperature=0.0, ignore_eos=True),
    )
    start = time.perf_counter()
    core.add(request)
    outputs = []
    while core.has_work():
        if core.waits_for_loads():
            time.sleep(0.0005)  # as the engine's process does, instead of holding the GIL
        outputs += core.step(time.monotonic())
    (output,) = outputs
    if output.finish_reason != "length":
        raise RuntimeError(output.error)
    return time.perf_counter() - start, output.hit_tokens
