"""Run benchmarks by name.

    python -m tests.benchmarks            list them
    python -m tests.benchmarks NAME …     run these
    python -m tests.benchmarks --all      run all

Each prints what it measured and as its last line `NAME: VALUE (bar BAR)`. Exit code: 1 where a
bar is missed, else 2 where a benchmark could not run.
"""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    name: f"tests.benchmarks.{name}"
    for name in (
        "decision",
        "report_ingest",
        "index_memory",
        "next_turn_tokenising",
        "core_step",
        "core_scaling",
        "decode_vs_transformers",
        "warm_ttft",
        "tier_load",
        "decode_vs_llamacpp",
        "streaming_engine_rate",
        "gateway_vs_smg",
        "loop_stall",
        "http_server",
        "simulate_speed",
        "fidelity",
    )
}
"""Name -> module with `run() -> int`, the exit code."""


def main(arguments: list[str]) -> int:
    """Run what is named; returns the exit code."""
    names = list(BENCHMARKS) if arguments == ["--all"] else arguments
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        for name in unknown:
            print(f"there is no benchmark {name!r}", file=sys.stderr)
        print("\n".join(BENCHMARKS))
        return 2 if unknown else 0
    codes = {importlib.import_module(BENCHMARKS[name]).run() for name in names}
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
