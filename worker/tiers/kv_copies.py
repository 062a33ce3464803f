"""Copies of KV blocks between the device's pool and host memory.

A block of the host's pool is contiguous, `[2 × layers, block_size, kv_heads, head_dim]` (keys and
values of each layer in turn), so that it is written to a file unchanged. On CUDA the host's pool is
pinned, and copies run on a stream of their own, in parallel with computing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.attention.base import KvPool


class TorchCopies:
    """`KvCopies` over a runner's pools, with `places` blocks of host memory.

    Raises MemoryError if host memory does not suffice.
    """

    def __init__(self, pools: list[KvPool], places: int) -> None:
        first = pools[0][0]
        self._pools = pools
        self._device = first.device
        self.shape = [2 * len(pools), *first.shape[1:]]
        self._dtype = first.dtype
        self.block_bytes = torch.Size(self.shape).numel() * first.element_size()
        cuda = self._device.type == "cuda"
        try:
            self._host = torch.empty((places, self.block_bytes), dtype=torch.uint8, pin_memory=cuda)
        except RuntimeError as error:
            raise MemoryError(
                f"cannot allocate {places * self.block_bytes} bytes of host memory for the CPU "
                f"tier ({error}); set worker.cpu_tier_gb lower"
            ) from error
        self._typed = self._host.view(self._dtype).view(places, *self.shape)
        self._stream = (
            torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            if cuda
            else None
        )

    @torch.inference_mode()
    def copy_out(self, blocks: Sequence[int], places: Sequence[int]) -> Callable[[], bool]:
        """Gather on the computing stream, which may overwrite the blocks afterwards."""
        index = torch.tensor(blocks, device=self._device)
        gathered = torch.stack(
            [pool.index_select(0, index) for pair in self._pools for pool in pair], dim=1
        )
        if self._stream is None:
            self._typed[torch.tensor(places)] = gathered
            return _arrived
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for row, place in enumerate(places):
                self._typed[place].copy_(gathered[row], non_blocking=True)
            gathered.record_stream(self._stream)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return event.query

    def fence(self) -> Callable[[], None]:
        """Earlier steps may still read the blocks when the I/O thread writes them."""
        if self._stream is None:
            return _nothing
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def copy_in(self, places: Sequence[int], blocks: Sequence[int]) -> None:
        """One scatter per layer."""
        self._scatter([self._typed[place] for place in places], blocks)

    def put(self, bodies: Sequence[bytes], blocks: Sequence[int]) -> None:
        """As `copy_in`, from memory that is not pinned."""
        self._scatter(
            [
                torch.frombuffer(bytearray(body), dtype=self._dtype).view(self.shape)
                for body in bodies
            ],
            blocks,
        )

    def clear(self, places: int) -> None:
        """Zero the first places of host memory, which is not initialised."""
        self._host[:places] = 0

    def host_bytes(self, place: int) -> memoryview:
        """Bytes `[block_bytes]`."""
        return self._host[place].numpy().data

    @torch.inference_mode()
    def _scatter(self, sources: list[torch.Tensor], blocks: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):  # None: no change
            staged = torch.empty(
                (len(sources), *self.shape), dtype=self._dtype, device=self._device
            )
            for row, source in enumerate(sources):
                staged[row].copy_(source, non_blocking=True)
            index = torch.tensor(blocks, device=self._device)
            planes = (pool for pair in self._pools for pool in pair)
            for plane, pool in enumerate(planes):
                pool.index_copy_(0, index, staged[:, plane])
        if self._stream is not None:
            self._stream.synchronize()


def _arrived() -> bool:
    return True


def _nothing() -> None:
    return None
