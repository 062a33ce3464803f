"""What `make demo` compares: sizes chosen so that the effect of routing shows on two CPU workers.

The workload's prompts make up more blocks than one worker can cache and fewer than both can.
Round-robin therefore asks every worker for every group's system prompt and keeps losing some;
locality gives each worker its share of the groups.
"""

from __future__ import annotations

from pathlib import Path

from cluster.settings import Settings, load_settings

WORKERS = 2
KV_BLOCKS = 400
"""A worker's cache, in blocks of 16 tokens."""

GROUPS, USERS, TURNS = 8, 2, 3
SYSTEM_TOKENS = 600
OUTPUT_TOKENS = 24
REQUEST_RATE = 1.0
SEED = 7


def demo_settings() -> Settings:
    """The local cluster of the demo, on a free port, whatever the environment says of sizes."""
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


def loadgen_arguments(url: str, out: Path) -> list[str]:
    """Arguments of `loadgen` for the comparison."""
    return [
        "compare",
        *("--url", url),
        *("--policies", "round_robin,locality"),
        *("--groups", str(GROUPS)),
        *("--users", str(USERS)),
        *("--turns", str(TURNS)),
        *("--system-tokens", str(SYSTEM_TOKENS)),
        *("--output-tokens", str(OUTPUT_TOKENS)),
        *("--request-rate", str(REQUEST_RATE)),
        *("--seed", str(SEED)),
        *("--out", str(out)),
    ]
