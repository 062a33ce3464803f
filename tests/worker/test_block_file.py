"""A block's file is a hit only where it is exactly what is expected."""

import os
import shutil

import pytest

from cluster.blocks import Namespace
from worker.tiers.block_file import BadBlockFile, name_of, read_block_file
from worker.tiers.disk_folder import DiskFolder

SHAPE = [4, 8, 2, 8]
BODY = bytes(range(256)) * 4
HASH = b"h" * 16
NAMESPACE = Namespace(
    weights="w", tokenizer="t", kv_dtype="bfloat16", block_size=8, positions="rope:1"
)


def open_folder(root, namespace=NAMESPACE, shape=SHAPE, bound_bytes=1 << 30):
    return DiskFolder(root, namespace, shape, len(BODY), bound_bytes)


@pytest.fixture
def folder(tmp_path):
    folder = open_folder(tmp_path)
    yield folder
    folder.close()


def written(folder):
    header = folder.header(HASH, b"p" * 16, b"t" * 32)
    folder.write(header, BODY)
    return header, folder.path / name_of(HASH)


def test_what_was_written_is_read(folder):
    header, path = written(folder)
    assert folder.read(header) == BODY
    assert [found.header for found in folder.scan()] == [header]
    assert path.stat().st_mode & 0o077 == 0
    assert path.stat().st_size <= folder.block_bytes


@pytest.mark.parametrize("kept", [0, 3, 15, 40, 200, -1])
def test_a_truncated_file_is_refused(folder, kept):
    header, path = written(folder)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadBlockFile):
        folder.read(header)
    assert folder.scan() == []
    assert folder.unusable == 1


def test_every_flipped_bit_is_noticed(folder):
    header, path = written(folder)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(BadBlockFile):
            folder.read(header)


def test_a_file_with_more_at_its_end_is_refused(folder):
    header, path = written(folder)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(BadBlockFile):
        folder.read(header)


def test_a_renamed_file_is_refused(folder):
    _, path = written(folder)
    other = b"o" * 16
    os.rename(path, folder.path / name_of(other))
    with pytest.raises(BadBlockFile):
        folder.read(folder.header(other, b"p" * 16, b"t" * 32))
    assert folder.scan() == []
    assert folder.unusable == 1


def test_what_was_half_written_is_removed_and_foreign_files_stay(folder):
    _, path = written(folder)
    half = path.with_name(name_of(b"x" * 16) + ".tmp")
    half.write_bytes(b"half")
    foreign = [path.with_name("README"), path.with_name("zz.kv")]
    for file in foreign:
        file.write_bytes(b"something else")
    assert len(folder.scan()) == 1
    assert not half.exists()
    assert all(file.exists() for file in foreign)
    assert folder.unusable == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("weights", "other"), ("kv_dtype", "float16"), ("positions", "rope:2"), ("block_size", 4)],
)
def test_another_namespace_has_another_folder_and_cannot_read_this_one(
    folder, tmp_path, field, value
):
    _, path = written(folder)
    other = open_folder(tmp_path, Namespace(**{**fields_of(NAMESPACE), field: value}))
    assert other.path != folder.path
    assert other.scan() == []
    expected = other.header(HASH, b"p" * 16, b"t" * 32)
    with pytest.raises(BadBlockFile):
        read_block_file(path, expected, len(BODY))
    os.replace(path, other.path / path.name)
    assert other.scan() == []
    other.close()


def test_another_shape_cannot_be_read(folder, tmp_path):
    written(folder)
    folder.close()
    other = open_folder(tmp_path, shape=[8, 8, 1, 8])
    assert other.path == folder.path
    assert other.scan() == []
    other.close()


def test_two_workers_have_two_folders_and_find_them_again(tmp_path):
    first, second = open_folder(tmp_path), open_folder(tmp_path)
    paths = first.path, second.path
    assert paths[0] != paths[1]
    for folder in (first, second):
        folder.close()
    first, second = open_folder(tmp_path), open_folder(tmp_path)
    assert (first.path, second.path) == paths
    first.close()
    second.close()


def test_a_full_disk_leaves_nothing_behind(folder, monkeypatch):
    def full(descriptor):
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        written(folder)
    assert os.listdir(folder.path) == ["lock"]


