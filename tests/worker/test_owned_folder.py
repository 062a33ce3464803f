"""Folders that go with their owner, however it ends."""

import subprocess
import sys

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
