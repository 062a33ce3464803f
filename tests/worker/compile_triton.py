"""Compile the attention kernels for GPUs of which none need be here, and print what they take.

    python -m tests.worker.compile_triton

A process of its own, without TRITON_INTERPRET: triton compiles or interprets, never both. Prints
one JSON object: variant -> bytes of shared memory in one program.
"""

import json
import os

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from worker.attention.triton_kernels import join_splits, paged_attention

POINTERS = {"query", "key_pool", "value_pool", "out"}
FP32 = {"part_sums", "part_tops", "part_totals"}
INT32 = {"query_stride", "table_stride"}


def compiled(kernel, constants, dtype, capability):
    """The kernel for `sm_<capability>`, with all pointers aligned to 16 bytes."""

    def kind(name):
        if name in constants:
            return "constexpr"
        if name == "scale":
            return "fp32"
        if name in INT32:
            return "i32"
        return f"*{dtype}" if name in POINTERS else "*fp32" if name in FP32 else "*i64"

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: kind(name) for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if kind(name).startswith("*")
        },
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, "num_stages": 2},
    )


def main() -> None:
    """Variants for Ampere and Hopper, in bfloat16, with heads of 128."""
    head = {"HEAD_DIM": 128, "WIDE_DIM": 128}
    shape = head | {"GROUP": 3, "KV_HEADS": 8, "BLOCK_SIZE": 16, "TILE_KEYS": 64, "UPCAST": False}
    variants = {
        "decode": {"TILE": 16, "SPLITS": 1, "DECODE": True},
        "split decode": {"TILE": 16, "SPLITS": 8, "DECODE": True},
        "chunk": {"TILE": 64, "SPLITS": 1, "DECODE": False},
    }
    shared = {}
    for capability in (80, 90):
        for name, constants in variants.items():
            kernel = compiled(paged_attention, shape | constants, "bf16", capability)
            assert kernel.asm["cubin"]
            shared[f"sm_{capability} {name}"] = kernel.metadata.shared
        joined = compiled(join_splits, head | {"SPLITS": 8}, "bf16", capability)
        shared[f"sm_{capability} join"] = joined.metadata.shared
    print(json.dumps(shared))


if __name__ == "__main__":
    main()
