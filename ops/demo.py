"""What `make demo` compares: sizes chosen so that the effect of routing shows on two CPU workers.

The workload's prompts make up more blocks than one worker can cache and fewer than both can.
Round-robin therefore asks every worker for every group's system prompt and keeps losing some;
locality gives each worker its share of the groups. The request rate is set to what this machine
can do, so that a slow one is not drowned and a quick one not idle.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from cluster.settings import Settings, load_settings

WORKERS = 2
KV_BLOCKS = 196
"""A worker's cache, in blocks of 16 tokens."""

GROUPS, USERS, TURNS = 8, 2, 2
SYSTEM_TOKENS = 450
OUTPUT_TOKENS = 16
SEED = 7

LOAD = 0.7
"""Requests a second, as a share of what the workers could do if nothing were cached. Low enough
that no queue builds up while every group is new: what is compared is computing, not waiting."""

MIN_RATE, MAX_RATE = 0.24, 8.0
PROBE_WORDS = 400
"""Words of a probe's prompt: about as many tokens as a request of the workload has."""


def demo_settings() -> Settings:
    """The local cluster of the demo, on a free port, independent of sizes in the environment."""
    return load_settings(
        flags={
            "gateway.port": 0,
            "gateway.host": "127.0.0.1",
            "worker.model": "smollm2",
            "worker.device": "cpu",
            "worker.kv_blocks": KV_BLOCKS,
            "worker.context_tokens": 2048,
            "serve.replicas": WORKERS,
            "serve.gpus_per_worker": 0.0,
        }
    )


def measure_rate(url: str) -> float:
    """Requests a second to send: `LOAD` of what the workers can do on prompts that they lack.

    Sends each worker two requests at a time, two times; the first ones wake everything up and
    are not measured. Raises httpx.HTTPError where the cluster does not answer.
    """
    seconds = 0.0
    with ThreadPoolExecutor(2 * WORKERS) as threads:
        for attempt in range(2):
            start = time.monotonic()
            list(threads.map(lambda n: _probe(url, n), range(100 * attempt, 100 * attempt + 4)))
            seconds = time.monotonic() - start
    return round(min(MAX_RATE, max(MIN_RATE, LOAD * 2 * WORKERS / seconds)), 2)


def _probe(url: str, number: int) -> None:
    words = " ".join(f"item {number * 7 + i}" for i in range(PROBE_WORDS // 3))
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"Request {number}. Read this list: {words}"}],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300, trust_env=False)
    answer.raise_for_status()


def loadgen_arguments(url: str, request_rate: float, out: Path) -> list[str]:
    """Arguments of `loadgen` for the comparison."""
    return [
        "compare",
        *("--url", url),
        *("--policies", "round_robin,locality"),
        *("--repeats", "1"),  # for its time: what it shows is told as one run's
        *("--groups", str(GROUPS)),
        *("--users", str(USERS)),
        *("--turns", str(TURNS)),
        *("--system-tokens", str(SYSTEM_TOKENS)),
        *("--output-tokens", str(OUTPUT_TOKENS)),
        *("--request-rate", str(request_rate)),
        *("--seed", str(SEED)),
        *("--out", str(out)),
    ]
