"""OpenAI responses: from a request's outputs to the bytes sent to the client.

`Transcript` turns token ids into final text and knows when and why the answer ends. `Answer`
renders a transcript as one JSON object or as server-sent events. `ResponseBody` puts both together.
Source of the formats: the OpenAI API reference (chat completions, legacy completions).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from cluster.blocks import pack_tokens, unpack_tokens
from cluster.frames import frame
from cluster.protocol import GenerateRequest
from worker.detokenizer import IncrementalDetokenizer, StopStringFilter
from worker.messages import Output

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens that were not computed for this request."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Transcript:
    """The text of one answer as it grows.

    finish_reason   "" while it runs; "stop" after a stop string, which the engine does not know of
    """

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopStringFilter(request.sampling.stop)
        self._stop_ids = self._detokenizer.skipped_ids(request.sampling.stop)
        self.prompt_tokens = len(request.token_ids) // 4
        self.completion_tokens = 0
        self.hit_tokens = 0
        self.finish_reason = ""

    def push(self, token_ids: Sequence[int], finish_reason: str) -> str:
        """Text that is final with these tokens. Tokens after a stop string are not counted."""
        parts: list[str] = []
        for token_id in token_ids:
            self.completion_tokens += 1
            if token_id in self._stop_ids:  # gives no text to match
                finish_reason = "stop"
                break
            text, stopped = self._stop.push(self._detokenizer.push([token_id]))
            parts.append(text)
            if stopped:
                self.finish_reason = "stop"
                return "".join(parts)
        if finish_reason:
            text, stopped = self._stop.push(self._detokenizer.finish())
            parts.append(text)
            self.finish_reason = "stop" if stopped else finish_reason
            if not stopped:
                parts.append(self._stop.finish())
        return "".join(parts)

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(self.hit_tokens),
        )


class Answer:
    """Renders one request's answer. `created` is in seconds since 1970."""

    def __init__(self, request: GenerateRequest, created: int) -> None:
        self._request = request
        self._chat = request.kind == "chat"
        prefix = "chatcmpl" if self._chat else "cmpl"
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{request.request_id}",
            "object": "",
            "created": created,
            "model": request.model,
        }

    def whole(self, text: str, transcript: Transcript) -> bytes:
        """The JSON object of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": transcript.finish_reason}
        kind = "chat.completion" if self._chat else "text_completion"
        return _encode(
            self._head | {"object": kind, "choices": [choice], "usage": transcript.usage}
        )

    def opening(self) -> bytes:
        """Events before the first text: a chat's role."""
        if not self._chat:
            return b""
        return self._event(
            [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
        )

    def piece(self, text: str, transcript: Transcript) -> bytes:
        """The event for more text; b"" if there is none."""
        finish_reason = transcript.finish_reason or None
        if not text and finish_reason is None:
            return b""
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish_reason}
        return self._event([choice], transcript if self._request.continuous_usage else None)

    def closing(self, transcript: Transcript) -> bytes:
        """The last events: usage if requested, and the end marker."""
        usage = self._event([], transcript) if self._request.include_usage else b""
        return usage + DONE

    def _event(self, choices: list[dict[str, Any]], usage_of: Transcript | None = None) -> bytes:
        body = self._head | {
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": choices,
        }
        if usage_of is not None:
            body["usage"] = usage_of.usage
        elif self._request.include_usage:
            body["usage"] = None  # OpenAI: each chunk has the field, only the last a value
        return b"data: " + _encode(body) + b"\n\n"


PROGRESS_S = 0.5
"""Least time between the frames of a response that is not a stream."""


class ResponseBody:
    """The body of a response, output by output. A response that another worker began goes on after
    the text of `request.output_ids`, as if all had come from here.

    hit_tokens   prompt tokens reused, for `usage`
    """

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, hit_tokens: int) -> None:
        self._request = request
        self._transcript = Transcript(request, tokenizer)
        self._transcript.hit_tokens = hit_tokens
        self._answer = Answer(request, request.created or int(time.time()))
        self._texts = [self._transcript.push(unpack_tokens(request.output_ids), "")]
        self._opening = b"" if request.output_ids or not request.stream else self._answer.opening()
        self._ids: list[int] = []
        self._framed_at = -PROGRESS_S

    @property
    def finished(self) -> bool:
        """Whether the whole body was returned."""
        return bool(self._transcript.finish_reason)

    def push(self, output: Output) -> bytes:
        """The bytes to send now; b"" if there are none yet."""
        text = self._transcript.push(output.token_ids, output.finish_reason)
        body = self._streamed(text) if self._request.stream else self._whole(text)
        if not self._request.progress:
            return body
        self._ids += output.token_ids
        if not body:
            now = time.monotonic()
            if self._request.stream or now - self._framed_at < PROGRESS_S:
                return b""
            self._framed_at = now
        elif not self._request.stream:
            body += b"\n"
        ids, self._ids = pack_tokens(self._ids), []
        return frame(body, ids, last=self.finished)

    def _streamed(self, text: str) -> bytes:
        body = self._opening + self._answer.piece(text, self._transcript)
        self._opening = b""
        return body + self._answer.closing(self._transcript) if self.finished else body

    def _whole(self, text: str) -> bytes:
        self._texts.append(text)
        if not self.finished:
            return b""
        return self._answer.whole("".join(self._texts), self._transcript)
