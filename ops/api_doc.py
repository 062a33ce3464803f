"""The HTTP API of a gateway as a page: `python -m ops.api_doc > docs/api.md`.

Request fields, their types, bounds and refusals come from `router.openai_api` and
`router.unserved`. Endpoints and error codes are listed here with their meanings; tests compare
them with what a gateway serves and raises.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

from cluster.protocol import (
    HEADER_EXPLAIN,
    HEADER_HIT_TOKENS,
    HEADER_IGNORED_FIELDS,
    HEADER_MIGRATIONS,
    HEADER_POLICY,
    HEADER_PREDICTED_HIT_TOKENS,
    HEADER_PROMPT_TOKENS,
    HEADER_REQUEST_ID,
    HEADER_TIMEOUT,
    HEADER_WORKER,
    SERVICE_UNAVAILABLE,
)
from cluster.settings import GatewaySettings
from router.edge import RETRY_AFTER_S
from router.openai_api import (
    DEFAULT_MAX_MESSAGES,
    MAX_PRIORITY,
    MAX_SALT_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_TYPE_CHARACTERS,
    ChatBody,
    CompletionBody,
    Message,
    StreamOptions,
)
from router.unserved import NO_EFFECT, UNSERVED


class Endpoint(NamedTuple):
    """One endpoint. `key`: which bearer token it asks for."""

    method: str
    path: str
    key: str
    purpose: str


class ErrorCode(NamedTuple):
    """One error with its HTTP status and OpenAI error type."""

    code: str
    status: str
    type: str
    when: str


ENDPOINTS = [
    Endpoint("POST", "/v1/chat/completions", "API", "answer a chat"),
    Endpoint("POST", "/v1/completions", "API", "continue a text or token ids"),
    Endpoint("GET", "/v1/models", "API", "the models that workers serve, with `max_model_len`"),
    Endpoint("GET", "/v1/models/{model}", "API", "one of them"),
    Endpoint("GET", "/health", "", "200 while the process answers"),
    Endpoint(
        "GET",
        "/ready",
        "",
        "200 if requests can be served, otherwise 503 and the `reasons`; `degraded` names problems "
        "although requests are served, such as a reduced capacity or reports that do not arrive",
    ),
    Endpoint("GET", "/metrics", "", "[metrics](metrics.md#gateway) for Prometheus"),
    Endpoint("GET", "/admin/fleet", "admin", "the workers, their load and the state of the index"),
    Endpoint("GET", "/admin/cache", "admin", "the cache statistics of every worker"),
    Endpoint("GET", "/admin/policy", "admin", "the routing policy, and the names of all"),
    Endpoint("POST", "/admin/policy", "admin", 'change the policy: `{"policy": "locality"}`'),
    Endpoint(
        "POST",
        "/admin/explain",
        "admin",
        "the decision on a request with this body; nothing is sent",
    ),
    Endpoint(
        "GET",
        "/admin/decisions/{request_id}",
        "admin",
        f"the decision on a request that was sent with `{HEADER_EXPLAIN}: 1`",
    ),
    Endpoint("GET", "/admin/shadow", "admin", "the results of the shadow policies"),
    Endpoint("POST", "/admin/flush", "admin", "empty the caches of all workers"),
    Endpoint(
        "POST",
        "/admin/weights",
        "admin",
        'load other weights: `{"model": "PATH"}`, with `"worker": "ID"` on that worker only, until '
        "it is replaced",
    ),
]

SERVED = {
    "messages": "the chat; at least 1 message, at most `gateway.max_messages` "
    f"({DEFAULT_MAX_MESSAGES:,})",
    "prompt": "one non-empty text, or one list of token ids; either may be in a list of one",
    "model": "the name of a model in `/v1/models`",
    "stream": "answer as server-sent events",
    "stream_options": "only if `stream` is true",
    "max_tokens": "at least 1. The answer ends after so many tokens; default "
    "`gateway.default_max_tokens`, never more than the context leaves",
    "max_completion_tokens": "at least 1; takes precedence over `max_tokens`",
    "temperature": "0 (greedy) to 2; default 1",
    "top_p": "above 0, at most 1; default 1",
    "top_k": "-1 or 0 (off, the default) to 2³¹ − 1",
    "seed": "a 64-bit signed integer; by default each request draws one",
    "stop": f"at most {MAX_STOP_STRINGS} non-empty strings that end the answer and are left out",
    "n": "1",
    "tools": "given to the chat template; the answer is text",
    "tool_choice": '`"auto"` or `"none"` (the template gets no tools)',
    "chat_template_kwargs": "further variables for the chat template",
    "ignore_eos": "generate up to the limit, for load tests",
    "cache_salt": f"at most {MAX_SALT_CHARACTERS} characters. Names the tenant: requests with "
    "different salts share no cached blocks",
    "priority": f"from -{MAX_PRIORITY:,} to {MAX_PRIORITY:,}, 0 if it is not set. Requests with "
    "lower numbers start first",
    "request_type": f"at most {MAX_TYPE_CHARACTERS} characters. Names the kind of work, as a hint "
    "for the caches of workers",
}
"""Field -> meaning and bounds."""

MESSAGE = {
    "role": "passed to the chat template",
    "content": 'a text, or a list of parts `{"type": "text", "text": …}`, which are joined by line '
    "breaks; required unless there are `tool_calls`",
    "reasoning_content": "that of an earlier answer, passed to the chat template",
    "reasoning": "another name of `reasoning_content`",
    "name": "passed to the chat template",
    "tool_calls": "those of an earlier answer, passed to the chat template as objects",
    "tool_call_id": "passed to the chat template",
}

STREAM_OPTIONS = {
    "include_usage": "end the stream with a chunk that has `usage` and no choices",
    "continuous_usage_stats": "every chunk has the `usage` so far",
}

RESPONSE_HEADERS = {
    HEADER_REQUEST_ID: "the request's id, for `/admin/decisions/{request_id}`",
    HEADER_WORKER: "the worker that began the response",
    HEADER_MIGRATIONS: "how many workers went on with the response of one that had failed, if any "
    "did before the headers were sent",
    HEADER_IGNORED_FIELDS: "fields of the body that are not known, if there are any",
    HEADER_POLICY: "the policy that chose it",
    HEADER_PROMPT_TOKENS: "tokens of the prompt",
    HEADER_PREDICTED_HIT_TOKENS: "prompt tokens that the gateway expected the worker to reuse",
    HEADER_HIT_TOKENS: "prompt tokens that the worker reused",
}

_INVALID, _SERVER, _RATE = "invalid_request_error", "server_error", "rate_limit_error"

ERRORS = [
    ErrorCode("invalid_json", "400", _INVALID, "the body is not valid JSON, or nested too deeply"),
    ErrorCode("too_many_values", "400", _INVALID, "the body holds too many JSON values"),
    ErrorCode(
        "unsupported_parameter", "400", _INVALID, "a field cannot be served; `param` names it"
    ),
    ErrorCode(
        "context_length_exceeded",
        "400",
        _INVALID,
        "the prompt leaves no room in the context for an answer",
    ),
    ErrorCode(
        "deadline_too_short",
        "400",
        _INVALID,
        f"the prefill alone takes longer than `{HEADER_TIMEOUT}` allows",
    ),
    ErrorCode("tools_not_supported", "400", _INVALID, "the chat template does not use `tools`"),
    ErrorCode("no_chat_template", "400", _INVALID, "a chat with a model that has no chat template"),
    ErrorCode("unknown_policy", "400", _INVALID, "there is no such policy or parameter"),
    ErrorCode(
        "bad_request",
        "400, 431",
        _INVALID,
        "the request is not valid HTTP/1.1, or its head is too long",
    ),
    ErrorCode(
        "invalid_api_key", "401", "authentication_error", "the API or admin key is missing or wrong"
    ),
    ErrorCode(
        "admin_not_allowed",
        "403",
        "permission_error",
        "`/admin` from another machine without an admin key",
    ),
    ErrorCode("unknown_url", "404", _INVALID, "there is no such path"),
    ErrorCode("model_not_found", "404", _INVALID, "no worker serves this model"),
    ErrorCode("decision_not_kept", "404", _INVALID, "no decision on this request is kept"),
    ErrorCode(
        "method_not_allowed", "405", _INVALID, "the path takes other methods; `Allow` names them"
    ),
    ErrorCode(
        "body_too_large", "413", _INVALID, "the body is longer than `gateway.max_body_bytes`"
    ),
    ErrorCode("unsupported_coding", "415", _INVALID, "the body is compressed"),
    ErrorCode(
        "no_room",
        "429",
        _RATE,
        "no worker has room, and the admission queue is full or its time is up",
    ),
    ErrorCode(
        "overloaded",
        "429",
        _RATE,
        "the request would wait too long before it starts (`gateway.max_wait_s`)",
    ),
    ErrorCode(
        "deadline_unreachable",
        "429",
        _RATE,
        f"the first token is not expected within the time of `{HEADER_TIMEOUT}`",
    ),
    ErrorCode("queue_full", "429", _RATE, "too many requests wait at each worker that was tried"),
    ErrorCode("internal_error", "500", _SERVER, "the gateway failed; its log says why"),
    ErrorCode("worker_failed", "5xx", _SERVER, "the worker failed without an error body"),
    ErrorCode(
        "worker_lost",
        "502",
        _SERVER,
        "the worker closed the connection before the answer was complete",
    ),
    ErrorCode("flush_failed", "502", _SERVER, "a worker could not be flushed"),
    ErrorCode(
        "no_ready_worker",
        "503",
        SERVICE_UNAVAILABLE,
        "no worker of the model is ready; `/ready` says why",
    ),
    ErrorCode(
        "worker_unreachable", "503", SERVICE_UNAVAILABLE, "the worker did not accept a connection"
    ),
    ErrorCode(
        "process_unreachable", "503", _SERVER, "another process of this gateway did not answer"
    ),
    ErrorCode(
        "no_tokenizer", "503", SERVICE_UNAVAILABLE, "no worker sent the tokenizer of the model"
    ),
    ErrorCode(
        "too_many_connections", "503", SERVICE_UNAVAILABLE, "`gateway.max_connections` are open"
    ),
    ErrorCode(
        "too_many_bytes",
        "503",
        SERVICE_UNAVAILABLE,
        "the bodies of requests under way fill `gateway.max_held_body_bytes`",
    ),
    ErrorCode(
        "gateway_stopping",
        "503",
        SERVICE_UNAVAILABLE,
        "the gateway shuts down and the request did not end within `gateway.drain_timeout_s`; "
        "a stream ends with this error as an event",
    ),
    ErrorCode("no_worker", "503", SERVICE_UNAVAILABLE, "no worker is ready to load weights"),
    ErrorCode(
        "first_byte_timeout",
        "504",
        _SERVER,
        "no answer began within `gateway.first_byte_timeout_s`",
    ),
    ErrorCode(
        "deadline_exceeded",
        "504",
        _SERVER,
        f"the response was not complete within the time of `{HEADER_TIMEOUT}`",
    ),
    ErrorCode("flush_timeout", "504", _SERVER, "not every worker reported its new epoch in time"),
    ErrorCode(
        "weights_refused",
        "4xx, 502",
        "invalid_request_error` or `server_error",
        "a worker refused or failed to load the weights",
    ),
]


def render() -> str:
    """The page in Markdown."""
    return "\n".join(
        [
            _INTRODUCTION,
            _table(
                ("endpoint", "key", "purpose"),
                ((f"`{e.method} {e.path}`", e.key, e.purpose) for e in ENDPOINTS),
            ),
            _ADMISSION,
            "## Fields of a request\n",
            _FIELDS,
            _fields("Chats and completions", ChatBody, SERVED, lambda f: _of(f) == "both"),
            _fields("Chats", ChatBody, SERVED, lambda f: _of(f) == "chats"),
            _fields("Completions", CompletionBody, SERVED, lambda f: _of(f) == "completions"),
            _fields("A message", Message, MESSAGE),
            _fields("`stream_options`", StreamOptions, STREAM_OPTIONS),
            "### Refused\n",
            _REFUSED,
            _table(
                ("field", "advice"),
                ((f"`{field}`", rule.advice) for field, rule in sorted(UNSERVED.items())),
            ),
            "### Without effect\n",
            ", ".join(f"`{field}`" for field in sorted(NO_EFFECT)) + "\n",
            _ANSWERS,
            _table(
                ("response header", "meaning"),
                ((f"`{header}`", meaning) for header, meaning in RESPONSE_HEADERS.items()),
            ),
            _ERRORS,
            _table(
                ("status", "code", "type", "when"),
                ((e.status, f"`{e.code}`", f"`{e.type}`", e.when) for e in ERRORS),
            ),
        ]
    )


_INTRODUCTION = """# HTTP API of a gateway

