"""Folders that go with their owner, however it ends."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from worker.owned_folder import OwnedFolder

OWNER = """
import sys
from worker.owned_folder import OwnedFolder
folder = OwnedFolder("engine-", sys.argv[1])
(folder.path / "socket").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


def owner_of_a_folder(root):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_folder_goes_when_its_owner_says_so(tmp_path):
    folder = OwnedFolder("engine-", tmp_path)
    assert folder.path.parent == tmp_path
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "file").touch()
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_next_owner_removes_what_a_killed_one_left(tmp_path):
    (tmp_path / "something-else").mkdir()
    alive, its_folder = owner_of_a_folder(tmp_path)
    killed, left = owner_of_a_folder(tmp_path)
    killed.kill()
    killed.wait()
    try:
        mine = OwnedFolder("engine-", tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
        assert left.rpartition("/")[2] not in names
        assert names == {"something-else", its_folder.rpartition("/")[2], mine.path.name}
    finally:
        alive.kill()
        alive.wait()
    mine.remove()


def removed(path):
    shutil.rmtree(path)


def locked(path):
    """By a process that will remove it."""
    fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)


@pytest.mark.parametrize("fate", [removed, locked])
def test_a_folder_that_is_taken_for_abandoned_before_its_lock_is_replaced(
    tmp_path, monkeypatch, fate
):
    make, made = tempfile.mkdtemp, []

    def made_and_lost(**fields):
        made.append(make(**fields))
        if len(made) == 1:
            fate(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_lost)
    folder = OwnedFolder("engine-", tmp_path)
    assert [str(folder.path)] == made[1:]
    assert folder.path.is_dir()


def test_a_folder_that_is_removed_while_it_is_locked_is_replaced(tmp_path, monkeypatch):
    lock, locks = fcntl.flock, []

    def locked_too_late(descriptor, operation):
        if not locks:
            removed(next(tmp_path.iterdir()))
        locks.append(descriptor)
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", locked_too_late)
    folder = OwnedFolder("engine-", tmp_path)
    assert folder.path.is_dir()
    assert len(locks) == 2


def test_a_file_system_without_locks_keeps_what_others_left(tmp_path, monkeypatch):
    def without_locks(_descriptor, _operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    (tmp_path / "engine-left").mkdir()
    folder = OwnedFolder("engine-", tmp_path)
    assert folder.path.is_dir()
    folder.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["engine-left"]


def test_nothing_stays_open(tmp_path):
    before = len(os.listdir("/dev/fd"))
    (tmp_path / "engine-left").mkdir()
    alive = OwnedFolder("engine-", tmp_path)
    OwnedFolder("engine-", tmp_path).remove()
    alive.remove()
    assert len(os.listdir("/dev/fd")) == before
