"""Check the CUDA path on a machine with a GPU, and measure it beside the floors of its hardware.

    python tests/gpu/run.py --model PATH|smollm2|tiny --out DIR

Writes DIR/gpu.json and prints the same as text. Exit code: 0 all checks passed, 1 one failed,
2 nothing could be run, with the reason. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.gpu import checks, floors, speed
from tests.tiny_model import write_tiny_llama
from worker.attention.registry import attention_backend
from worker.decode_graphs import CudaCapture, eager
from worker.models import LlamaModel
from worker.weights import load_model

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Checked(NamedTuple):
    """What a check saw, or how it failed."""

    name: str
    passed: bool
    detail: str


def why_not() -> str:
    """Why this machine cannot run the checks; "" where it can."""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device; run this on a machine with a GPU"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET is 1, so no kernel would run on the GPU; unset it"
    return ""


def checked(name: str, check: Callable[[], str]) -> Checked:
    """Run one check. Whatever it raises is a failure of this check, and the others go on."""
    try:
        result = Checked(name, True, check())
    except Exception as error:
        traceback.print_exc()
        result = Checked(name, False, f"{type(error).__name__}: {error}")
    print(f"{'ok    ' if result.passed else 'FAILED'} {name}: {result.detail}", flush=True)
    return result


def load(path: str, dtype: torch.dtype) -> LlamaModel:
    """The model on the GPU; "tiny" is a random one made here."""
    with tempfile.TemporaryDirectory() as made:
        directory = str(write_tiny_llama(Path(made) / "tiny")) if path == "tiny" else path
        loaded = load_model(directory, dtype)
        return LlamaModel(loaded.config, loaded.tensors, dtype, "cuda")


def run(model_path: str, dtype_name: str, out: Path) -> int:
    """All checks, then the measurements. Returns the exit code."""
    reason = why_not()
    if reason:
        print(f"could not run: {reason}", file=sys.stderr)
        return 2
    device, dtype = torch.device("cuda"), DTYPES[dtype_name]
    triton = attention_backend("triton", device)

    def cache() -> str:
        # In fp32: in half precision, chunks of other lengths may turn a near tie.
        return checks.check_cache(load(model_path, torch.float32), CudaCapture())

    done = [
        checked("triton attention", lambda: checks.check_attention(triton, device)),
        checked("varlen attention", lambda: checks.check_varlen(device)),
        checked("prefix cache", cache),
    ]
    torch.cuda.empty_cache()
    model = load(model_path, dtype)
    done += [
        checked("graph replay", lambda: checks.check_graphs(model, CudaCapture(), eager)),
        checked("no synchronisation", lambda: checks.check_no_sync(model, CudaCapture())),
        checked("no allocation", lambda: checks.check_no_allocation(model, CudaCapture())),
    ]
    rates = speed.device_rates(dtype)
    speeds, left_out = speed.throughput(model, rates)
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}, {model_path} in {dtype_name}"
        f"\nmeasured: copies {rates.bytes_per_s / 1e9:,.0f} GB/s, products "
        f"{rates.flop_per_s / 1e12:,.1f} TFLOP/s\n\n{floors.table(speeds)}"
    )
    for reason in left_out:
        print(f"left out: {reason}")
    out.mkdir(parents=True, exist_ok=True)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": model_path,
        "dtype": dtype_name,
        "checks": [check._asdict() for check in done],
        "rates": rates._asdict(),
        "speeds": [entry._asdict() | {"share_of_floor": entry.share} for entry in speeds],
        "left_out": left_out,
    }
    (out / "gpu.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(check.passed for check in done) else 1


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="directory, GGUF file, smollm2 or tiny")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--out", type=Path, required=True, help="directory for gpu.json")
    given = parser.parse_args()
    return run(given.model, given.dtype, given.out)


if __name__ == "__main__":
    sys.exit(main())
