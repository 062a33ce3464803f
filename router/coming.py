"""Blocks on their way: what requests in flight will make their worker hold.

A worker announces a block once it has computed it. Until then every further request with the
same prefix would look like a miss everywhere and scatter. So a request that is routed claims
the blocks of its prompt for its worker. A claim ends when the worker announces the block, when
the request ends, or after `life_s`.

At each slot a block has one owner, the first request in flight that claimed it. When an owner
ends before its blocks were announced, the other requests at that slot inherit what they share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

MAX_BLOCKS = 1_000_000
"""Claimed (block, slot) pairs at most; further ones are not claimed (about 200 bytes each)."""


class ComingCheckError(AssertionError):
    """Claims and masks disagree. Its text says where."""


class Claim:
    """One request's blocks at one slot.

    chain   hashes of the prompt's full blocks
    owned   those of them that this claim answers for
    """

    __slots__ = ("chain", "deadline", "ended", "owned", "slot")

    def __init__(self, slot: int, chain: Sequence[bytes], deadline: float) -> None:
        self.slot = slot
        self.chain = chain
        self.deadline = deadline
        self.owned: list[bytes] = []
        self.ended = False


def common_prefix(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Leading blocks that two chains share. Hashes are chained, so a binary search finds it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) >> 1
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


class ComingBlocks:
    """Claims of all requests in flight. `masks` is the table that `PrefixIndex.depths` takes."""

    def __init__(self, life_s: float, max_blocks: int = MAX_BLOCKS) -> None:
        self.masks: dict[bytes, int] = {}
        self._life_s = life_s
        self._max_blocks = max_blocks
        self._owners: dict[int, dict[bytes, Claim]] = {}
        self._claims: dict[int, dict[Claim, None]] = {}
        self._deadlines: deque[Claim] = deque()
        self._pairs = 0

    def __len__(self) -> int:
        """Claimed (block, slot) pairs."""
        return self._pairs

    def claim(self, slot: int, chain: Sequence[bytes], held: int, now: float) -> Claim:
        """Count `chain[held:]` as coming to `slot`.

        The first `held` blocks are there already, or on their way for another request.
        """
        claim = Claim(slot, chain, now + self._life_s)
        self._claims.setdefault(slot, {})[claim] = None
        self._deadlines.append(claim)
        self._own(claim, chain[held:])
        return claim

    def end(self, claim: Claim) -> None:
        """The request of `claim` ended; what others at its slot share passes to them."""
        if claim.ended:
            return
        chain = claim.chain
        orphans = self._let_go(claim)
        if not orphans:
            return
        places = [place for place, block in enumerate(chain) if block in orphans]
        for heir in self._claims.get(claim.slot, ()):
            shared = common_prefix(chain, heir.chain)
            cut = bisect_left(places, shared)
            if cut:
                self._own(heir, [chain[place] for place in places[:cut]])
                places = places[cut:]
            if not places:
                break

    def stored(self, slot: int, hashes: Iterable[bytes]) -> None:
        """The worker in `slot` announced `hashes`: they are no longer on their way."""
        owners = self._owners.get(slot)
        if owners:
            for block in hashes:
                if block in owners:
                    self._disown(slot, owners, block)

    def expire(self, now: float) -> None:
        """End the claims that are older than `life_s`."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0].ended or deadlines[0].deadline <= now):
            self.end(deadlines.popleft())

    def drop(self, slot: int) -> None:
        """Forget all claims of `slot`."""
        for claim in list(self._claims.get(slot, ())):
            self._let_go(claim)

    def check(self) -> None:
        """Raise where masks, owners and claims disagree, with figures."""
        rebuilt: dict[bytes, int] = {}
        pairs = 0
        owned = {claim: set(claim.owned) for claims in self._claims.values() for claim in claims}
        for slot, owners in self._owners.items():
            for block, claim in owners.items():
                pairs += 1
                rebuilt[block] = rebuilt.get(block, 0) | 1 << slot
                if claim.slot != slot or block not in owned.get(claim, ()):
                    raise ComingCheckError(f"block {block.hex()} of slot {slot} has no owner")
        if rebuilt != self.masks or pairs != self._pairs:
            raise ComingCheckError(
                f"{pairs} claimed pairs of {len(rebuilt)} blocks, but the masks name "
                f"{len(self.masks)} blocks and the count is {self._pairs}"
            )
        for slot, claims in self._claims.items():
            if any(claim.ended or claim.slot != slot for claim in claims):
                raise ComingCheckError(f"slot {slot} lists a claim that ended or is elsewhere")

    def _own(self, claim: Claim, blocks: Iterable[bytes]) -> None:
        owners = self._owners.setdefault(claim.slot, {})
        bit = 1 << claim.slot
        for block in blocks:
            if block not in owners:
                if self._pairs >= self._max_blocks:
                    break
                owners[block] = claim
                claim.owned.append(block)
                self.masks[block] = self.masks.get(block, 0) | bit
                self._pairs += 1
        if not owners:
            del self._owners[claim.slot]

    def _disown(self, slot: int, owners: dict[bytes, Claim], block: bytes) -> None:
        del owners[block]
        self._pairs -= 1
        left = self.masks[block] & ~(1 << slot)
        if left:
            self.masks[block] = left
        else:
            del self.masks[block]
        if not owners:
            del self._owners[slot]

    def _let_go(self, claim: Claim) -> set[bytes]:
        """End `claim`; returns the blocks that it still owned."""
        orphans: set[bytes] = set()
        if claim.ended:
            return orphans
        claim.ended = True
        owners = self._owners.get(claim.slot, {})
        for block in claim.owned:
            if owners.get(block) is claim:
                self._disown(claim.slot, owners, block)
                orphans.add(block)
        claims = self._claims[claim.slot]
        del claims[claim]
        if not claims:
            del self._claims[claim.slot]
        claim.owned = []
        claim.chain = ()
        return orphans
