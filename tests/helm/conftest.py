"""Helm, rendered value sets and schemas, each had once a test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm.checking import CRDS, load_crds
from tests.helm.rendering import render
from tests.helm.tools import ToolMissing, helm_binary
from tests.helm.value_sets import VALUE_SETS


@pytest.fixture(scope="session")
def helm() -> Path:
    try:
        return helm_binary()
    except ToolMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def rendered(helm, tmp_path_factory):
    """Manifests of a value set by its name."""
    folder = tmp_path_factory.mktemp("values")
    done = {}

    def of(name):
        if name not in done:
            done[name] = render(helm, folder, VALUE_SETS[name])
        return done[name]

    return of


@pytest.fixture(scope="session")
def crds():
    """Validators of KubeRay's kinds."""
    found = load_crds() if CRDS.is_dir() else {}
    if not {"RayService", "RayCluster"} <= found.keys():
        pytest.skip(f"no RayService and RayCluster CRDs of KubeRay in {CRDS}")
    return found
