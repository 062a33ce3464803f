"""The OpenAI API: parses request bodies into one typed request.

Unsupported fields that would change the response are refused with a message that says what to
change (`router/unserved.py`). Unknown fields are named in a response header.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, Required, TypedDict, TypeVar

import msgspec

from cluster.protocol import RequestError, Sampling
from cluster.settings import GatewaySettings
from router.json_bounds import check_json_size
from router.unserved import refuse_unserved

MAX_STOP_STRINGS = 16
MAX_SALT_CHARACTERS = 256
MAX_TYPE_CHARACTERS = 64
MAX_PRIORITY = 1_000_000
DEFAULT_MAX_MESSAGES = GatewaySettings().max_messages

Kind = Literal["chat", "completion"]


class ContentPart(msgspec.Struct):
    """One part of a message's content; only `text` is supported."""

    type: str
    text: str | None = None


class Message(TypedDict, total=False):
    """One message of a chat. Reasoning and tool calls of earlier turns go to the chat template.

    A dictionary, because that is what chat templates take.
    """

    role: Required[str]
    content: str | list[ContentPart] | None
    reasoning_content: str | None
    reasoning: str | None
    name: str | None
    tool_calls: list[dict[str, Any]] | None
    tool_call_id: str | None


class StreamOptions(msgspec.Struct):
    """What a stream contains besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonBody(msgspec.Struct, kw_only=True):
    """Fields that both kinds of request support; `router/unserved.py` lists the others."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    request_type: str | None = None
    priority: int | None = None
    user: str | None = None


