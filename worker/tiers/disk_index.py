"""The index of a disk tier, rebuilt from the files in its folder."""

from __future__ import annotations

from collections.abc import Callable

from worker.tiers.block_file import Header
from worker.tiers.chain_set import ChainSet, Entry
from worker.tiers.disk_folder import DiskFolder


def index_of(
    folder: DiskFolder, capacity: int, on_drop: Callable[[Entry], None]
) -> tuple[ChainSet, list[bytes]]:
    """The index of at most `capacity` blocks; evicts the least recently used ones.

    Also returns the hashes of orphans: useless files without the file of the block before them.
    `on_drop` belongs to the index and is also called for blocks in excess of `capacity`.
    """
    found = folder.scan()
    index = ChainSet(max(capacity, len(found)), on_drop)
    waiting: dict[bytes, list[tuple[int, Header]]] = {}
    for number, (header, _) in enumerate(found, -len(found)):  # before all later uses
        waiting.setdefault(header.parent, []).append((number, header))
    parents: list[tuple[bytes, Entry | None]] = [(b"", None)]
    while parents:
        parent_hash, parent = parents.pop()
        for number, header in waiting.pop(parent_hash, ()):
            entry = index.add(header.block_hash, parent, header.content, float(number))
            assert entry is not None, "there is room for all found blocks"
            index.set_ready(entry)
            index.unpin(entry)
            parents.append((header.block_hash, entry))
    index.shrink(capacity)
    return index, [header.block_hash for files in waiting.values() for _, header in files]
