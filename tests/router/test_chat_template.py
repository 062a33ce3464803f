"""Templates run in a sandbox, and read messages as jinja's own does."""

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief.", "items": "shadowed", "__class__": "a key"},
    {"role": "user", "content": " hello ", "name": None},
]
EXPRESSIONS = [
    "m.role",
    "m['role']",
    "m.missing",
    "m.missing is defined",
    "m.name is none",
    "m.items is string",
    "m['items']",
    "m.get('role')",
    "m.__class__",
    "m.content.strip().upper()",
    "loop.first ~ loop.last ~ loop.index ~ loop.index0 ~ loop.length",
    "loop.previtem.role",
    "loop.cycle('a', 'b')",
    "loop._length",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_attributes_are_those_of_jinjas_sandbox(expression):
    source = "{% for m in messages %}[{{ " + expression + " }}]{% endfor %}"
    own = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def outcome(render):
        try:
            return render()
        except jinja2.TemplateError as error:
            return type(error), str(error)

    expected = outcome(lambda: own.from_string(source).render(messages=MESSAGES))
    assert outcome(lambda: ChatTemplate(source, {}).render(MESSAGES)) == expected


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ messages[0].update({}) }}", "{{ ''.__class__.__mro__ }}"],
)
def test_a_template_changes_nothing_and_reaches_nothing(source):
    with pytest.raises(jinja2.TemplateError):
        ChatTemplate(source, {}).render(MESSAGES)
