"""Workloads: what is sent. Arrivals (`loadgen.arrivals`) decide when.

    workload = make_workload("rag", {"documents": 50, "order": "shuffled"})
    workload.conversations(seed=0)   list[Conversation] of turns of segments

The same conversations become HTTP bodies for a live gateway (`loadgen.bodies`) and block ids for
a simulation (`loadgen.token_level`).
"""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.workloads.agent import Agent
from loadgen.workloads.chat import Chat
from loadgen.workloads.conversation import (
    Conversation,
    Role,
    Segment,
    Turn,
    Workload,
    WorkloadError,
)
from loadgen.workloads.hot_prefix import HotPrefix
from loadgen.workloads.no_sharing import NoSharing
from loadgen.workloads.rag import Rag
from loadgen.workloads.shared_prefix import SharedPrefix

__all__ = [
    "WORKLOADS",
    "Agent",
    "AnyWorkload",
    "Chat",
    "Conversation",
    "HotPrefix",
    "NoSharing",
    "Rag",
    "Role",
    "Segment",
    "SharedPrefix",
    "Turn",
    "Workload",
    "WorkloadError",
    "make_workload",
]

AnyWorkload = SharedPrefix | Chat | Agent | Rag | NoSharing | HotPrefix
"""Any of them, as msgspec decodes it by its `name`."""

WORKLOADS: dict[str, type[AnyWorkload]] = {
    "shared_prefix": SharedPrefix,
    "chat": Chat,
    "agent": Agent,
    "rag": Rag,
    "no_sharing": NoSharing,
    "hot_prefix": HotPrefix,
}


def make_workload(name: str, parameters: Mapping[str, object]) -> AnyWorkload:
    """The workload of that name. Raises WorkloadError for a name or parameter that is not there."""
    kind = WORKLOADS.get(name)
    if kind is None:
        raise WorkloadError(f"unknown workload {name!r}; available: {', '.join(WORKLOADS)}")
    unknown = sorted(set(parameters) - set(kind.__struct_fields__))
    if unknown:
        raise WorkloadError(
            f"{name} has no parameter {', '.join(unknown)}; "
            f"available: {', '.join(kind.__struct_fields__)}"
        )
    return kind(**parameters)  # type: ignore[arg-type]
