"""Replicas by batch size, and that Ray Serve finds the policy."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ops.autoscaling import BATCH_SIZE, BatchSizePolicy


def context(batches: dict[str, float], running: list[str], target: int) -> SimpleNamespace:
    metrics = {BATCH_SIZE: batches} if batches else None
    return SimpleNamespace(
        aggregated_metrics=metrics,
        running_replicas=running,
        target_num_replicas=target,
        policy_state={"kept": 1},
    )


@pytest.mark.parametrize(
    ("batches", "running", "desired"),
    [
        ({"a": 16, "b": 16}, ["a", "b"], 2),
        ({"a": 48, "b": 16}, ["a", "b"], 4),
        ({"a": 4, "b": 4}, ["a", "b"], 0.5),
        ({"a": 0, "b": 0}, ["a", "b"], 0),
        ({"a": 32}, ["a", "b"], 4),  # b has not told yet: counts as an average one
        ({"a": 16, "gone": 900}, ["a"], 1),  # a replica that is gone does not count
    ],
)
def test_replicas_keep_the_batch_size_at_its_target(batches, running, desired):
    answer, state = BatchSizePolicy(target_batch_size=16)(context(batches, running, len(running)))
    assert answer == desired
    assert state == {"kept": 1}


def test_nothing_told_changes_nothing():
    assert BatchSizePolicy(16)(context({}, ["a", "b", "c"], 3))[0] == 3
    assert BatchSizePolicy(16)(context({"gone": 5.0}, ["a"], 1))[0] == 1


def test_a_target_of_nothing_is_refused():
    with pytest.raises(ValueError, match="more than 0"):
        BatchSizePolicy(0)


def test_serve_loads_the_policy_by_its_name():
    """From the configuration as the chart writes it."""
    serve_config = pytest.importorskip("ray.serve.config")
    policy = serve_config.AutoscalingConfig(
        min_replicas=1,
        max_replicas=4,
        policy={
            "policy_function": "ops.autoscaling:BatchSizePolicy",
            "policy_kwargs": {"target_batch_size": 16},
        },
    ).policy
    loaded = policy.get_policy()(**policy.policy_kwargs)
    assert loaded(context({"a": 64.0}, ["a"], 1))[0] == 4
