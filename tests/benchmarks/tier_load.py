"""TTFT of a 1,024-token prompt loaded from host memory and from disk, over computing it cold."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

from cluster.settings import WorkerSettings
from tests.benchmarks.warm_ttft import time_to_first_token
from worker.build import build_engine
from worker.engine import EngineCore
from worker.weights import MissingModel

NAME = "tier_load"
BAR = 0.15
PROMPT_TOKENS = 1024
ROUNDS = 3
KV_BLOCKS = 66
"""One prompt fits, two do not: the next one drives out the one before."""

CPU_TIER_GB, DISK_TIER_GB = 0.2, 1.0
"""Some 290 blocks in host memory, that is four prompts; disk has room for all."""


def run() -> int:
    """Exit code: 0 met, 1 missed, 2 could not run."""
    with tempfile.TemporaryDirectory() as directory:
        settings = WorkerSettings(
            model="smollm2",
            device="cpu",
            threads=1,
            kv_blocks=KV_BLOCKS,
            cpu_tier_gb=CPU_TIER_GB,
            disk_tier_gb=DISK_TIER_GB,
            disk_tier_dir=directory,
        )
        try:
            core, info = build_engine(settings)
        except MissingModel as error:
            print(f"{NAME}: could not run: {error}", file=sys.stderr)
            return 2
        print(f"SmolLM2-135M on {info.device}, {info.model.namespace.kv_dtype}, 1 thread")
        try:
            value = _measure(core)
        finally:
            _written(core)  # or files would come while the directory goes
    print(f"{NAME}: {value:.4f} (bar {BAR})")
    return 0 if value <= BAR else 1


def _measure(core: EngineCore) -> float:
    """The worse of the two tiers' median ratios."""
    _timed(core, [7] * 40, 0)
    prompts = [
        [(31 * position + number) % 40_000 + 100 for position in range(PROMPT_TOKENS)]
        for number in range(ROUNDS + 5)
    ]
    ratios: dict[str, list[float]] = {"host memory": [], "disk": []}
    cold_s = []
    for prompt in prompts:
        cold_s.append(_timed(core, prompt, 0))
        print(f"cold {1000 * cold_s[-1]:.0f} ms", flush=True)
    for number in range(ROUNDS):  # these fell out of host memory long ago
        _written(core)
        ratios["disk"].append(_loaded(core, "disk", prompts[number]) / cold_s[number])
    for number in range(ROUNDS - 1, 0, -1):  # the latest is on the device, those before it are not
        ratios["host memory"].append(_loaded(core, "cpu", prompts[number - 1]) / cold_s[number - 1])
        _loaded(core, "cpu", prompts[number])
    medians = {tier: statistics.median(values) for tier, values in ratios.items()}
    for tier, median in medians.items():
        print(f"from {tier}: {median:.4f} of computing, {1000 * statistics.median(cold_s):.0f} ms")
    return max(medians.values())


def _loaded(core: EngineCore, tier: str, prompt: list[int]) -> float:
    before = core.tier_stats()
    seconds = _timed(core, prompt, PROMPT_TOKENS - 16)
    after = core.tier_stats()
    assert before is not None
    assert after is not None
    name = f"{tier}_loaded_blocks"
    if getattr(after, name) - getattr(before, name) < PROMPT_TOKENS // 16 - 4:
        raise RuntimeError(f"not loaded from {tier}: {after}")
    return seconds


def _timed(core: EngineCore, prompt: list[int], hit: int) -> float:
    """Time to first token in seconds of a prompt, which must have this hit in tokens."""
    seconds, found = time_to_first_token(core, prompt)
    if found != hit:
        raise RuntimeError(f"a hit of {found} tokens instead of {hit}: {core.tier_stats()}")
    return seconds


def _written(core: EngineCore) -> None:
    """Let all that left the device arrive on disk."""
    tiers = core.tiers
    assert tiers is not None
    core.expire(time.monotonic())
    while tiers.pending:
        time.sleep(0.001)
        core.expire(time.monotonic())
