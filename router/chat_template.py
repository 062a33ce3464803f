"""A model's chat template: whole chats to text and, where that is provably the same, message by
message.

Rendering all messages of a long chat for one new message costs more than tokenising that message.
Many templates write one message after the other:

    [head] {% for message in messages %} body {% endfor %} [tail]

Such a template is taken apart. A message's text is what head and body write for it alone, less
what the head writes. It is the same as in the whole chat where head and body keep no state
from one message to the next, which is read off the template's syntax, and where they read nothing
that later messages may change, which is watched while they run: they get stand-ins for `messages`
and `loop` that answer what earlier messages settle and end the attempt at anything else.
"""

from __future__ import annotations

import datetime
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

Message = dict[str, Any]


class NotByMessage(BaseException):
    """This chat must be rendered whole.

    No `Exception`: filters and tests of jinja turn those into answers.
    """


class ChatTemplate:
    """A template, compiled once. Thread-safe.

    special_tokens   variables for the template, such as `bos_token`
    by_message       whether `part` and `tail` may be tried
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]) -> None:
        environment = _environment()
        self._globals = dict(environment.globals)
        self._special_tokens = dict(special_tokens)
        self._whole = environment.from_string(source)
        parts = _take_apart(environment.parse(source))
        self.by_message = parts is not None
        if parts is None:
            return
        self._variable = parts.variable
        self._head, self._body, self._tail = (
            environment.from_string(nodes.Template(each, lineno=1))
            for each in (parts.head, parts.head + parts.body, parts.head + parts.tail)
        )
        self._has_head = bool(parts.head)
        self._fixed_tail: str | None = None
        if not _names(parts.head + parts.tail, "load") & {"messages"}:
            try:
                self._fixed_tail = self.tail([])
            except NotByMessage:
                self.by_message = False

    def render(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        fields: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat. Raises whatever a template raises at a client's messages."""
        return _text(self._whole, {**self._context(messages, fields or {}), "tools": tools})

    def part(self, messages: Sequence[Message], place: int) -> str:
        """What the message at `place` adds to the text, whatever follows it.

        With the first comes what the head writes. Raises NotByMessage.
        """
        context = self._context(_Settled(messages, place))
        context |= {self._variable: messages[place], "loop": _Loop(place)}
        try:
            return _text(self._body, context)[self._head_length(context) if place else 0 :]
        except Exception as error:
            raise NotByMessage from error

    def tail(self, messages: Sequence[Message]) -> str:
        """What follows the last message: the beginning of the answer. Raises NotByMessage."""
        if self._fixed_tail is not None:
            return self._fixed_tail
        context = self._context(_Settled(messages, len(messages) - 1))
        try:
            return _text(self._tail, context)[self._head_length(context) :]
        except Exception as error:
            raise NotByMessage from error

    def _head_length(self, context: dict[str, Any]) -> int:
        return len(_text(self._head, context)) if self._has_head else 0

    def _context(
        self, messages: object, fields: Mapping[str, Any] = types.MappingProxyType({})
    ) -> dict[str, Any]:
        return {
            **self._globals,
            **fields,
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "add_generation_prompt": True,
        }


