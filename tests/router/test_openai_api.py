"""Bodies are understood tolerantly, checked strictly, and refused with a sentence."""

import json

import pytest

from cluster.protocol import RequestError, Sampling
from router.openai_api import ChatBody, CompletionBody, parse_chat, parse_completion
from router.unserved import NO_EFFECT, UNSERVED

MANY_ARRAYS = f"[{'[],' * 60_000}1]"
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields):
    return parse_chat(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def completion(**fields):
    return parse_completion(json.dumps({"model": "m", "prompt": "hello", **fields}).encode())


def test_a_plain_chat():
    asked = chat()
    assert (asked.kind, asked.model, asked.messages) == ("chat", "m", HELLO)
    assert asked.sampling == Sampling(max_tokens=1)
    assert asked.max_tokens is None
    assert (asked.stream, asked.include_usage, asked.cache_salt) == (False, False, "")


def test_all_that_is_served_arrives():
    asked = chat(
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        max_completion_tokens=7,
        max_tokens=9,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        seed=-3,
        stop="END",
        n=1,
        ignore_eos=True,
        cache_salt="tenant",
        user="somebody",
        chat_template_kwargs={"enable_thinking": False},
    )
    assert asked.max_tokens == 7
    assert asked.sampling == Sampling(
        max_tokens=1, temperature=0.0, top_p=0.5, seed=-3, stop=["END"], ignore_eos=True
    )
    assert (asked.stream, asked.include_usage, asked.continuous_usage) == (True, True, True)
    assert asked.cache_salt == "tenant"
    assert asked.template_fields == {"enable_thinking": False}
    assert completion(top_k=5, stop=["a", "b"]).sampling.stop == ["a", "b"]
    assert completion(top_k=5).sampling.top_k == 5


def test_nulls_harmless_values_and_unknown_fields_are_ignored():
    asked = chat(
        temperature=None,
        n=None,
        stop=None,
        logprobs=False,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        response_format={"type": "text"},
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        parallel_tool_calls=True,
    )
    assert asked._replace(body_bytes=0) == chat()._replace(body_bytes=0)
    served = completion(best_of=1, echo=False, suffix=None)
    assert served._replace(body_bytes=0) == completion()._replace(body_bytes=0)


def test_the_size_of_the_body_is_kept():
    body = json.dumps({"model": "m", "prompt": "é"}).encode()
    assert parse_completion(body).body_bytes == len(body)


def test_a_chat_of_too_many_messages_is_refused_with_the_bound():
    body = json.dumps({"model": "m", "messages": HELLO * 4}).encode()
    assert len(parse_chat(body, 4).messages) == 4
    with pytest.raises(RequestError, match=r"4 messages: send at most 3 \(gateway.max_messages\)"):
        parse_chat(body, 3)
    with pytest.raises(RequestError, match="at most 10000 messages") as big:
        parse_chat(json.dumps({"model": "m", "messages": HELLO * 100_000}).encode())
    assert big.value.status == 400


@pytest.mark.parametrize("depth", [2_000, 1_000_000])
@pytest.mark.parametrize("field", ["tools", "unknown"])
def test_json_that_nests_too_deeply_is_refused(field, depth):
    nested = "[" * depth + "]" * depth
    body = f'{{"model": "m", "messages": [], "{field}": [{{"a": {nested}}}]}}'
    with pytest.raises(RequestError, match=r"the body (nests|holds)") as refusal:
        parse_chat(body.encode())
    assert refusal.value.status == 400


def test_text_parts_become_one_string():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "x": 1}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages == [
        {"role": "user", "content": "one\ntwo"}
    ]


def test_tools_are_shown_to_the_template_unless_none_are_wanted():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(tools=tools).tools == tools
    assert chat(tools=tools, tool_choice="auto").tools == tools
    assert chat(tools=tools, tool_choice="none").tools is None
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    assert chat(messages=history).messages[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
            ],
        },
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize(
    ("sent", "given"),
    [
        ('{"a": [1, "é"]}', {"a": [1, "é"]}),
        ("", {}),
        ("{broken", "{broken"),
        ("[" * 100_000, "[" * 100_000),
        (MANY_ARRAYS, MANY_ARRAYS),
        ({"a": 1}, {"a": 1}),
    ],
)
def test_the_arguments_of_tool_calls_reach_the_template_parsed(sent, given):
    calls = [{"type": "function", "function": {"name": "f", "arguments": sent}}, {"id": "odd"}]
    history = [*HELLO, {"role": "assistant", "tool_calls": calls}]
    called, odd = chat(messages=history).messages[1]["tool_calls"]
    assert called["function"] == {"name": "f", "arguments": given}
    assert odd == {"id": "odd"}


def test_an_assistant_may_have_said_nothing():
    history = [*HELLO, {"role": "assistant", "content": None}, *HELLO]
    assert chat(messages=history).messages[1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_earlier_reasoning_reaches_the_template_under_both_names(name):
    history = [*HELLO, {"role": "assistant", "content": "4", name: "2 + 2"}, *HELLO]
    said = chat(messages=history).messages[1]
    assert (said["reasoning_content"], said["reasoning"]) == ("2 + 2", "2 + 2")


def test_a_nucleus_of_nothing_is_greedy():
    assert chat(top_p=0).sampling == Sampling(max_tokens=1, temperature=0.0, top_p=1.0)
    with pytest.raises(RequestError, match="between 0 and 1"):
        chat(top_p=-0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("truncate_prompt_tokens", 5),
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("add_special_tokens", False),
        ("regex", "a+"),
        ("reasoning_effort", "high"),
    ],
)
def test_fields_that_would_change_the_answer_are_refused(field, value):
    with pytest.raises(RequestError, match=f"`{field}` cannot be served") as refused:
        chat(**{field: value})
    assert (refused.value.status, refused.value.param) == (400, field)
    assert chat(**{field: None}).ignored_fields == ()