The OpenAI API over HTTP/1.1, for chats and completions. Bodies are JSON.

## Endpoints
"""

_ADMISSION = f"""`HEAD` is answered like `GET`, without a body.

- **API key**: if `gateway.api_key` is set, `/v1` asks for `Authorization: Bearer KEY`.
- **Admin key**: if `gateway.admin_key` is set, `/admin` asks for it in the same way. If not,
  `/admin` answers only clients on the gateway's machine, and refuses requests that came through a
  proxy (`Forwarded`, `Via`, `X-Forwarded-For`, `X-Forwarded-Host` or `X-Real-IP`) or from a web
  page of another origin. A proxy that sends none of these headers cannot be recognised: set a key.
- A body may have {GatewaySettings().max_body_bytes:,} bytes (`gateway.max_body_bytes`). It must not
  be compressed.
- `{HEADER_TIMEOUT}: N` on a request is the time for its whole response, in milliseconds. A request
  whose first token cannot be expected by then is refused at once. One that has not ended by then
  ends with status 504, or its stream with an error event.
- `{HEADER_EXPLAIN}: 1` on a request makes the gateway keep its routing decision
  ([explaining.md](explaining.md)).
"""

_FIELDS = """`null` is the same as no value. A field that this page does not list is ignored, and
named in `x-stemroute-ignored-fields`.
"""

_REFUSED = """\
These fields would change the answer and are not supported. A value that changes nothing, such as
`null`, `false` or a penalty of 0, is accepted. Any other is answered 400 `unsupported_parameter`
with this advice.
"""

_ANSWERS = """## Answers