def _text(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """As `template.render`, for variables that hold the environment's globals too: merging
    these for every message would take longer than most templates."""
    try:
        return "".join(template.root_render_func(template.new_context(variables, shared=True)))
    except Exception:
        template.environment.handle_exception()


class _Settled:
    """Stands for `messages` while only those up to `last` may be read, one by one."""

    def __init__(self, messages: Sequence[Message], last: int) -> None:
        self._messages = messages
        self._last = last

    def __getitem__(self, place: object) -> Message:
        if type(place) is int and 0 <= place <= self._last:
            return self._messages[place]
        raise NotByMessage

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> NoReturn:
        raise NotByMessage

    def _refuse(self, *_: object) -> NoReturn:
        raise NotByMessage

    __len__ = __iter__ = __contains__ = __eq__ = __ne__ = __add__ = __radd__ = _refuse
    __mul__ = __rmul__ = __hash__ = __str__ = __repr__ = __format__ = _refuse


class _Loop:
    """Stands for `loop` at the message at `index0`."""

    def __init__(self, index0: int) -> None:
        self.index0 = index0
        self.index = index0 + 1
        self.first = not index0

    def __getattr__(self, name: str) -> NoReturn:
        raise NotByMessage

    def _refuse(self, *_: object) -> NoReturn:
        raise NotByMessage

    __call__ = __len__ = __iter__ = __eq__ = __ne__ = __hash__ = _refuse
    __bool__ = __str__ = __repr__ = __format__ = _refuse


class _Parts(NamedTuple):
    """A template's nodes before, in and after its loop over `messages`, and the loop's variable."""

    head: list[nodes.Node]
    variable: str
    body: list[nodes.Node]
    tail: list[nodes.Node]


_STATELESS = (
    *(nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.Name),
    *(nodes.Const, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Neg),
    *(nodes.Getattr, nodes.Getitem, nodes.Add, nodes.Sub, nodes.Mul, nodes.Mod, nodes.Concat),
    *(nodes.Filter, nodes.Test, nodes.Call, nodes.Keyword, nodes.List, nodes.Tuple, nodes.Dict),
    *(nodes.Pair, nodes.Slice, nodes.CondExpr),
)
"""What a template that is taken apart may consist of: nothing that outlives a message."""

_CALLED = frozenset({"raise_exception", "range", "dict"})
"""Functions that answer the same at every call and keep nothing."""

_CHANGING = "random"
"""A filter that does not."""


def _take_apart(tree: nodes.Template) -> _Parts | None:
    """None where the template does not write one message after the other, or keeps state."""
    loops = [place for place, node in enumerate(tree.body) if _is_message_loop(node)]
    if len(loops) != 1:
        return None
    head, loop, tail = tree.body[: loops[0]], tree.body[loops[0]], tree.body[loops[0] + 1 :]
    assert isinstance(loop, nodes.For)
    assert isinstance(loop.target, nodes.Name)
    own = {"loop", loop.target.name}
    if not all(map(_is_stateless, _all([*head, *loop.body, *tail]))):
        return None
    if _names([*head, *loop.body, *tail], "store") & {"messages", *own}:
        return None
    if loop.target.name in _names([*head, *tail], "load") or any(map(_reads_loop, head + tail)):
        return None
    return _Parts(head, loop.target.name, loop.body, tail)


def _is_message_loop(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.For)
        and isinstance(node.target, nodes.Name)
        and isinstance(node.iter, nodes.Name)
        and node.iter.name == "messages"
        and node.test is None
        and not node.else_
        and not node.recursive
    )


def _all(tops: list[nodes.Node]) -> list[nodes.Node]:
    return [each for top in tops for each in (top, *top.find_all(nodes.Node))]


def _is_stateless(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Call):
        return isinstance(node.node, nodes.Getattr) or (
            isinstance(node.node, nodes.Name) and node.node.name in _CALLED
        )
    if isinstance(node, nodes.Filter) and node.name == _CHANGING:
        return False
    if isinstance(node, nodes.Const) and node.value == _CHANGING:
        return False  # `map` takes a filter's name
    return isinstance(node, _STATELESS)


def _names(tops: list[nodes.Node], context: str) -> set[str]:
    """Names that are read ("load") or written ("store") anywhere in these nodes."""
    return {n.name for n in _all(tops) if isinstance(n, nodes.Name) and n.ctx == context}


def _reads_loop(node: nodes.Node) -> bool:
    """Whether `loop` is read outside the loops in this node, which have one of their own."""
    if isinstance(node, nodes.Name):
        return node.name == "loop"
    inside = [node.iter, *node.else_] if isinstance(node, nodes.For) else node.iter_child_nodes()
    return any(map(_reads_loop, inside))


class _Generation(jinja2.ext.Extension):
    """Templates may mark the assistant's words for training; here the marks mean nothing."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
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


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
