"""One streamed answer: events in, an outcome's text, tokens and times out. Reads no clock."""

from __future__ import annotations

import msgspec

from loadgen.outcomes import Outcome


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    """The fields that are read of a streamed chunk or of an error response."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: _Error | None = None


class Answer:
    """Reads one streamed answer into an outcome.

    A chunk's tokens are the growth of `usage.completion_tokens` where the server streams usage
    with every chunk, else one.
    """

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.done = False
        self._tokens = 0
        self._token_s: float | None = None
        self._text: list[str] = []

    def take(self, data: bytes, now_s: float) -> None:
        """Read one event. Raises msgspec.DecodeError where it is not a chunk."""
        outcome = self.outcome
        if data == b"[DONE]":
            self.done = True
            return
        chunk = msgspec.json.decode(data, type=_Chunk)
        if chunk.error is not None:
            outcome.error = chunk.error.message or "error event without a message"
            return
        text = ""
        for choice in chunk.choices:
            text += (choice.delta.content if choice.delta else choice.text) or ""
            outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        if text:
            self._text.append(text)
            if outcome.first_token_s is None:
                outcome.first_token_s = now_s
        self._count(chunk, text, now_s)

    def end(self, now_s: float) -> None:
        """The stream has ended, successfully or not."""
        outcome = self.outcome
        outcome.end_s = now_s
        outcome.text = "".join(self._text)
        if outcome.error:
            outcome.status = "failed"
        elif not self.done:
            outcome.status = "unfinished"
            outcome.error = "the stream ended without [DONE]"
        else:
            outcome.status = "ok"
            if outcome.first_token_s is None:
                outcome.first_token_s = now_s

    def _count(self, chunk: _Chunk, text: str, now_s: float) -> None:
        outcome, usage = self.outcome, chunk.usage
        total = self._tokens + bool(text)
        if usage is not None:
            if usage.prompt_tokens is not None:
                outcome.prompt_tokens = usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens
            if usage.completion_tokens is not None:
                outcome.completion_tokens = total = usage.completion_tokens
        new = total - self._tokens
        # A chunk without choices carries only usage: its time is not a token's time.
        if new <= 0 or not chunk.choices:
            return
        if self._token_s is not None:
            outcome.itl_ms.extend([(now_s - self._token_s) * 1e3 / new] * new)
        self._tokens = total
        self._token_s = now_s


def error_message(body: bytes) -> str:
    """The message of an OpenAI error object, "" where the body is none."""
    try:
        error = msgspec.json.decode(body, type=_Chunk).error
    except msgspec.DecodeError:
        return ""
    return error.message if error else ""
