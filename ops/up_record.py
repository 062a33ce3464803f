"""A file in which `stemroute up` says where its parts are, for commands of the same user."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from cluster.settings import Settings
from ops.addresses import base_url, is_loopback


class UpRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What another command needs to know of a running `up`."""

    pid: int
    redis_url: str
    pool: str
    secret: str
    api_key: str
    admin_key: str


def record_path(port: int) -> Path:
    """The file of the `up` whose gateway listens on `port`, below XDG_RUNTIME_DIR where that can
    be used, else below the temporary folder."""
    return _directory() / f"gateway-{port}.json"


def write_record(settings: Settings) -> None:
    """Write the file of this `up`, readable by its user only. Raises OSError."""
    path = record_path(settings.gateway.port)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _own(path.parent):
        raise PermissionError(f"{path.parent} belongs to another user or is open to others")
    record = UpRecord(
        pid=os.getpid(),
        redis_url=settings.redis_url,
        pool=settings.pool,
        secret=settings.secret,
        api_key=settings.gateway.api_key,
        admin_key=settings.gateway.admin_key,
    )
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(record))


def find_record(url: str) -> UpRecord | None:
    """What the `up` behind a gateway's URL on this machine has written; None where none has."""
    if not is_loopback(url):
        return None
    try:
        path = record_path(urlsplit(base_url(url)).port or 80)
        if not _own(path.parent) or not _own(path):
            return None
        return msgspec.json.decode(path.read_bytes(), type=UpRecord)
    except (OSError, ValueError):
        return None


def with_record(settings: Settings, record: UpRecord) -> Settings:
    """Settings that are at their defaults take what the record says."""
    gateway = settings.gateway
    return msgspec.structs.replace(
        settings,
        redis_url=settings.redis_url or record.redis_url,
        pool=record.pool if settings.pool == Settings().pool else settings.pool,
        secret=settings.secret or record.secret,
        gateway=msgspec.structs.replace(
            gateway,
            api_key=gateway.api_key or record.api_key,
            admin_key=gateway.admin_key or record.admin_key,
        ),
    )


def _directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        return Path(runtime) / "stemroute"
    return Path(tempfile.gettempdir()) / f"stemroute_{os.getuid()}"


def _own(path: Path) -> bool:
    """Whether this user alone may read and write it. Raises OSError where it is not there."""
    found = path.lstat()
    return found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
