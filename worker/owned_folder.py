"""Folders that are removed after their owner ended, even by a crash.

The owner holds a lock on its folder, which the kernel releases when the process ends. Creating the
next folder of the same kind removes those whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

NO_LOCK = -1


class OwnedFolder:
    """A new folder `<parent>/<prefix>…`, readable by its owner only. `remove` it at the end.

    parent  "": the system's folder for temporary files

    On a file system that cannot lock folders, such as NFS, an abandoned folder stays.
    """

    def __init__(self, prefix: str, parent: str | Path = "") -> None:
        root = Path(parent or tempfile.gettempdir())
        _remove_abandoned(root, prefix)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
            try:
                self._lock = _locked(self.path)
            except OSError:
                self._lock = NO_LOCK
                return
            if self._lock != NO_LOCK:
                return  # else another process removed it as abandoned before it was locked

    def remove(self) -> None:
        """Remove the folder and its contents. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, NO_LOCK
        if lock != NO_LOCK:
            os.close(lock)


def _remove_abandoned(root: Path, prefix: str) -> None:
    for entry in os.scandir(root):
        if not entry.name.startswith(prefix):
            continue
        with contextlib.suppress(OSError):  # of another user, or just removed
            lock = _locked(Path(entry.path))
            if lock != NO_LOCK:
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)


def _locked(path: Path) -> int:
    """Descriptor that holds the folder's lock; NO_LOCK if it is held or the folder is gone.

    Raises OSError if the folder cannot be locked at all.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return NO_LOCK
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists():
            return descriptor
    except BlockingIOError:
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return NO_LOCK
