"""The lease of a slab of device memory: its allocator learns from it that nobody else maps the slab.

To free memory that another process maps is undefined.  Each side holds one end of a socket pair: the importer closes
its end after unmapping (the kernel does at its death), and the allocator waits for that.
"""

from __future__ import annotations

import socket


def wait_for_end(lease: socket.socket) -> None:
    """Wait until the other side closed its end or died."""
    lease.setblocking(True)
    try:
        while lease.recv(64):
            pass
    except OSError:
        pass  # a reset connection is an end too
