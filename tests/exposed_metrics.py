"""Checks of what a process answers at /metrics, for gateways and workers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.metric_definition import MetricDefinition, Section

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (Debian: package prometheus)"
)


def definitions_of(sections: Iterable[Section]) -> list[MetricDefinition]:
    return [definition for section in sections for definition in section.definitions]


def check_defined(
    text: str, definitions: Iterable[MetricDefinition], labels: tuple[str, ...] = ()
) -> None:
    """What is exposed is what is defined, each with a sample: name, type, help and labels.

    `labels` are those of all metrics, beside their own.
    """
    exposed = {
        (
            family.name + "_total" * (family.type == "counter"),
            family.type,
            family.documentation,
            frozenset(label for sample in family.samples for label in sample.labels) - {"le"},
        )
        for family in text_string_to_metric_families(text)
        if family.samples
    }
    assert exposed == {
        (each.name, each.kind, each.meaning, frozenset({*labels, *each.labels}))
        for each in definitions
    }


def promtool_findings(text: str) -> str:
    """What `promtool check metrics` objects to, "" for nothing."""
    assert PROMTOOL is not None
    run = subprocess.run(
        [PROMTOOL, "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (run.returncode == 0) == (not run.stdout + run.stderr)
    return run.stdout + run.stderr
