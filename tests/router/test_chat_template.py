"""Chats rendered message by message are, letter for letter, those rendered whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.chat_template import ChatTemplate, NotByMessage
from tests.real_tokenizer import smollm2
from worker.weights import MissingModel

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ONE_BY_ONE = {
    "ChatML": CHATML,
    "a default system message at the first": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    ),
    "variables of one message": (
        "{% for message in messages %}{% set content = '<|h|>' + message['role'] + '\n\n' "
        "+ message['content'] | trim + '<|e|>' %}{% if loop.index0 == 0 %}"
        "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|h|>assistant\n\n' }}{% endif %}"
    ),
    "a head that reads the first message": (
        "{%- if messages[0]['role'] == 'system' %}{% set said = messages[0].content | trim %}"
        "{% else %}{% set said = 'Be brief.' %}{% endif %}{{ bos_token + said }}\n"
        "{%- for message in messages %}{% if not (loop.first and message.role == 'system') %}"
        "<|h|>{{ message.role ~ said|length }}:{{ message.content }}{% endif %}{% endfor %}<|h|>"
    ),
    "what was said before": (
        "{% for message in messages %}"
        "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != message.role %}"
        "<|h|>{{ message.role }}{% endif %}<|h|>{{ message.content }}{% endfor %}<|h|>"
    ),
    "tools, which nobody has": (
        "{% if tools %}{{ tools | tojson }}{% for tool in tools %}{{ loop.index }}{% endfor %}"
        "{% endif %}" + CHATML
    ),
    "a branch that looks ahead and is not taken": (
        "{% for message in messages %}<|h|>{{ message.role }}{{ message.content }}"
        "{% if message.role == 'tool' and loop.last %}!{% endif %}{% endfor %}<|h|>"
    ),
    "a loop within": (
        "{% for message in messages %}<|h|>{% for word in message.content.split() %}"
        "{{ loop.index }}{{ word }}{% if not loop.last %},{% endif %}{% endfor %}{% endfor %}<|h|>"
    ),
    "white space taken off": (
        "  {%- for message in messages -%}\n  <|h|>  {{- message.content -}}  \n"
        "{%- endfor -%}\n  <|h|> {{ 'x' }}\n"
    ),
}
KEEPS_STATE = {
    "a namespace": (
        "{% set ns = namespace(n=0) %}{% for message in messages %}{% set ns.n = ns.n + 1 %}"
        "{{ ns.n }}{{ message.content }}{% endfor %}"
    ),
    "other messages": (
        "{% set messages = messages[1:] %}{% for message in messages %}{{ message.content }}"
        "{% endfor %}"
    ),
    "the day": (
        "{% for message in messages %}{{ strftime_now('%d') }}{{ message.content }}{% endfor %}"
    ),
    "the day by another name": (
        "{% set now = strftime_now %}{% for message in messages %}{{ now('%d') }}{% endfor %}"
    ),
    "chance": "{% for message in messages %}{{ ['a', 'b'] | random }}{% endfor %}",
    "chance by name": "{% for message in messages %}{{ [['a']] | map('random') }}{% endfor %}",
    "a cycler": (
        "{% set c = cycler('a', 'b') %}{% for message in messages %}{{ c.next() }}{% endfor %}"
    ),
    "two loops": (
        "{% for message in messages %}a{% endfor %}{% for message in messages %}b{% endfor %}"
    ),
    "a filter": "{% for message in messages if message.role == 'user' %}a{% endfor %}",
    "an end to the loop": "{% for message in messages %}a{% break %}{% endfor %}",
    "a loop inside a condition": "{% if tools %}{% for m in messages %}a{% endfor %}{% endif %}",
}
LOOKS_AHEAD = {
    "the last": "{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}",
    "the length": "{% for m in messages %}{{ loop.length }}{% endfor %}",
    "the next": "{% for m in messages %}{{ loop.nextitem.content }}{% endfor %}",
    "how many": "{% for m in messages %}{{ messages | length }}{% endfor %}",
    "from the end": "{% for m in messages %}{{ messages[-1].content }}{% endfor %}",
    "one later": "{% for m in messages %}{{ messages[loop.index0 + 1].content }}{% endfor %}",
    "a part": "{% for m in messages %}{{ messages[1:] | length }}{% endfor %}",
    "all": "{% for m in messages %}{% for n in messages %}x{% endfor %}{% endfor %}",
    "all as text": "{% for m in messages %}{{ messages }}{% endfor %}",
    "all as JSON": "{% for m in messages %}{{ messages | tojson }}{% endfor %}",
    "whether it is a sequence": "{% for m in messages %}{{ messages is sequence }}{% endfor %}",
    "whether it can be gone through": (
        "{% for m in messages %}{{ messages is iterable }}{% endfor %}"
    ),
    "equality": "{% for m in messages %}{{ messages == [] }}{% endfor %}",
    "membership": "{% for m in messages %}{{ 'x' in messages }}{% endfor %}",
    "an attribute": "{% for m in messages %}{{ messages.copy is defined }}{% endfor %}",
    "the head": "{{ messages | length }}{% for m in messages %}x{% endfor %}",
    "the loop as text": "{% for m in messages %}{{ loop }}{% endfor %}",
}

texts = st.one_of(
    st.sampled_from(["", " a ", "Hi <|h|>", "{{ x }}", "<b>&\n"]), st.text(max_size=8)
)
chats = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["system", "user", "assistant"]),
        texts,
    ),
    min_size=1,
    max_size=5,
)


def pieces(template, messages) -> list[str]:
    parts = [template.part(messages, place) for place in range(len(messages))]
    return [*parts, template.tail(messages)]


@pytest.mark.parametrize("name", ONE_BY_ONE)
@settings(max_examples=60, deadline=None)
@given(chats)
def test_messages_one_by_one_are_the_whole(name, messages):
    template = ChatTemplate(ONE_BY_ONE[name], TOKENS)
    assert template.by_message
    assert "".join(pieces(template, messages)) == template.render(messages)


@pytest.mark.parametrize("name", ONE_BY_ONE)
@settings(max_examples=20, deadline=None)
@given(chats, chats)
def test_what_follows_changes_no_message(name, messages, later):
    template = ChatTemplate(ONE_BY_ONE[name], TOKENS)
    alone = pieces(template, messages)[:-1]
    assert pieces(template, messages + later)[: len(messages)] == alone


def test_a_real_models_template_writes_message_by_message():
    try:
        template = ChatTemplate(smollm2().chat_template, TOKENS)
    except MissingModel as error:
        pytest.skip(str(error))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert template.by_message
    assert "".join(pieces(template, messages)) == template.render(messages)


@pytest.mark.parametrize("name", KEEPS_STATE)
def test_a_template_that_keeps_state_is_rendered_whole(name):
    assert not ChatTemplate(KEEPS_STATE[name], TOKENS).by_message


@pytest.mark.parametrize("name", LOOKS_AHEAD)
def test_a_chat_whose_template_looks_ahead_is_rendered_whole(name):
    template = ChatTemplate(LOOKS_AHEAD[name], TOKENS)
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(NotByMessage):
        pieces(template, messages)


def test_a_template_that_refuses_a_message_says_so_of_the_whole():
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'villain' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}",
        TOKENS,
    )
    assert template.by_message
    villain = [{"role": "villain", "content": "x"}]
    with pytest.raises(NotByMessage):
        template.part(villain, 0)
    with pytest.raises(Exception, match="no"):
        template.render(villain)
