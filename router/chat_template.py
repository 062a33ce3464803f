"""A model's chat template: chats to text.

Every request renders its whole chat, which takes less than 1 µs per message for most templates.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.parser
import jinja2.sandbox
import msgspec
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context

Message = dict[str, Any]

MAX_DEPTH = 64
"""Deepest nesting of a value that a template writes as JSON. Indented, each line of a value takes
as many characters as its depth times the indent: a body of 64 kB could become a text of 110 MB."""


class ChatTemplate:
    """A template, compiled once. Thread-safe.

    special_tokens   variables for the template, such as `bos_token`
    uses_tools       whether the template reads `tools`; otherwise it would ignore them silently
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        self._environment = environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._template = environment.from_string(source)
        self.uses_tools = "tools" in jinja2.meta.find_undeclared_variables(
            environment.parse(source)
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        fields: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat. Raises any exception that the template raises for the messages."""
        variables = {
            **self._environment.globals,
            **(fields or {}),
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": True,
        }
        # as `Template.render` does, but that takes 5 µs more for the globals
        context = Context(self._environment, variables, None, self._template.blocks)
        return "".join(self._template.root_render_func(context))


_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset({"first", "last", "index", "index0", "length"})


class _InPlace(CodeGenerator):
    """Compiles the most frequent reads, `message.role`, `message['role']` and `loop.first`, without
    calls of the sandbox, whose checks take three quarters of the rendering time. It checks all
    other reads."""

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        unchecked = ""
        if isinstance(node.node, nodes.Name):
            ref = frame.symbols.ref(node.node.name)
            if node.node.name == "loop" and node.attr in _LOOP_ATTRIBUTES:
                unchecked = f"{ref}.{node.attr} if {ref}.__class__ is LoopContext else "
            elif node.attr not in _DICT_ATTRIBUTES:
                unchecked = _entry(ref, node.attr)
        self.write(f"({unchecked}")
        super().visit_Getattr(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        unchecked = ""
        if isinstance(node.node, nodes.Name) and isinstance(node.arg, nodes.Const):
            unchecked = _entry(frame.symbols.ref(node.node.name), node.arg.value)
        self.write(f"({unchecked}")
        super().visit_Getitem(node, frame)
        self.write(")")


def _entry(ref: str, key: Any) -> str:
    return f"{ref}[{key!r}] if {ref}.__class__ is dict and {key!r} in {ref} else "


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    code_generator_class = _InPlace


class _Generation(jinja2.ext.Extension):
    """Accepts the tag with which templates mark assistant text for training; it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
        extensions=[jinja2.ext.loopcontrols, _Generation],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, (dict, list))]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` with the parameters that it has in `transformers`, in their order.

    Raises TemplateError for a value that is nested more than `MAX_DEPTH` deep.
    """
    depth, level = 0, _containers([value])
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise jinja2.TemplateError(f"a value is nested more than {MAX_DEPTH} deep")
        level = [
            inner
            for outer in level
            for inner in _containers(outer.values() if isinstance(outer, dict) else outer)
        ]
    if indent and separators is None:
        compact = json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
        return msgspec.json.format(compact, indent=indent)  # as json.dumps indents, but quicker
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