class TestOtherNamespaces:
    """Four blocks' room for all namespaces of a directory together."""

    ROOM = 4

    def open(self, tmp_path, weights):
        namespace = Namespace(**{**fields_of(NAMESPACE), "weights": weights})
        folder = open_folder(tmp_path, namespace)
        folder.close()
        return open_folder(tmp_path, namespace, bound_bytes=self.ROOM * folder.block_bytes)

    def write(self, folder, count, first_ns):
        """A chain of so many blocks, written one after the other from that time on."""
        for index in range(count):
            parent = bytes([index - 1]) * 16 if index else b""
            header = folder.header(bytes([index]) * 16, parent, b"t" * 32)
            folder.write(header, BODY)
            path = folder.path / name_of(header.block_hash)
            os.utime(path, ns=(first_ns + index, first_ns + index))

    def held(self, folder):
        return sorted(path.name[:2] for path in folder.path.glob("*.kv"))

    def test_those_used_longest_ago_make_room_from_their_ends(self, tmp_path):
        old, newer = self.open(tmp_path, "old"), self.open(tmp_path, "newer")
        self.write(old, 2, 1000)
        self.write(newer, 2, 2000)
        old.close()
        newer.close()
        mine = self.open(tmp_path, "mine")
        kept = []
        for count in range(1, 4):
            self.write(mine, count, 3000)  # what is there already takes no more room
            kept.append((self.held(old), self.held(newer)))
        assert kept == [(["00"], ["00", "01"]), ([], ["00", "01"]), ([], ["00"])]
        assert len(self.held(mine)) == 3
        mine.close()

    def test_a_smaller_bound_holds_from_the_start(self, tmp_path):
        old = open_folder(tmp_path, Namespace(**{**fields_of(NAMESPACE), "weights": "old"}))
        self.write(old, 9, 1000)
        old.close()
        self.open(tmp_path, "mine").close()
        assert self.held(old) == ["00", "01", "02", "03"]

    def test_what_another_worker_uses_stays(self, tmp_path):
        theirs = self.open(tmp_path, "theirs")
        self.write(theirs, 3, 1000)
        mine = self.open(tmp_path, "mine")
        self.write(mine, 4, 2000)
        assert (len(self.held(theirs)), len(self.held(mine))) == (3, 4)
        theirs.close()
        mine.close()

    def test_a_removed_block_gives_its_room_back(self, tmp_path):
        old = self.open(tmp_path, "old")
        self.write(old, 2, 1000)
        old.close()
        mine = self.open(tmp_path, "mine")
        self.write(mine, 2, 2000)
        mine.remove(bytes([1]) * 16)
        self.write(mine, 2, 2000)
        assert len(self.held(old)) == 2
        mine.close()

    def test_a_beginning_used_later_than_its_end_goes_after_it(self, tmp_path):
        old = self.open(tmp_path, "old")
        self.write(old, 3, 1000)
        for index in (2, 1, 0):  # as an orderly end leaves them
            path = old.path / name_of(bytes([index]) * 16)
            os.utime(path, ns=(2000 - index, 2000 - index))
        old.close()
        mine = self.open(tmp_path, "mine")
        self.write(mine, 2, 3000)
        assert self.held(old) == ["00", "01"]
        mine.close()

    def test_a_folder_that_was_removed_by_hand_is_no_hindrance(self, tmp_path):
        old = self.open(tmp_path, "old")
        self.write(old, 2, 1000)
        old.close()
        mine = self.open(tmp_path, "mine")
        shutil.rmtree(old.path.parent)
        self.write(mine, 4, 2000)
        assert len(self.held(mine)) == 4
        mine.close()

    def test_files_may_go_while_they_are_listed(self, tmp_path, monkeypatch):
        theirs = self.open(tmp_path, "theirs")
        self.write(theirs, 2, 1000)
        listed = os.scandir

        class Entries(list):
            def __enter__(self):
                return self

            def __exit__(self, *error):
                pass

        def and_then_gone(folder):
            if folder != theirs.path:
                return listed(folder)
            entries = Entries(listed(folder))
            for entry in entries:
                os.unlink(entry.path)
            return entries

        monkeypatch.setattr(os, "scandir", and_then_gone)
        mine = self.open(tmp_path, "mine")
        self.write(mine, 1, 2000)
        mine.close()
        theirs.close()

    def test_a_write_that_failed_takes_no_room_from_others(self, tmp_path, monkeypatch):
        old = self.open(tmp_path, "old")
        self.write(old, 2, 1000)
        old.close()
        mine = self.open(tmp_path, "mine")
        with monkeypatch.context() as broken:
            broken.setattr("worker.tiers.disk_folder.write_block_file", failing)
            for _ in range(2):
                with pytest.raises(OSError, match="no space"):
                    self.write(mine, 1, 2000)
        self.write(mine, 2, 2000)
        assert len(self.held(old)) == 2
        mine.close()

    def test_what_was_ones_own_until_now_counts_once_it_is_closed(self, tmp_path):
        former = self.open(tmp_path, "former")
        self.write(former, 4, 1000)
        smaller = open_folder(tmp_path, NAMESPACE, bound_bytes=2 * former.block_bytes)
        former.close()
        smaller.find_leftovers()
        assert self.held(former) == ["00", "01"]
        self.write(smaller, 1, 2000)
        assert self.held(former) == ["00"]
        smaller.close()


def failing(path, header, body):
    raise OSError(28, "no space left on device")


def fields_of(namespace):
    return {name: getattr(namespace, name) for name in namespace.__struct_fields__}
