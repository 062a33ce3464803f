"""Fields of the OpenAI API that would change an answer and are not served: which of their values
change nothing, and what a client is told about the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Unserved(NamedTuple):
    """`harmless` says of a value that it changes nothing; `advice` follows a refusal."""

    harmless: Callable[[Any], bool]
    advice: str


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == v and isinstance(value, type(v)) for v in values)


def _is_number(number: float) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and value == number
    )


_LEAVE_OUT = "leave it out"
UNSERVED: dict[str, Unserved] = {
    "best_of": Unserved(_is_number(1), "only one answer is drawn: leave it out or set it to 1"),
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
        'answers are free text: leave it out or set it to {"type": "text"}',
    ),
    "guided_json": Unserved(_is(), _LEAVE_OUT),
    "guided_regex": Unserved(_is(), _LEAVE_OUT),
    "guided_choice": Unserved(_is(), _LEAVE_OUT),
    "guided_grammar": Unserved(_is(), _LEAVE_OUT),
    "structured_outputs": Unserved(_is(), _LEAVE_OUT),
    "functions": Unserved(_is([]), "it is outdated: send `tools` instead"),
    "function_call": Unserved(_is("none", "auto"), "it cannot be forced: leave it out"),
    "modalities": Unserved(_is(["text"], []), 'only text is answered: set it to ["text"]'),
    "audio": Unserved(_is(), "only text is answered: leave it out"),
    "chat_template": Unserved(_is(), "the model's own chat template is used: leave it out"),
    "continue_final_message": Unserved(_is(False), "send a completion request instead"),
    "echo": Unserved(_is(False), "the prompt is not sent back: leave it out"),
    "suffix": Unserved(_is(""), "text is only generated at the end: leave it out"),
}
