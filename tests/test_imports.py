"""Imports between packages go one way, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "cluster": set[str](),
    "router": {"cluster"},
    "worker": {"cluster"},
    "loadgen": {"cluster", "router", "worker"},
    "ops": {"cluster", "router", "worker"},
}


def modules() -> dict[str, Path]:
    """Dotted name -> file of each module of the packages."""
    found = {}
    for package in MAY_IMPORT:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(path: Path) -> set[str]:
    """The modules of these packages that a file imports anywhere, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert not node.level, f"{path} has a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in inner}
    return {name for name in names if name in MODULES}


def test_packages_import_only_what_stands_below_them() -> None:
    upward = {
        (name, other)
        for name, path in MODULES.items()
        for other in imported(path)
        if other.partition(".")[0]
        not in MAY_IMPORT[name.partition(".")[0]] | {name.partition(".")[0]}
    }
    assert not upward


def test_no_circles() -> None:
    graph = {name: imported(path) - {name} for name, path in MODULES.items()}
    assert graph["router.gateway"] >= {"router.serving", "cluster.settings"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))
