"""The index of a disk tier, made anew from the files that lie in its folder."""

from __future__ import annotations

from collections.abc import Callable

from worker.tiers.block_file import Header
from worker.tiers.chain_set import ChainSet, Entry
from worker.tiers.disk_folder import DiskFolder


def index_of(
    folder: DiskFolder, capacity: int, on_drop: Callable[[Entry], None]
) -> tuple[ChainSet, list[bytes]]:
    """What lies there, at most `capacity` blocks of it: what was used longest ago goes first.

    Beside it the hashes of orphans: files without the file of the block before them, of no use to
    anybody. `on_drop` is the index's own, and is called for what is too much as well.
    """
    found = folder.scan()
    index = ChainSet(max(capacity, len(found)), on_drop)
    waiting: dict[bytes, list[tuple[int, Header]]] = {}
    for number, (header, _) in enumerate(found, -len(found)):  # before all uses that come
        waiting.setdefault(header.parent, []).append((number, header))
    parents: list[tuple[bytes, Entry | None]] = [(b"", None)]
    while parents:
        parent_hash, parent = parents.pop()
        for number, header in waiting.pop(parent_hash, ()):
            entry = index.add(header.block_hash, parent, header.content, float(number))
            assert entry is not None, "there is room for all that was found"
            index.set_ready(entry)
            index.unpin(entry)
            parents.append((header.block_hash, entry))
    index.shrink(capacity)
    return index, [header.block_hash for files in waiting.values() for _, header in files]
