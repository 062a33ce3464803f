"""HTTP request bodies: turns become chats, trace requests become completions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from loadgen.blocktext import ID_WORDS, block_text
from loadgen.traces import TraceRequest
from loadgen.workloads import Segment, Turn


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = True
    continuous_usage_stats: bool = True


class _ChatBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stream` and `stream_options` have no defaults, so that they are always written."""

    model: str
    messages: list[_Message]
    max_tokens: int
    temperature: float
    stream: bool
    stream_options: _StreamOptions
    ignore_eos: bool = False


class _CompletionBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    prompt: str
    max_tokens: int
    temperature: float
    stream: bool
    stream_options: _StreamOptions
    ignore_eos: bool


class Confusion(NamedTuple):
    """Whole blocks of a trace that differ, with what is before them; those of them whose text,
    with what is before it, is that of another one: a cache would find them."""

    blocks: int
    confused: int


class Writer:
    """Writes bodies for one model.

    tokens_per_word   tokens that the model makes of one word of `loadgen.blocktext`
    """

    def __init__(self, model: str, tokens_per_word: float = 1.0) -> None:
        self._model = model
        self._tokens_per_word = tokens_per_word
        self._number: dict[int, int] = {}  # a trace's ids may be hashes, beyond any bound

    def chat(self, turn: Turn) -> bytes:
        """A chat; segments of one role that follow each other are one message."""
        messages = [
            _Message(role, "".join(self._text(segment) for segment in segments))
            for role, segments in itertools.groupby(turn.prompt, lambda segment: segment.role)
        ]
        return msgspec.json.encode(
            _ChatBody(
                model=self._model,
                messages=messages,
                max_tokens=turn.output_tokens,
                temperature=0.0,
                stream=True,
                stream_options=_StreamOptions(),
                ignore_eos=turn.ignore_eos,
            )
        )

    def completion(self, request: TraceRequest) -> bytes:
        """A completion of the trace's text, or of text made from its block ids."""
        return msgspec.json.encode(
            _CompletionBody(
                model=self._model,
                prompt=request.text if request.text is not None else self._prompt(request),
                max_tokens=request.output_tokens,
                temperature=0.0,
                stream=True,
                stream_options=_StreamOptions(),
                ignore_eos=True,
            )
        )

    def confusion(self, requests: Iterable[TraceRequest]) -> Confusion:
        """Whether the made texts tell the blocks apart, where these are too short for all ids."""
        of_ids: dict[tuple[int, int], int] = {}
        of_texts: dict[tuple[int, str], int] = {}
        for request in requests:
            words = self.words(request.block_tokens)
            if request.text is not None or words >= ID_WORDS:
                continue
            node = text_node = -1
            for block_id in request.hash_ids[: request.prompt_tokens // request.block_tokens]:
                text = block_text(self._numbered(block_id), words)
                node = of_ids.setdefault((node, block_id), len(of_ids))
                text_node = of_texts.setdefault((text_node, text), len(of_texts))
        return Confusion(len(of_ids), len(of_ids) - len(of_texts))

    @property
    def block_tokens_needed(self) -> float:
        """Tokens of a block whose text tells all ids apart."""
        return ID_WORDS * self._tokens_per_word

    def words(self, tokens: int) -> int:
        """Words of so many tokens, at least 1."""
        return max(1, round(tokens / self._tokens_per_word))

    def _text(self, segment: Segment) -> str:
        return segment.text or block_text(segment.id, self.words(segment.tokens))

    def _prompt(self, request: TraceRequest) -> str:
        full = self.words(request.block_tokens)
        last = request.prompt_tokens - (len(request.hash_ids) - 1) * request.block_tokens
        ids = [self._numbered(block_id) for block_id in request.hash_ids]
        return "".join(
            [*(block_text(i, full) for i in ids[:-1]), block_text(ids[-1], self.words(last))]
        )

    def _numbered(self, block_id: int) -> int:
        return self._number.setdefault(block_id, len(self._number))