One JSON object, `chat.completion` or `text_completion`, with one choice; or a stream of events with
`chat.completion.chunk` or `text_completion` objects, which ends with `data: [DONE]`.
`finish_reason` is `stop` or `length`. `usage.prompt_tokens_details.cached_tokens` is the part of
the prompt that was reused. If a worker is lost in the middle of a stream, the stream ends with one
event `data: {"error": …}` and without `[DONE]`. A client that disconnects cancels its request.

A successful answer to a chat or completion has these headers:
"""

_ERRORS = f"""## Errors

The body is `{{"error": {{"message": …, "type": …, "param": …, "code": …}}}}`. The message says what
to do; `param` names the field at fault or is `null`. A field of the wrong type or out of its bounds
is answered 400 `invalid_request_error` with `code` `null`. Answers with 429 and 503 have
`Retry-After` in seconds: {RETRY_AFTER_S}, or more if the gateway knows when there will be room. An
error of a worker is passed on with the worker's own code: at once for 400, 413 and 422, otherwise
after `gateway.attempts` workers were tried.
"""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"


def _fields(
    title: str,
    body: type,
    meanings: dict[str, str],
    chosen: Callable[[str], bool] = lambda _: True,
) -> str:
    info = msgspec.inspect.type_info(body)
    assert isinstance(info, msgspec.inspect.StructType | msgspec.inspect.TypedDictType)
    required = {field.name for field in info.fields if field.required}
    rows = [
        (
            f"`{name}`",
            _written(kind) + (", required" if name in required else ""),
            meanings[name],
        )
        for name, kind in get_type_hints(body).items()
        if name in meanings and chosen(name)
    ]
    return f"### {title}\n\n" + _table(("field", "type", "meaning and bounds"), rows)


def _of(field: str) -> str:
    """Which requests have the field."""
    chat, completion = field in get_type_hints(ChatBody), field in get_type_hints(CompletionBody)
    return "both" if chat and completion else "chats" if chat else "completions"


_JSON_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    Any: "any",
}


def _written(kind: Any) -> str:
    """A type as JSON calls it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return " or ".join(_written(each) for each in arguments if each is not type(None))
    if origin is list:
        items = _written(arguments[0])
        return f"array of ({items})" if " or " in items else f"array of {items}"
    return _JSON_TYPES.get(origin or kind, "object")


if __name__ == "__main__":
    sys.stdout.write(render())
