"""Open the cold tiers from settings: sizes, threads, folder, first measurements."""

from __future__ import annotations

import errno
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cluster.blocks import HASH_BYTES, Namespace
from cluster.settings import WorkerSettings
from worker.kv_memory import kv_block_bytes
from worker.prefill_speed import Speed
from worker.runner import TorchRunner
from worker.tiers.cold_tiers import ColdTiers
from worker.tiers.disk_folder import DiskFolder
from worker.tiers.kv_copies import TorchCopies

log = logging.getLogger(__name__)

GIB = 1 << 30
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a disk that cannot be written now. A worker serves without it."""

PROBE_BLOCKS = (1, 8, 1, 8)


def open_tiers(
    settings: WorkerSettings,
    runner: TorchRunner,
    namespace: Namespace,
    kv_blocks: int,
    prefill: Speed,
) -> ColdTiers | None:
    """The tiers of the settings, or None.

    Call it before the engine runs, because copies are measured in its empty pool. Raises ValueError
    for invalid settings, MemoryError, OSError.
    """
    if not settings.cpu_tier_gb:
        if settings.disk_tier_gb:
            raise ValueError(
                "worker.disk_tier_gb needs worker.cpu_tier_gb, because blocks reach the disk "
                "through host memory"
            )
        return None
    block_bytes = kv_block_bytes(runner.model.config, settings.block_size, runner.model.dtype)
    host_blocks = int(settings.cpu_tier_gb * GIB) // block_bytes
    if host_blocks < 1:
        raise ValueError(
            f"worker.cpu_tier_gb={settings.cpu_tier_gb:g} is less than one block of {block_bytes} "
            "bytes; set it higher, or to 0"
        )
    copies = TorchCopies(runner.pools, host_blocks)
    try:
        folder, disk_blocks = open_folder(settings, runner, namespace)
    except OSError as error:
        if error.errno not in FULL:
            raise
        log.warning("no disk tier until the worker is restarted: %s", error)
        folder, disk_blocks = None, 0
    tiers = ColdTiers(
        copies,
        block_size=settings.block_size,
        block_bytes=4 * settings.block_size,
        host_blocks=host_blocks,
        loader=ThreadPoolExecutor(1, thread_name_prefix="kv-loads"),
        writer=ThreadPoolExecutor(1, thread_name_prefix="kv-writes"),
        clock=time.perf_counter,
        folder=folder,
        disk_blocks=disk_blocks,
    )
    _measure(tiers, copies, folder, min(kv_blocks, host_blocks))
    tiers.set_prefill_speed(*prefill)
    log.info(
        "cold tiers: %d blocks in host memory, %d on disk, %d of them found there",
        host_blocks,
        tiers.disk.capacity,
        len(tiers.disk),
    )
    return tiers


def open_folder(
    settings: WorkerSettings, runner: TorchRunner, namespace: Namespace
) -> tuple[DiskFolder | None, int]:
    """The disk tier's folder of a namespace, and its maximum of blocks.

    None if the settings have no disk tier. Raises ValueError, OSError.
    """
    if not settings.disk_tier_gb:
        return None, 0
    keys = runner.pools[0][0]
    shape = [2 * len(runner.pools), *keys.shape[1:]]
    body_bytes = math.prod(shape) * keys.element_size()
    root = settings.disk_tier_dir or Path.home() / ".cache" / "stemroute" / "kv"
    bound_bytes = int(settings.disk_tier_gb * GIB)
    folder = DiskFolder(Path(root), namespace, shape, body_bytes, bound_bytes)
    blocks = bound_bytes // folder.block_bytes
    if blocks < 1:
        folder.close()
        raise ValueError(
            f"worker.disk_tier_gb={settings.disk_tier_gb:g} is less than one block of "
            f"{folder.block_bytes} bytes; set it higher, or to 0"
        )
    return folder, blocks


def _measure(tiers: ColdTiers, copies: TorchCopies, folder: DiskFolder | None, most: int) -> None:
    """Measure copies and reads before the first request. Later loads correct the result."""
    copies.clear(most)
    copies.copy_in([0], [1])  # without the set-up of the first copy
    for count in PROBE_BLOCKS:
        count = min(count, most)
        began_s = time.perf_counter()
        copies.copy_in(range(count), range(1, count + 1))
        tiers.host_speed.observe(count, time.perf_counter() - began_s)
    if folder is None:
        return
    header = folder.header(bytes(HASH_BYTES), b"", b"")
    try:
        folder.write(header, copies.host_bytes(0))
    except OSError as error:
        log.warning("cannot measure the disk tier, its first load will: %s", error)
        return
    for count in PROBE_BLOCKS:
        began_s = time.perf_counter()
        copies.put([folder.read(header) for _ in range(count)], [1] * count)
        tiers.disk_speed.observe(count, time.perf_counter() - began_s)
    folder.remove(header.block_hash)
