"""Coming blocks: those that requests in flight will store at their workers.

A worker announces a block once it has computed it. Until then, further requests with the same
prefix would miss everywhere and scatter. So a routed request claims the blocks of its prompt for
its worker. A claim ends with its request, or after `life_s`.

The claims' chains form a tree. Hashes are chained: two chains with the same hash at a depth are
equal up to it. So an edge is compared at its ends and divided by binary search. To add a claim, to
end it, and to look a chain up each cost a few steps per branch instead of one per block.

    root ── h[0] … h[31] ──┬── h[32] … h[90]        counts {slot 3: 1}
            counts         └── h[32] … h[40] ──┬──  counts {slot 3: 1}
            {3: 2, 7: 1}       counts {3:1, 7:1}└── counts {slot 7: 1}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from router.bitmask import write

MAX_BLOCKS = 4_000_000
"""Most distinct claimed blocks. A claim that would exceed it is not counted."""


NOBODY = (-1, 0)
"""Sentinel: a group without slots, after the last one."""


class ComingCheckError(AssertionError):
    """The tree contradicts its claims; the message says where."""


class _Node(msgspec.Struct, eq=False):
    """An edge of the tree, the blocks `chain[start:end]`, and its subtree.

    last     the last of these blocks
    counts   slot -> its claims that pass through or end here; `mask` has the slots' bits
    passing  sum of `counts`
    ends     claims that end exactly here
    """

    chain: Sequence[bytes]
    start: int
    end: int
    last: bytes
    parent: _Node | None
    counts: dict[int, int]
    mask: int = 0
    passing: int = 0
    ends: int = 0
    children: dict[bytes, _Node] = msgspec.field(default_factory=dict)

    def shared(self, chain: Sequence[bytes]) -> int:
        """The depth, at most `end`, where `chain` differs; it is equal up to `start` + 1."""
        mine = self.chain
        low, high = self.start + 1, min(self.end, len(chain))
        if mine[high - 1] == chain[high - 1]:
            return high
        while low < high:
            middle = (low + high) >> 1
            if mine[middle] == chain[middle]:
                low = middle + 1
            else:
                high = middle
        return low


class Claim(msgspec.Struct, eq=False):
    """One request's chain at one slot. `node` is where it ends; None if it is not counted."""

    slot: int
    chain: Sequence[bytes]
    deadline: float
    node: _Node | None = None


