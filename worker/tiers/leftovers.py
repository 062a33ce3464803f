"""What other namespaces have left on the disk tier, and how it makes room.

A worker has one number in every namespace's folder. Its bound holds for all of them together: what
it writes takes room from `<dir>/<other namespace>/<its number>`, the namespace that was of use
longest ago first. A folder that another worker has locked is that worker's.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import NamedTuple

from worker.tiers.block_file import SUFFIX

LOCK = "lock"


class _File(NamedTuple):
    written_ns: int
    path: Path
    bytes: int


class Leftovers:
    """Files in the folders of one number, but for one's own. For one thread.

    bytes  that they take
    """

    def __init__(self, root: Path, own: Path) -> None:
        """`own` is `root/<namespace>/<number>`."""
        folders = [
            _files_of(parent / own.name)
            for parent in root.iterdir()
            if parent != own.parent and (parent / own.name).is_dir()
        ]
        # The last to go stands first: namespaces by their latest use; in each what was written
        # first, so that nothing stays whose beginning has gone.
        folders = sorted(filter(None, folders), key=lambda files: -files[-1].written_ns)
        self._files = [file for files in folders for file in files]
        self.bytes = sum(file.bytes for file in self._files)

    def shrink(self, limit_bytes: int) -> None:
        """Have them take so much at most, as far as they are nobody's."""
        while self._files and self.bytes > limit_bytes:
            file = self._files[-1]
            lock = os.open(file.path.parent / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                while self._files and self.bytes > limit_bytes:
                    if self._files[-1].path.parent != file.path.parent:
                        break
                    last = self._files.pop()
                    last.path.unlink(missing_ok=True)
                    self.bytes -= last.bytes
            except BlockingIOError:  # it has come into use
                self._files = [one for one in self._files if one.path.parent != file.path.parent]
                self.bytes = sum(one.bytes for one in self._files)
            finally:
                os.close(lock)


def _files_of(folder: Path) -> list[_File]:
    """The block files of a folder, the one written first at the front."""
    files = []
    for entry in os.scandir(folder):
        if entry.name.endswith(SUFFIX):
            stat = entry.stat()
            files.append(_File(stat.st_mtime_ns, Path(entry.path), stat.st_blocks * 512))
    return sorted(files)
