"""A gateway's /metrics as a whole: what is defined is there, and nothing else."""

from __future__ import annotations

import pytest

from cluster.protocol import Load
from router.metrics import SECTIONS
from tests.exposed_metrics import (
    check_defined,
    definitions_of,
    needs_promtool,
    promtool_findings,
)
from tests.router.support import Rig, report


async def text_of_a_busy_gateway() -> str:
    """/metrics of a gateway that has something to say in each metric."""
    async with Rig(workers=2, shadow="round_robin") as rig:
        await rig.complete()
        for worker in rig.workers:
            worker.answer = worker.refuse(503)
        await rig.complete()
        rig.follower.status.report_ages_s = {"w0": 0.5}
        rig.fleet.on_report(report("w0", load=Load(running=2), stored=[b"x" * 16]))
        rig.gateway.admission.refused["overloaded"] += 1
        async with rig.http.get("/metrics") as answer:
            return await answer.text()


async def test_a_gateway_exposes_what_is_defined() -> None:
    check_defined(await text_of_a_busy_gateway(), definitions_of(SECTIONS))


async def test_unknown_paths_and_methods_make_no_new_time_series() -> None:
    async with Rig() as rig:
        for path in ("/a", "/v1/b", "/admin/c"):
            await rig.get(path)
            await rig.post(path, {})
        await rig.get("/v1/models/tiny")
        await rig.get("/v1/models/other")
        answered = rig.gateway.metrics.requests.answered
        assert {endpoint for endpoint, _ in answered} == {"none", "/v1/models/{model}"}


@pytest.mark.parametrize("attempts", [1, 2])
async def test_each_failed_attempt_is_counted_by_reason(attempts: int) -> None:
    async with Rig(workers=2, attempts=attempts) as rig:
        for worker in rig.workers:
            worker.answer = worker.refuse(503)
        await rig.complete()
        assert rig.gateway.metrics.attempts.failed == {"unavailable": attempts}


@needs_promtool
async def test_promtool_finds_nothing() -> None:
    assert not promtool_findings(await text_of_a_busy_gateway())