class ComingBlocks:
    """Claims of all requests in flight."""

    def __init__(self, life_s: float, max_blocks: int = MAX_BLOCKS) -> None:
        self._life_s = life_s
        self._max_blocks = max_blocks
        self._root = _Node((), 0, 0, b"", None, {})
        self._deadlines: deque[Claim] = deque()
        self._blocks = 0
        # the latest look-up, valid until the tree changes: a claim of the same chain mostly follows
        self._walked: Sequence[bytes] | None = None
        self._path: list[tuple[int, _Node]] = []

    def __len__(self) -> int:
        """Distinct claimed blocks."""
        return self._blocks

    def claim(self, slot: int, chain: Sequence[bytes], now: float) -> Claim:
        """Count `chain` as coming to `slot`."""
        claim = Claim(slot, chain, now + self._life_s)
        if chain and self._blocks + len(chain) <= self._max_blocks:
            self._deadlines.append(claim)
            claim.node = self._insert(slot, chain)
            claim.node.ends += 1
        return claim

    def end(self, claim: Claim) -> None:
        """End the claim with its request. Idempotent."""
        node, slot = claim.node, claim.slot
        if node is None:
            return
        claim.node, claim.chain = None, ()
        self._walked = None
        node.ends -= 1
        lowest, step = node, node
        while step.parent is not None:
            left = step.counts[slot] - 1
            parent = step.parent
            step.passing -= 1
            if left:
                step.counts[slot] = left
            else:
                del step.counts[slot]
                step.mask ^= 1 << slot
                if not step.counts:
                    del parent.children[step.chain[step.start]]
                    self._blocks -= step.end - step.start
                    lowest = parent
            step = parent
        self._merge(lowest)

    def expire(self, now: float) -> None:
        """End the claims that are older than `life_s`."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0].node is None or deadlines[0].deadline <= now):
            self.end(deadlines.popleft())

    def drop(self, slot: int) -> None:
        """Forget all claims of `slot`."""
        for claim in [each for each in self._deadlines if each.slot == slot]:
            self.end(claim)

    def depth(self, slot: int, chain: Sequence[bytes]) -> int:
        """Leading blocks of `chain` that are coming to `slot`."""
        depth = 0
        for shared, node in self._walk(chain):
            if not node.mask >> slot & 1:
                break
            depth = shared
        return depth

    def sharing(self, chain: Sequence[bytes], depth: int) -> int:
        """Number of claims that begin with the first `depth` blocks of `chain`."""
        if depth:
            for shared, node in self._walk(chain):
                if shared >= depth:
                    return node.passing
        return 0

    def raise_depths(
        self,
        found: NDArray[np.int64],
        groups: Sequence[tuple[int, int]],
        chain: Sequence[bytes],
        slots: int,
        limit: int | None = None,
        unit: int = 1,
    ) -> int:
        """Raise `found` (`[size]`, leading blocks of `chain` that a slot holds, times `unit`) to
        include coming blocks. Returns the most blocks that a slot was raised to, 0 if none was.

        `groups` has the content of `found` as (depth, slots), the deepest first. Only slots in the
        mask `slots` are considered. With a `limit`, nothing is raised above it.
        """
        most = beyond = held = 0
        holding = iter(groups)
        end, those = next(holding, NOBODY)
        for depth, node in reversed(self._walk(chain)):
            coming = node.mask & slots
            if coming == beyond:  # slots that reach this depth may go deeper
                continue
            if limit is not None and depth > limit:
                depth = limit
            while end >= depth:
                held |= those
                end, those = next(holding, NOBODY)
            if held == slots:
                break
            raised = (coming ^ beyond) & ~held
            beyond = coming
            if raised:
                most = most or depth
                write(found, raised, depth * unit)
        return most

    def check(self) -> None:
        """Raise ComingCheckError, with figures, if the tree contradicts the claims."""
        wanted: dict[bytes, dict[int, int]] = {}
        for claim in self._deadlines:
            if claim.node is None:
                continue
            if not claim.node.mask >> claim.slot & 1:
                raise ComingCheckError(f"slot {claim.slot} claims a node that does not know it")
            for block in claim.chain:
                counts = wanted.setdefault(block, {})
                counts[claim.slot] = counts.get(claim.slot, 0) + 1
        found: dict[bytes, dict[int, int]] = {}
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            for block in node.chain[node.start : node.end]:
                found[block] = node.counts
            if node.last != node.chain[node.end - 1]:
                raise ComingCheckError(f"the edge to block {node.end} ends with another")
            if node.mask != sum(1 << slot for slot in node.counts):
                raise ComingCheckError(f"mask {node.mask:x} of slots {sorted(node.counts)}")
            if node.passing != sum(node.counts.values()):
                raise ComingCheckError(f"{node.passing} pass, but the slots count {node.counts}")
            if len(node.children) == 1 and not node.ends:
                raise ComingCheckError(f"blocks {node.start} to {node.end} are split for nobody")
        if found != wanted or len(found) != self._blocks:
            raise ComingCheckError(
                f"{len(wanted)} blocks are claimed, but the tree has {len(found)} and counts "
                f"{self._blocks}"
            )

    def _walk(self, chain: Sequence[bytes]) -> list[tuple[int, _Node]]:
        """The nodes along `chain` from the root: (leading blocks that it shares, node)."""
        if self._walked is chain:
            return self._path
        path: list[tuple[int, _Node]] = []
        place, length = 0, len(chain)
        children = self._root.children
        while place < length:
            node = children.get(chain[place])
            if node is None:
                break
            place = node.end
            if place > length or node.last != chain[place - 1]:
                path.append((node.shared(chain), node))
                break
            path.append((place, node))
            children = node.children
        self._walked, self._path = chain, path
        return path

    def _insert(self, slot: int, chain: Sequence[bytes]) -> _Node:
        place, node, length = 0, self._root, len(chain)
        bit = 1 << slot
        path = self._walk(chain)
        self._walked = None
        for place, node in path:
            if place < node.end:
                node = self._split(node, place)
            node.counts[slot] = node.counts.get(slot, 0) + 1
            node.mask |= bit
            node.passing += 1
        if place < length:
            leaf = _Node(chain, place, length, chain[-1], node, {slot: 1}, bit, 1)
            node.children[chain[place]] = leaf
            self._blocks += length - place
            return leaf
        return node

    def _split(self, node: _Node, place: int) -> _Node:
        """Split `node` at depth `place`; returns the new upper node. The lower keeps its claims."""
        parent = node.parent
        assert parent is not None
        upper = structs.replace(
            node,
            end=place,
            last=node.chain[place - 1],
            counts=node.counts.copy(),
            ends=0,
            children={node.chain[place]: node},
        )
        parent.children[node.chain[node.start]] = upper
        node.start, node.parent = place, upper
        return upper

    def _merge(self, node: _Node) -> None:
        """Undo a split that is not needed any more: one child, and no claim ends here."""
        parent = node.parent
        if parent is None or node.ends or len(node.children) != 1:
            return
        (child,) = node.children.values()
        child.start, child.parent = node.start, parent
        parent.children[child.chain[child.start]] = child
