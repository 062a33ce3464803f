"""docs/metrics.md is generated, and no document or chart names a metric that does not exist."""

from __future__ import annotations

import re
from pathlib import Path

import router.metrics
import worker.metrics
from ops.metrics_doc import render
from tests.exposed_metrics import definitions_of

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"stemroute_(?:gateway|worker)_[a-z_]*[a-z]\b")


def test_the_page_of_metrics_is_up_to_date() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == render(), "run: python -m ops.metrics_doc > docs/metrics.md"


def test_every_metric_that_is_named_somewhere_exists() -> None:
    sections = (*router.metrics.SECTIONS, *worker.metrics.SECTIONS)
    known = {definition.name for definition in definitions_of(sections)}
    files = [ROOT / "README.md"] + [
        path
        for folder in ("docs", "helm")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".md", ".yaml", ".tpl", ".json", ".txt")
    ]
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name in NAME.findall(path.read_text(encoding="utf-8"))
    }
    assert len(named) >= len(known)
    assert {(path, name) for path, name in named if name not in known} == set()
