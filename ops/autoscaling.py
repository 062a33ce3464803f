"""How many workers a load needs, for Ray Serve's autoscaler.

Requests go straight to a worker's own server, so Serve's count of ongoing requests is always 0.
Workers tell their batch size instead (`record_autoscaling_stats`, metric `BATCH_SIZE`), and this
policy turns it into replicas. Serve itself applies bounds and delays to the answer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

BATCH_SIZE = "batch_size"
"""Name of the metric: requests running plus requests waiting at one worker."""


class ScalingContext(Protocol):
    """The part of `ray.serve.config.AutoscalingContext` that is read here.

    aggregated_metrics    metric name -> replica -> mean over the look-back period
    """

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...
    @property
    def running_replicas(self) -> Collection[Any]: ...
    @property
    def target_num_replicas(self) -> int: ...
    @property
    def policy_state(self) -> dict[str, Any]: ...


class BatchSizePolicy:
    """As many replicas as keep the mean batch size at `target_batch_size` (requests, > 0).

    A replica that runs but has not told its batch size yet counts as an average one. While none
    has told it, the number of replicas stays as it is.
    """

    def __init__(self, target_batch_size: float) -> None:
        if not target_batch_size > 0:
            raise ValueError(f"target_batch_size must be more than 0, got {target_batch_size}")
        self.target_batch_size = target_batch_size

    def __call__(self, context: ScalingContext) -> tuple[float, dict[str, Any]]:
        """Desired replicas (a fraction is rounded up by Serve), and the policy's state."""
        told = (context.aggregated_metrics or {}).get(BATCH_SIZE, {})
        running = set(context.running_replicas)
        batches = [batch for replica, batch in told.items() if replica in running]
        if not batches:
            return context.target_num_replicas, context.policy_state
        mean_batch = sum(batches) / len(batches)
        return mean_batch * len(running) / self.target_batch_size, context.policy_state
