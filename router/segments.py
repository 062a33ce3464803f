"""Tokens and hashes of texts that go on where earlier ones ended: only what is new is computed.

A text is cut before its boundary tokens: the added tokens, such as `<|im_start|>`, with which a
chat template begins and ends messages. A tokenizer splits a text at added tokens before it does
anything else, and treats what lies between them apart, so the tokens of the segments, one after
the other, are those of the whole text. Segments are kept in a tree:

    root ── "<|im_start|>system\\n…" ── "<|im_end|>\\n" ─┬─ "<|im_start|>user\\nHello" ── …
                                                       └─ "<|im_start|>user\\nGood day" ── …

Each node has its segment's tokens, the hashes of the blocks that end in it, and the tokens left
over for the next block. Where a chat template writes message by message, a message is a segment
and its role and content name it: for what is known nothing need be rendered.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cluster.blocks import hash_blocks

MAX_CHARACTERS = 16_000_000
"""Of the segments kept. With their tokens and hashes they take some 50 MB where four characters are
a token, and some 500 MB at most, where each is four tokens, as emoji may be."""

NODE_CHARACTERS = 200
"""What a node counts for besides its text."""


def boundary_tokens(tokenizer_json: str) -> list[str]:
    """Added tokens before which any text may be cut without changing its tokens.

    Such a token is matched wherever its characters stand, in the raw text, and takes nothing
    of its neighbours: not normalised, no `lstrip`, `rstrip` or `single_word`, and no other added
    token contains it or can overlap its beginning.
    """
    added: list[dict[str, Any]] = json.loads(tokenizer_json).get("added_tokens") or []
    contents = [token["content"] for token in added]
    return [
        token["content"]
        for token in added
        if token["content"]
        and not token["content"][0].isspace()
        and not any(token.get(flag) for flag in ("normalized", "lstrip", "rstrip", "single_word"))
        and not any(_hides(other, token["content"]) for other in contents)
    ]


def _hides(other: str, token: str) -> bool:
    """Whether a match of `other` may cover the beginning of `token` somewhere in a text."""
    if other != token and token in other:
        return True
    return any(other.endswith(token[:length]) for length in range(1, len(token)))


class Cutter:
    """Cuts texts at message boundaries.

    tokens   `boundary_tokens` of a tokenizer
    hint     chat template and special tokens: of the tokens, those named there are used, or all
             where it names none
    """

    def __init__(self, tokens: list[str], hint: str) -> None:
        used = [token for token in tokens if token in hint] or tokens
        used.sort(key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, used))) if used else None

    def starts(self, text: str) -> bool:
        """Whether `text` may follow any other without changing its tokens: it is empty, or
        begins with a boundary token."""
        return not text or (self._pattern is not None and self._pattern.match(text) is not None)

    def cut(self, text: str) -> list[str]:
        """Segments of `text`; each but the first begins with a boundary token."""
        if self._pattern is None:
            return [text]
        places = [match.start() for match in self._pattern.finditer(text)]
        starts = [0, *(place for place in places if place)]
        ends = [*starts[1:], len(text)]
        return [text[start:end] for start, end in zip(starts, ends, strict=True)]


Name = str | tuple[str, ...]
"""What tells a segment from others that continue the same text: the segment itself or, of a
message, role and content."""


class Node:
    """One segment after those before it.

    packed      the segment's tokens
    hashes      of the blocks that end in this segment
    parent      what the next block's hash continues: the last hash so far, or the root
    rest        packed tokens after the last full block
    above       the segment before it; None at the top
    below       those that follow it, by name
    kept        whether it is part of a tree
    """

    __slots__ = ("above", "below", "hashes", "kept", "name", "packed", "parent", "rest")

    def __init__(self, packed: bytes, hashes: list[bytes], parent: bytes, rest: bytes) -> None:
        self.name: Name = ""
        self.packed = packed
        self.hashes = hashes
        self.parent = parent
        self.rest = rest
        self.above: Node | None = None
        self.below: dict[Name, Node] = {}
        self.kept = False


class Found(NamedTuple):
    """A text's known segments from the top, and the names of those to compute."""

    path: list[Node]
    missing: Sequence[Name]


