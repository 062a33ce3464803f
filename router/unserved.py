"""Fields of OpenAI's, vLLM's and SGLang's servers that are not supported here.

`UNSERVED` lists those that would change a response: which of their values change nothing, and the
advice to a client that sends another value. `NO_EFFECT` lists those that never change a response.
Every other field is unknown, and is named in the response.

Sources: OpenAI's API reference (chat completions, completions), vLLM's `ChatCompletionRequest` and
`CompletionRequest`, SGLang's protocol of the same names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from cluster.protocol import RequestError


class Unserved(NamedTuple):
    """`harmless` tells whether a value changes nothing; `advice` is part of the refusal."""

    harmless: Callable[[Any], bool]
    advice: str


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == v and isinstance(value, type(v)) for v in values)


def _is_number(number: float) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and value == number
    )


_LEAVE_OUT = "leave it out"
_NEVER = _is()
_EMPTY = _is({}, [], "")
UNSERVED: dict[str, Unserved] = {
    "best_of": Unserved(_is_number(1), "only one choice is generated: leave it out or set it to 1"),
    "logprobs": Unserved(_is(False), "log probabilities are not returned: leave it out"),
    "top_logprobs": Unserved(_is_number(0), "log probabilities are not returned: leave it out"),
    "prompt_logprobs": Unserved(_is_number(0), "log probabilities are not returned: leave it out"),
    "frequency_penalty": Unserved(_is_number(0), "leave it out or set it to 0"),
    "presence_penalty": Unserved(_is_number(0), "leave it out or set it to 0"),
    "repetition_penalty": Unserved(_is_number(1), "leave it out or set it to 1"),
    "logit_bias": Unserved(_is({}), _LEAVE_OUT),
    "min_p": Unserved(_is_number(0), "leave it out or set it to 0; `top_p` is served"),
    "min_tokens": Unserved(_is_number(0), "leave it out or set it to 0"),
    "stop_token_ids": Unserved(_is([]), "leave it out; `stop` takes strings"),
    "bad_words": Unserved(_is([]), _LEAVE_OUT),
    "allowed_token_ids": Unserved(_is([]), _LEAVE_OUT),
    "use_beam_search": Unserved(_is(False), _LEAVE_OUT),
    "response_format": Unserved(
        lambda value: isinstance(value, dict) and value.get("type") == "text",
        'output is free text: leave it out or set it to {"type": "text"}',
    ),
    "guided_json": Unserved(_is(), _LEAVE_OUT),
    "guided_regex": Unserved(_is(), _LEAVE_OUT),
    "guided_choice": Unserved(_is(), _LEAVE_OUT),
    "guided_grammar": Unserved(_is(), _LEAVE_OUT),
    "structured_outputs": Unserved(_is(), _LEAVE_OUT),
    "functions": Unserved(_is([]), "it is deprecated: send `tools` instead"),
    "function_call": Unserved(_is("none", "auto"), "a call cannot be forced: leave it out"),
    "modalities": Unserved(_is(["text"], []), 'only text is generated: set it to ["text"]'),
    "audio": Unserved(_is(), "only text is generated: leave it out"),
    "chat_template": Unserved(_is(), "the model's own chat template is used: leave it out"),
    "continue_final_message": Unserved(_is(False), "send a completion request instead"),
    "echo": Unserved(_is(False), "the prompt is not echoed: leave it out"),
    "suffix": Unserved(_is(""), "text is only generated after the prompt: leave it out"),
    "truncate_prompt_tokens": Unserved(_NEVER, "prompts are not truncated: shorten the prompt"),
    "add_generation_prompt": Unserved(_is(True), "it is always true: leave it out"),
    "include_stop_str_in_output": Unserved(
        _is(False), "stop strings are never returned: leave it out"
    ),
    "skip_special_tokens": Unserved(_is(True), "special tokens are never returned: leave it out"),
    "spaces_between_special_tokens": Unserved(
        _is(True), "special tokens are never returned: leave it out"
    ),
    "add_special_tokens": Unserved(
        _NEVER, "the chat template or the tokenizer adds them: leave it out"
    ),
    "length_penalty": Unserved(_is_number(1), "beam search is not supported: leave it out"),
    "early_stopping": Unserved(_is(False), "beam search is not supported: leave it out"),
    "return_token_ids": Unserved(_is(False), "token ids are not returned: leave it out"),
    "return_tokens_as_token_ids": Unserved(_is(False), "token ids are not returned: leave it out"),
    "logits_processors": Unserved(_EMPTY, _LEAVE_OUT),
    "thinking_token_budget": Unserved(_NEVER, "set `max_tokens` instead"),
    "documents": Unserved(_EMPTY, "put the documents into `messages`"),
    "prompt_embeds": Unserved(_NEVER, "send text or token ids"),
    "lora_path": Unserved(_EMPTY, "adapters are not served: leave it out"),
    "session_params": Unserved(_EMPTY, "send the whole prompt"),
    "regex": Unserved(_NEVER, _LEAVE_OUT),
    "ebnf": Unserved(_NEVER, _LEAVE_OUT),
    "json_schema": Unserved(_NEVER, _LEAVE_OUT),
    "structural_tag": Unserved(_NEVER, _LEAVE_OUT),
    "guided_whitespace_pattern": Unserved(_NEVER, _LEAVE_OUT),
    "no_stop_trim": Unserved(_is(False), "stop strings are never returned: leave it out"),
    "stop_regex": Unserved(_EMPTY, "leave it out; `stop` takes strings"),
    "custom_logit_processor": Unserved(_EMPTY, _LEAVE_OUT),
    "custom_params": Unserved(_EMPTY, _LEAVE_OUT),
    "return_hidden_states": Unserved(_is(False), _LEAVE_OUT),
    "input_ids": Unserved(_EMPTY, "send token ids as `prompt` of a completion"),
    "reasoning_effort": Unserved(
        _NEVER, "pass the chat template's variables in `chat_template_kwargs`"
    ),
    "thinking": Unserved(_NEVER, "pass the chat template's variables in `chat_template_kwargs`"),
    "separate_reasoning": Unserved(
        _is(False), "reasoning is returned as part of the text: leave it out"
    ),
    "include_reasoning": Unserved(
        _is(True), "reasoning is returned as part of the text: leave it out"
    ),
    "verbosity": Unserved(_is("medium"), _LEAVE_OUT),
    "web_search_options": Unserved(_NEVER, "the gateway does not call tools itself: leave it out"),
    "mm_processor_kwargs": Unserved(_EMPTY, "only text is served: leave it out"),
    "media_io_kwargs": Unserved(_EMPTY, "only text is served: leave it out"),
    "kv_transfer_params": Unserved(_EMPTY, _LEAVE_OUT),
    "vllm_xargs": Unserved(_EMPTY, _LEAVE_OUT),
    "repetition_detection": Unserved(_NEVER, _LEAVE_OUT),
}
"""Fields that would change a response."""

NO_EFFECT = frozenset(
    {
        *("metadata", "store", "service_tier", "safety_identifier", "prediction", "user"),
        *("prompt_cache_key", "prompt_cache_retention", "request_id", "rid"),
        *("parallel_tool_calls", "return_cached_tokens_details", "stream_reasoning"),
        *("enable_response_messages", "return_prompt_token_ids", "cache_report"),
    }
)
"""Fields that change no response: labels, hints, and choices between equal results."""

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_NAMES = 16


def refuse_unserved(
    fields: Mapping[str, msgspec.Raw], served: type[msgspec.Struct]
) -> tuple[str, ...]:
    """Names of a body's unknown fields, at most `MAX_NAMES`.

    Names that are not plain words are omitted, because the result goes into a response header.
    Raises RequestError (400) for a field that would change the response.
    """
    known = served.__struct_fields__
    others = [name for name in fields if name not in known and name not in NO_EFFECT]
    unknown = []
    for name in others:
        rule = UNSERVED.get(name)
        if rule is None:
            if NAME.fullmatch(name):
                unknown.append(name)
            continue
        value = msgspec.json.decode(fields[name])
        if value is not None and not rule.harmless(value):
            raise RequestError(
                f"`{name}` cannot be served: {rule.advice}",
                param=name,
                code="unsupported_parameter",
            )
    return tuple(unknown[:MAX_NAMES])
