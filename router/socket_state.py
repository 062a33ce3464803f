"""What the kernel knows about the connection of a transport."""

from __future__ import annotations

import asyncio
import fcntl
import select
import struct
import termios


def in_flight_bytes(transport: asyncio.Transport) -> int:
    """Bytes in the kernel's socket buffer that the peer has not acknowledged; 0 if unknown.

    The kernel accepts more only when much of its buffer, often megabytes, is free. Without this
    count, a slow reader would seem to receive nothing for minutes.
    """
    try:
        told = fcntl.ioctl(_fd(transport), termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int(struct.unpack("i", told)[0])


def was_reset(transport: asyncio.Transport) -> bool:
    """Whether the peer has reset the connection; an event loop does not notice after its EOF."""
    poll = select.poll()
    poll.register(_fd(transport), 0)  # errors are always reported
    return bool(poll.poll(0))


def _fd(transport: asyncio.Transport) -> int:
    return int(transport.get_extra_info("socket").fileno())