class SegmentTree:
    """The segments of recent texts. Not thread-safe; `compute` alone may run in a thread.

    Leaves are forgotten in the order of their last use: what continues nothing any more goes
    before what it continues, and a text that is used costs no more than the touch of its leaf.
    """

    def __init__(self, max_characters: int = MAX_CHARACTERS) -> None:
        self._max_characters = max_characters
        self._tops: dict[Name, Node] = {}
        self._leaves: OrderedDict[Node, None] = OrderedDict()  # that used last at the end
        self._characters = 0

    def find(self, beginning: str, root: bytes, segments: Sequence[Name]) -> Found:
        """What is known of a text, by the names of its segments.

        `beginning` names tokenizer, namespace and whatever else makes equal texts differ; texts
        with the same beginning have the same `root`.
        """
        node = self._tops.get(beginning)
        if node is None:
            node = Node(b"", [], root, b"")
            node.name = beginning
        path = [node]
        for place, segment in enumerate(segments):
            known = node.below.get(segment)
            if known is None:
                return Found(path, segments[place:])
            node = known
            path.append(node)
        return Found(path, ())

    def add(self, found: Found, computed: list[Node]) -> list[Node]:
        """Keep what was computed of a text's missing segments; returns the text's whole path."""
        for name, node in zip(found.missing, computed, strict=True):
            node.name = name
        path = found.path
        if not path[-1].kept:  # forgotten meanwhile, with some before it
            path, computed = [], [*path, *computed]
        for node in computed:
            path.append(self._keep(path[-1] if path else None, node))
        leaf = path[-1]
        if not leaf.below:
            self._leaves[leaf] = None
            self._leaves.move_to_end(leaf)
        while self._characters > self._max_characters:
            self._forget_oldest()
        return path

    def check(self) -> None:
        """Compare the parts with one another. Raises AssertionError with figures."""
        characters, leaves, nodes = 0, set(), list(self._tops.values())
        while nodes:
            node = nodes.pop()
            assert node.kept
            characters += _size(node.name)
            if not node.below:
                leaves.add(node)
            for name, below in node.below.items():
                assert below.name == name, (below.name, name)
                assert below.above is node
                nodes.append(below)
        assert characters == self._characters, (characters, self._characters)
        assert leaves == self._leaves.keys(), (len(leaves), len(self._leaves))

    def _keep(self, above: Node | None, node: Node) -> Node:
        siblings = self._tops if above is None else above.below
        known = siblings.get(node.name)
        if known is not None:  # another request may have been quicker
            return known
        if above is not None and not above.below:
            self._leaves.pop(above, None)
        siblings[node.name] = node
        node.above, node.kept = above, True
        self._characters += _size(node.name)
        return node

    def _forget_oldest(self) -> None:
        leaf, _ = self._leaves.popitem(last=False)
        leaf.kept = False
        self._characters -= _size(leaf.name)
        if leaf.above is None:
            del self._tops[leaf.name]
            return
        del leaf.above.below[leaf.name]
        if not leaf.above.below:
            self._leaves[leaf.above] = None  # nothing used it later than what is gone
            self._leaves.move_to_end(leaf.above, last=False)


def _size(name: Name) -> int:
    return (len(name) if isinstance(name, str) else sum(map(len, name))) + NODE_CHARACTERS


def compute(
    last: Node,
    segments: list[str],
    encode: Callable[[str, bool], bytes],
    block_size: int,
    *,
    begins: bool,
) -> list[Node]:
    """Nodes of `segments`, which follow `last`; their names are still to be given.

    `encode(segment, first)` gives a segment's packed tokens; `begins` tells that the first of
    them is the text's first.
    """
    computed = []
    parent, rest = last.parent, last.rest
    for place, segment in enumerate(segments):
        packed = encode(segment, begins and not place)
        pending = rest + packed
        hashes = hash_blocks(parent, pending, block_size)
        rest = pending[len(hashes) * 4 * block_size :]
        parent = hashes[-1] if hashes else parent
        computed.append(Node(packed, hashes, parent, rest))
    return computed
