"""Whether a router can use a worker, judged by its card."""

from __future__ import annotations

import msgspec

from cluster.protocol import PROTOCOL_VERSION, WorkerCard


class Envelope(msgspec.Struct):
    """What can be told of a message whose other fields this router does not understand."""

    worker: str
    version: int
    epoch: int = 0


def card_problem(card: WorkerCard, secret: bytes) -> str:
    """Why a router with this secret cannot use the worker, in words; "" where it can."""
    if card.version != PROTOCOL_VERSION:
        return wrong_version(card.version)
    if not card.address.startswith("http://"):
        return (
            f"its address is {card.address!r}, but routers speak plain HTTP to workers: announce "
            "it as http://HOST:PORT, and leave encryption to the network between them"
        )
    if card.namespace.check(secret) != card.namespace_check:
        return (
            "its block hashes differ from this router's: worker and router have different "
            "secrets (STEMROUTE_SECRET) or hash differently"
        )
    return ""


def version_problem(card: bytes) -> str:
    """Why a card that cannot be read cannot, if it is its version; "" where it is not."""
    try:
        version = msgspec.json.decode(card, type=Envelope).version
    except msgspec.DecodeError:
        return ""
    return wrong_version(version) if version != PROTOCOL_VERSION else ""


def wrong_version(version: int) -> str:
    """What to say of a worker of another protocol version."""
    return f"it speaks protocol version {version}, this router {PROTOCOL_VERSION}: upgrade one"
