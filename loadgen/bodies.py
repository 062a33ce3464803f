"""The HTTP bodies of requests: turns as chats, trace requests as completions."""

from __future__ import annotations

import itertools

import msgspec

from loadgen.blocktext import block_text
from loadgen.traces import TraceRequest
from loadgen.workloads import Segment, Turn


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = True
    continuous_usage_stats: bool = True


class _ChatBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`stream` and `stream_options` hold no defaults here, so that they are always written."""

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

    def words(self, tokens: int) -> int:
        """Words of so many tokens, at least 1."""
        return max(1, round(tokens / self._tokens_per_word))

    def _text(self, segment: Segment) -> str:
        return segment.text or block_text(segment.id, self.words(segment.tokens))

    def _prompt(self, request: TraceRequest) -> str:
        full = self.words(request.block_tokens)
        last = request.prompt_tokens - (len(request.hash_ids) - 1) * request.block_tokens
        ids = [self._number.setdefault(i, len(self._number)) for i in request.hash_ids]
        return "".join(
            [*(block_text(i, full) for i in ids[:-1]), block_text(ids[-1], self.words(last))]
        )
