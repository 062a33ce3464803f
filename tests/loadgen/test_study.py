"""The study under docs: its variants of `marginal` decide with the router as it is now."""

import importlib.util
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from tests.router.candidates import candidates, choose

STUDY = Path(__file__).parents[2] / "docs" / "study"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"docs_study_{name}", STUDY / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


variants = load("variants")


@pytest.fixture
def study(monkeypatch):
    """The study's modules, which import one another by their bare names."""
    monkeypatch.syspath_prepend(str(STUDY))
    for name in ("drawings", "report", "results", "study", "variants"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("study")
    for name in ("drawings", "report", "results", "study", "variants"):
        sys.modules.pop(name, None)


GIVEN = candidates(
    prompt=8000,
    hit=[0, 4000, 4000],
    pending=[0, 9000, 2000],
    running=[4, 1, 3],
    waiting=[0, 2, 1],
    free=[500, 500, 3],
    capacity=1000,
    room_blocks=[500, 400, 3],
    pending_pairs=[0, 40_000_000, 2_000_000],
    s_per_token=[1e-4, 1e-4, 1e-4],
    s_per_pair=[1e-9, 1e-9, 1e-9],
    stay_s=5.0,
)


COVERED = structs.replace(GIVEN, in_flight=9)  # two of three hold what one of ten asks for
SCENES = pytest.mark.parametrize("given", [GIVEN, COVERED], ids=["in demand", "covered"])


@SCENES
@pytest.mark.parametrize("name", variants.VARIANTS)
def test_every_variant_decides(name, given):
    costs = variants.VARIANTS[name]().choose(given, random.Random(0)).costs
    assert costs.shape == (3,)
    assert np.isfinite(costs).all()
    here = variants.ALWAYS if given is COVERED else variants.NEVER
    same = name in (variants.WITHOUT_COMING, "marginal, ties of 1 %", here)
    assert np.allclose(costs, choose("marginal", given).costs, rtol=1e-12) == same


@SCENES
def test_the_formula_that_the_study_writes_down_is_the_routers(given):
    whole = variants.from_parts(lambda parts: parts)(given)
    np.testing.assert_allclose(whole, choose("marginal", given).costs, rtol=1e-12)


def test_lacking_blocks_count_as_prefill():
    """250 blocks are needed at the third, 3 are free: 3,952 of its 4,000 new tokens lack room."""
    plain = choose("marginal", GIVEN).costs
    more = variants.VARIANTS["marginal, memory"]().choose(GIVEN, random.Random(0)).costs - plain
    new_s = 4000 * 1e-4 + (8000**2 - 4000**2) / 2 * 1e-9
    np.testing.assert_allclose(more, [0, 0, 3952 * new_s / 4000 * 5], rtol=1e-12)


def test_tables_and_drawings_are_those_of_the_rows(study, tmp_path):
    study.report.write(tmp_path, study.RESULTS)
    made = {file.name: file.read_text() for file in tmp_path.iterdir()}
    kept = {file.name: file.read_text() for file in STUDY.iterdir() if file.suffix == ".svg"}
    assert made == kept | {"results.md": (STUDY / "results.md").read_text()}


def test_every_planned_row_is_there_once(study):
    rows = study.results.read(study.RESULTS)
    found = [(study.cell_of(row), row["seed"], row["policy"]) for row in rows]
    planned = {
        (cell, seed, name) for cell, seed, names in study.planned(study.CELLS) for name in names
    }
    assert len(found) == len(set(found))
    assert planned <= set(found)


def test_a_row_is_read_as_it_was_written(study, tmp_path):
    row = dict(study.results.read(study.RESULTS)[0])
    row |= {"ttft_s": 12.3456789, "saturation_rate": 1 / 3, "policy": "marginal, ties of 1 %"}
    for _ in range(2):
        study.results.append(tmp_path / "rows.csv", row)
    assert study.results.read(tmp_path / "rows.csv") == [row | {"ttft_s": 12.346}] * 2