def test_unknown_fields_are_named_unless_a_header_cannot_hold_them():
    asked = chat(max_toksn=5, **{"a\r\nSet-Cookie: b": 1, "é": 2, "x" * 65: 3}, store=True)
    assert asked.ignored_fields == ("max_toksn",)
    assert len(completion(**{f"field{n}": n for n in range(50)}).ignored_fields) == 16


def test_no_field_is_both_served_and_listed_as_not_served():
    served = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    assert not served & UNSERVED.keys()
    assert not UNSERVED.keys() & NO_EFFECT


def test_prompts_are_text_or_token_ids():
    assert completion().text == "hello"
    assert completion(prompt=["hello"]).text == "hello"
    assert completion(prompt=[1, 2, 3]).token_ids == [1, 2, 3]
    assert completion(prompt=[[1, 2, 3]]).token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"model": 5}, "model", "`model` has the wrong type: expected `str`, got `int`"),
        ({"messages": "hi"}, "messages", "wrong type: expected `array`"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "`messages[0].role` is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "send a string"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "wrong type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
            "only parts of type 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0]",
            "text` is missing",
        ),
        ({"stream": "yes"}, "stream", "wrong type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only for streams"),
        ({"max_tokens": 0}, "max_tokens", "`max_tokens` is 0: it must be at least 1"),
        ({"max_tokens": "9"}, "max_tokens", "wrong type"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"temperature": 2.1}, "temperature", "between 0 and 2"),
        ({"temperature": -0.1}, "temperature", "between 0 and 2"),
        ({"temperature": "hot"}, "temperature", "wrong type"),
        ({"temperature": True}, "temperature", "wrong type"),
        ({"top_p": -0.5}, "top_p", "between 0 and 1"),
        ({"top_p": 1.5}, "top_p", "between 0 and 1"),
        ({"top_k": -2}, "top_k", "at least -1"),
        ({"top_k": 2**40}, "top_k", "too large"),
        ({"seed": 2**63}, "seed", "64-bit"),
        ({"stop": ["x"] * 17}, "stop", "at most 16"),
        ({"stop": ""}, "stop", "empty string"),
        ({"stop": [1]}, "stop[0]", "wrong type"),
        ({"n": 2}, "n", "send more requests"),
        ({"cache_salt": "x" * 300}, "cache_salt", "at most 256"),
        ({"request_type": "x" * 65}, "request_type", "at most 64"),
        ({"logprobs": True}, "logprobs", "leave it out"),
        ({"top_logprobs": 3}, "top_logprobs", "leave it out"),
        ({"presence_penalty": 0.5}, "presence_penalty", "set it to 0"),
        ({"frequency_penalty": -1}, "frequency_penalty", "set it to 0"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "set it to 1"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format", '{"type": "text"}'),
        ({"tools": [{}], "tool_choice": "required"}, "tool_choice", "cannot force"),
        ({"tools": [{}], "tool_choice": {"type": "function"}}, "tool_choice", "cannot force"),
        ({"functions": [{}]}, "functions", "`tools`"),
        ({"modalities": ["audio"]}, "modalities", "only text"),
        ({"min_p": 0.1}, "min_p", "top_p"),
        ({"guided_json": {}}, "guided_json", "leave it out"),
        ({"chat_template": "x"}, "chat_template", "the model's own"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields, param, words):
    with pytest.raises(RequestError) as refusal:
        chat(**fields)
    assert refusal.value.status == 400
    assert refusal.value.type == "invalid_request_error"
    assert refusal.value.param == param
    assert words in refusal.value.message


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": []}, "prompt", "is empty"),
        ({"prompt": [[]]}, "prompt", "is empty"),
        ({"prompt": ["a", "b"]}, "prompt", "2 prompts: send one prompt per request"),
        ({"prompt": [[1], [2]]}, "prompt", "2 prompts"),
        ({"prompt": [1, "a"]}, "prompt", "2 prompts"),
        ({"prompt": [True]}, "prompt[0]", "wrong type"),
        ({"prompt": 5}, "prompt", "wrong type"),
        ({"logprobs": 0}, "logprobs", "leave it out"),
        ({"best_of": 2}, "best_of", "leave it out"),
        ({"echo": True}, "echo", "leave it out"),
        ({"suffix": "end"}, "suffix", "leave it out"),
    ],
)
def test_completions_that_cannot_be_served(fields, param, words):
    with pytest.raises(RequestError) as refusal:
        completion(**fields)
    assert (refusal.value.status, refusal.value.param) == (400, param)
    assert words in refusal.value.message


@pytest.mark.parametrize("body", [b"", b"{", b"{'a': 1}", b'{"a": \xff}'])
def test_what_is_not_json_is_said_to_be_so(body):
    with pytest.raises(RequestError, match="not valid JSON") as refusal:
        parse_chat(body)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_json")


def test_a_body_that_is_no_object_and_one_without_its_fields():
    with pytest.raises(RequestError, match="must be a JSON object"):
        parse_chat(b"[]")
    with pytest.raises(RequestError):
        parse_chat(b'{"model": "m", "messages": [], "metadata": ' + b"[" * 100_000)
    with pytest.raises(RequestError, match="`messages` is missing"):
        parse_chat(b'{"model": "m"}')
    with pytest.raises(RequestError, match="`prompt` is missing"):
        parse_completion(b'{"model": "m"}')