class ChatBody(CommonBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(CommonBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]


class _ServedChat(ChatBody, forbid_unknown_fields=True):
    """A chat of supported fields only."""


class _ServedCompletion(CompletionBody, forbid_unknown_fields=True):
    """A completion of supported fields only."""


class ApiRequest(NamedTuple):
    """A parsed request. Exactly one of messages, text and token_ids is set.

    messages         of a chat, with contents as plain strings, for the chat template
    text, token_ids  the prompt of a completion
    tools            for the chat template; None for none
    template_fields  further variables for the chat template
    max_tokens       None if the request sets no limit
    request_type     the client's name for the kind of work: a hint for the workers' caches
    priority         lower ones start first
    body_bytes       size of the parsed body, a measure of the work that remains
    ignored_fields   names of fields of the body that are neither supported nor refused
    """

    kind: Kind
    model: str
    sampling: Sampling
    max_tokens: int | None
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    tools: list[dict[str, Any]] | None = None
    template_fields: dict[str, Any] = {}  # noqa: RUF012  (never written)
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    cache_salt: str = ""
    request_type: str = ""
    priority: int = 0
    body_bytes: int = 0
    ignored_fields: tuple[str, ...] = ()

    @property
    def turn(self) -> int:
        """The turn of the conversation that a chat asks for, from 1; 0 for a completion."""
        return [message["role"] for message in self.messages or []].count("user")


def parse_chat(body: bytes, max_messages: int = DEFAULT_MAX_MESSAGES) -> ApiRequest:
    """Parse the body of a chat request. Raises RequestError (400)."""
    check_json_size(body, max_messages)
    parsed, ignored = _served(body, ChatBody, _ServedChat)
    if len(parsed.messages) > max_messages:
        raise RequestError(
            f"`messages` holds {len(parsed.messages)} messages: send at most {max_messages} "
            "(gateway.max_messages)",
            param="messages",
        )
    if not parsed.messages:
        raise RequestError("`messages` is empty: send at least one message", param="messages")
    if parsed.max_completion_tokens is not None:
        _at_least("max_completion_tokens", parsed.max_completion_tokens, 1)
    if parsed.tools and not (
        parsed.tool_choice is None or parsed.tool_choice in ("auto", "none", {})
    ):
        raise RequestError(
            "`tool_choice` cannot force a tool call here: leave it out, or set it to "
            '"auto" or "none"',
            param="tool_choice",
        )
    limit = parsed.max_completion_tokens
    return _common(parsed, "chat", parsed.max_tokens if limit is None else limit)._replace(
        body_bytes=len(body),
        ignored_fields=ignored,
        messages=[
            message  # type: ignore[misc]  # a role and a text, as mostly
            if len(message) == 2 and type(message.get("content")) is str
            else _plain(place, message, max_messages)
            for place, message in enumerate(parsed.messages)
        ],
        tools=(parsed.tools or None) if parsed.tool_choice != "none" else None,
        template_fields=parsed.chat_template_kwargs or {},
    )


def parse_completion(body: bytes, max_messages: int = DEFAULT_MAX_MESSAGES) -> ApiRequest:
    """Parse the body of a completion request. Raises RequestError (400).

    `max_messages` bounds the JSON values of the body, as in a chat.
    """
    check_json_size(body, max_messages)
    parsed, ignored = _served(body, CompletionBody, _ServedCompletion)
    request = _common(parsed, "completion", parsed.max_tokens)._replace(
        body_bytes=len(body), ignored_fields=ignored
    )
    prompt = parsed.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # type: ignore[assignment]  # a list of one prompt
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("`prompt` is empty: send at least one character", param="prompt")
        return request._replace(text=prompt)
    if not prompt:
        raise RequestError("`prompt` is empty: send text or token ids", param="prompt")
    token_ids = [token for token in prompt if isinstance(token, int)]
    if not token_ids or len(token_ids) != len(prompt):
        raise RequestError(
            f"`prompt` holds {len(prompt)} prompts: send one prompt per request, as a string or as "
            "a list of token ids",
            param="prompt",
        )
    return request._replace(token_ids=token_ids)


class _Kinds(msgspec.Struct):
    """The field that distinguishes a chat from a completion."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def parse_either(body: bytes, max_messages: int = DEFAULT_MAX_MESSAGES) -> ApiRequest:
    """Parse a chat (it has `messages`) or a completion. Raises RequestError (400)."""
    is_chat = _decode(body, _Kinds).messages is not msgspec.UNSET
    return (parse_chat if is_chat else parse_completion)(body, max_messages)


_Body = TypeVar("_Body", bound=msgspec.Struct)


def _decode(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error
    except RecursionError as error:
        raise RequestError(
            "the body nests objects and arrays too deeply: send a flatter one", code="invalid_json"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the body is not valid JSON: {error}; send a JSON object", code="invalid_json"
        ) from error


def _served(body: bytes, kind: type[_Body], strict: type[_Body]) -> tuple[_Body, tuple[str, ...]]:
    """The body as `kind`, and the names of its unknown fields. Raises RequestError (400).

    `strict` is `kind` without other fields: most bodies have none, and are read only once.
    """
    try:
        return msgspec.json.decode(body, type=strict), ()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        parsed = _decode(body, kind)
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return parsed, refuse_unserved(fields, kind)


def _wrong_type(reason: str) -> RequestError:
    """Turn msgspec's "Expected `int`, got `str` - at `$.n`" into a field and a sentence."""
    what, _, place = reason.partition(" - at `$")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    param = place.rstrip("`").lstrip(".")
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return RequestError(f"`{param}` is missing: it is required", param=param)
    if not param:
        return RequestError(f"the body must be a JSON object: {_lower(what)}")
    return RequestError(f"`{param}` has the wrong type: {_lower(what)}", param=param)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _common(body: CommonBody, kind: Kind, max_tokens: int | None) -> ApiRequest:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"`stop` holds {len(stop)} strings: send at most {MAX_STOP_STRINGS}", param="stop"
        )
    if "" in stop:
        raise RequestError("`stop` holds an empty string: leave it out", param="stop")
    if body.n is not None and body.n != 1:
        raise RequestError(
            f"`n` is {body.n}: only 1 choice per request is supported; send more requests",
            param="n",
        )
    if body.max_tokens is not None:
        _at_least("max_tokens", body.max_tokens, 1)
    temperature = 1.0 if body.temperature is None else body.temperature
    if not 0.0 <= temperature <= 2.0:
        raise RequestError(
            f"`temperature` is {temperature:g}: it must be between 0 and 2", param="temperature"
        )
    top_p = 1.0 if body.top_p is None else body.top_p
    if not 0.0 <= top_p <= 1.0:
        raise RequestError(f"`top_p` is {top_p:g}: it must be between 0 and 1", param="top_p")
    if top_p == 0.0:  # greedy: only the most probable token remains
        temperature, top_p = 0.0, 1.0
    if body.top_k is not None:
        _at_least("top_k", body.top_k, -1)
        if body.top_k >= 2**31:
            raise RequestError("`top_k` is too large: 0 or -1 turns it off", param="top_k")
    if body.seed is not None and not -(2**63) <= body.seed < 2**63:
        raise RequestError("`seed` must be a 64-bit signed integer", param="seed")
    salt = body.cache_salt or ""
    if len(salt) > MAX_SALT_CHARACTERS:
        raise RequestError(
            f"`cache_salt` has {len(salt)} characters: send at most {MAX_SALT_CHARACTERS}",
            param="cache_salt",
        )
    kind_of_work = body.request_type or ""
    if len(kind_of_work) > MAX_TYPE_CHARACTERS:
        raise RequestError(
            f"`request_type` has {len(kind_of_work)} characters: send at most "
            f"{MAX_TYPE_CHARACTERS}",
            param="request_type",
        )
    priority = body.priority or 0
    if abs(priority) > MAX_PRIORITY:
        raise RequestError(
            f"`priority` is {priority}: it must be between -{MAX_PRIORITY} and {MAX_PRIORITY}",
            param="priority",
        )
    stream = bool(body.stream)
    options = body.stream_options
    if options is not None and not stream:
        raise RequestError(
            "`stream_options` is only for streams: set `stream` to true or leave it out",
            param="stream_options",
        )
    return ApiRequest(
        kind=kind,
        model=body.model,
        sampling=Sampling(
            max_tokens=1,  # set when the prompt's length is known
            temperature=temperature,
            top_p=top_p,
            top_k=max(0, body.top_k or 0),
            seed=body.seed,
            stop=stop,
            ignore_eos=bool(body.ignore_eos),
        ),
        max_tokens=max_tokens,
        stream=stream,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        cache_salt=salt,
        request_type=kind_of_work,
        priority=priority,
    )


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise RequestError(f"`{field}` is {value}: it must be at least {least}", param=field)


