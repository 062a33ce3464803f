"""Lines of trace files: plain, gzip, xz, in a tar archive or in a folder."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    """A line that is not blank, and where it stands."""

    file: str
    number: int
    data: bytes

    @property
    def place(self) -> str:
        """Such as "conversation.jsonl line 3"."""
        return f"{self.file} line {self.number}"


def read_lines(paths: Iterable[Path]) -> tuple[list[Line], str]:
    """All lines of the files in the order given, and the SHA-256 (hex) of their contents.

    A folder stands for the files in it and a tar archive for its members, each by name.
    Raises OSError, tarfile.TarError, lzma.LZMAError or EOFError where one cannot be read.
    """
    lines: list[Line] = []
    digest = hashlib.sha256()
    for path in paths:
        for name, data in _contents(path):
            digest.update(len(data).to_bytes(8, "little") + data)
            lines += [
                Line(name, number, line)
                for number, line in enumerate(data.splitlines(), start=1)
                if line.strip()
            ]
    return lines, digest.hexdigest()


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for child in sorted(path.iterdir()):
            if child.is_file():
                yield from _contents(child)
    elif ".tar" in path.suffixes or path.suffix == ".tgz":
        with tarfile.open(path) as archive:
            members = [member for member in archive if member.isfile()]
            for member in sorted(members, key=lambda member: member.name):
                content = archive.extractfile(member)
                assert content is not None  # it is a file
                yield f"{path.name}:{member.name}", content.read()
    else:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        elif path.suffix == ".xz":
            data = lzma.decompress(data)
        yield path.name, data
