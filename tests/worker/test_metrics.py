"""A worker's /metrics as a whole: what is defined is there, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cluster.metric_definition import exposition
from cluster.protocol import Load
from tests.exposed_metrics import (
    check_defined,
    definitions_of,
    needs_promtool,
    promtool_findings,
)
from tests.tiny_model import write_tiny_llama
from tests.worker.test_worker_life import STEM, a_worker
from worker.messages import EngineStats, EvictionAges, TierStats
from worker.metrics import LABELS, SECTIONS, engine_metrics, load_metrics, tier_metrics

NOT_EXPOSED = {"evictions", "waiting_by_priority"}
"""Counts that are sums of others, and parts of one that is exposed."""


@pytest.fixture
async def text(redis_url: str, pool: str, tmp_path: Path) -> AsyncIterator[str]:
    """/metrics of a worker with cold tiers that has answered a request."""
    model = str(write_tiny_llama(tmp_path / "model", 1))
    tiers = {"cpu_tier_gb": 1e-3, "disk_tier_gb": 1e-2, "disk_tier_dir": str(tmp_path / "kv")}
    async with a_worker(redis_url, pool, model, kv_blocks=40, block_size=8, **tiers) as worker:
        await worker.text_of(STEM)
        yield await worker.metrics()


async def test_a_worker_exposes_what_is_defined(text: str) -> None:
    check_defined(text, definitions_of(SECTIONS), LABELS)
    assert 'model="tiny",worker="worker"' in text


@needs_promtool
async def test_promtool_finds_nothing(text: str) -> None:
    assert not promtool_findings(text)


def test_every_count_of_engine_tiers_and_load_is_exposed() -> None:
    kinds = (Load, EngineStats, TierStats)
    names = [(kind, name) for kind in kinds for name in kind.__struct_fields__]
    numbers: dict[tuple[type, str], Any] = {
        key: 1000 + place for place, key in enumerate(names) if key[1] != "waiting_by_priority"
    }
    numbers[Load, "waiting_by_priority"] = ()
    load, stats, tiers = (
        msgspec.convert({name: numbers[kind, name] for name in kind.__struct_fields__}, kind)
        for kind in kinds
    )
    ages = EvictionAges(bounds_s=[1.0], counts=[2, 3], sum_s=4.5)
    families = [*load_metrics(load), *engine_metrics(stats, ages), *tier_metrics(tiers)]
    lines = exposition(families).decode().splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")]
    times = {name: values.count(number) for (_, name), number in numbers.items()}
    assert {name for name, count in times.items() if count != 1} == NOT_EXPOSED
    assert {4.5, 2.0, 5.0} <= set(values)
