"""Where recorded traces are, for the tests and benchmarks that read them.

They are no part of this project. `STEMROUTE_TRACES` names their folder; else `shared/traces`
in or beside the checkout is looked at.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def find_trace(name: str) -> Path | None:
    """The trace file of that name, None where it is not on this machine."""
    root = Path(__file__).resolve().parents[1]
    given = os.environ.get("STEMROUTE_TRACES")
    folders = [Path(given)] if given else [root / "shared/traces", root.parent / "shared/traces"]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def need_trace(name: str) -> Path:
    """As `find_trace`; skips the test where it is not there."""
    path = find_trace(name)
    if path is None:
        pytest.skip(f"the trace {name} is not here: set STEMROUTE_TRACES to its folder")
    return path
