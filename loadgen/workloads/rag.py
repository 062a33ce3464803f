"""Retrieval: documents from a pool before a question, in a kept or a shuffled order."""

from __future__ import annotations

import random
from typing import Annotated, Literal

from msgspec import Meta

from loadgen.workloads.conversation import (
    Conversation,
    Ids,
    Segment,
    Turn,
    Workload,
    WorkloadError,
    draw,
    zipf_weights,
)

Order = Literal["kept", "shuffled"]


class Rag(Workload, frozen=True, kw_only=True, tag="rag"):
    """Each request reads some documents, drawn by popularity without repeats, and asks.

    Kept order puts the more popular document first, so that equal documents make equal
    prefixes; shuffled is what a ranking by relevance does, and leaves prefixes little chance.
    """

    num_prompts: Annotated[int, Meta(description="Requests.")] = 200
    documents: Annotated[int, Meta(description="Documents in the pool.")] = 100
    documents_a_prompt: Annotated[int, Meta(description="Documents in a prompt.")] = 4
    document_tokens: Annotated[int, Meta(description="Tokens of a document.")] = 500
    order: Annotated[Order, Meta(description="Order of documents: kept or shuffled.")] = "kept"
    zipf: Annotated[float, Meta(description="Exponent of the documents' popularity.")] = 1.0
    system_tokens: Annotated[int, Meta(description="Tokens of the system prompt.")] = 100
    input_tokens: Annotated[int, Meta(description="Tokens of a question.")] = 40
    output_tokens: Annotated[int, Meta(description="Tokens of an answer.")] = 100

    def conversations(self, seed: int) -> list[Conversation]:
        """`num_prompts` of one turn. Raises WorkloadError."""
        self.need(1, "num_prompts", "documents", "documents_a_prompt", "document_tokens")
        self.need(1, "input_tokens", "output_tokens")
        self.need(0, "system_tokens", "zipf")
        if self.order not in ("kept", "shuffled"):
            raise WorkloadError(f"order must be kept or shuffled, got {self.order!r}")
        if self.documents_a_prompt > self.documents:
            raise WorkloadError(
                f"documents_a_prompt must be at most documents ({self.documents}), "
                f"got {self.documents_a_prompt}"
            )
        rng = random.Random(f"rag/{seed}")
        ids = Ids()
        system = Segment("system", ids.new(), self.system_tokens)
        pool = [Segment("user", ids.new(), self.document_tokens) for _ in range(self.documents)]
        weights = zipf_weights(self.documents, self.zipf)
        conversations = []
        for number in range(self.num_prompts):
            ranks = self._ranks(rng, weights)
            prompt = (
                *((system,) if self.system_tokens else ()),
                *(pool[rank] for rank in ranks),
                Segment("user", ids.new(), self.input_tokens),
            )
            turn = Turn(prompt, self.output_tokens)
            conversations.append(Conversation(f"q{number}", f"d{ranks[0]}", [turn]))
        return conversations

    def _ranks(self, rng: random.Random, weights: list[float]) -> list[int]:
        left = list(weights)
        ranks = []
        for _ in range(self.documents_a_prompt):
            (rank,) = draw(rng, left, 1)
            ranks.append(rank)
            left[rank] = 0.0
        if self.order == "kept":
            ranks.sort()
        return ranks
