"""The kernels compile to machine code for GPUs, which triton can do where there is none."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the triton backend needs the package triton")

SHARED_BYTES = 99 * 1024
"""Shared memory that a program may have on the smallest of the supported GPUs (sm_86, sm_89)."""


def test_for_ampere_and_hopper_within_their_shared_memory(tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.compile_triton"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shared = json.loads(done.stdout)
    assert len(shared) == 8
    assert max(shared.values()) <= SHARED_BYTES, shared
