"""python -m tests.benchmarks NAME... | --all; without a name it lists them.

Each benchmark prints what it measured and, as its last line, `NAME: VALUE (bar BAR)`. Exit code 1
where a bar is missed, 2 where one could not run.
"""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "decode_vs_transformers": "tests.benchmarks.decode_vs_transformers",
    "decode_vs_llamacpp": "tests.benchmarks.decode_vs_llamacpp",
    "warm_ttft": "tests.benchmarks.warm_ttft",
    "streaming_engine_rate": "tests.benchmarks.streaming_engine_rate",
}
"""Name -> module with `run() -> int`."""


def main(arguments: list[str]) -> int:
    """Run the benchmarks of these names; the worst exit code."""
    names = list(BENCHMARKS) if arguments == ["--all"] else arguments
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        if unknown:
            print(f"no benchmark is called {', '.join(unknown)}", file=sys.stderr)
        print("\n".join(BENCHMARKS))
        return 2 if unknown else 0
    return max(importlib.import_module(BENCHMARKS[name]).run() for name in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