def _plain(place: int, message: Message, max_messages: int) -> dict[str, Any]:
    """A message for a chat template: text parts are joined by line breaks."""
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for number, part in enumerate(content):
            param = f"messages[{place}].content[{number}]"
            if part.type != "text":
                raise RequestError(
                    f"`{param}` is of type {part.type!r}: only parts of type 'text' can be served",
                    param=param,
                )
            if part.text is None:
                raise RequestError(f"`{param}.text` is missing: it is required", param=param)
            texts.append(part.text)
        content = "\n".join(texts)
    if content is None and message["role"] != "assistant":
        param = f"messages[{place}].content"
        raise RequestError(f"`{param}` is missing: send a string", param=param)
    plain: dict[str, Any] = {"role": message["role"], "content": content or ""}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning is not None:  # templates read either name
        plain["reasoning_content"] = plain["reasoning"] = reasoning
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            plain[name] = message[name]
    if (calls := message.get("tool_calls")) is not None:
        plain["tool_calls"] = [_parsed_call(call, max_messages) for call in calls]
    return plain


def _parsed_call(call: dict[str, Any], max_messages: int) -> dict[str, Any]:
    """A tool call whose arguments are an object, as chat templates expect.

    The API sends them as a JSON string. A string that is not valid JSON, which a model may have
    produced, stays a string, and so does one with more values than a body may hold.
    """
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    text = function["arguments"].encode() or b"{}"
    try:
        check_json_size(text, max_messages)
        arguments = msgspec.json.decode(text)
    except (RequestError, msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
