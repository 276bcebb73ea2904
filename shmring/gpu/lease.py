"""The lease of a slab of device memory: how its owner learns that nobody else has it mapped.

To free memory that another process has mapped is undefined.  So each side holds one end of a socket pair: who imported
the slab closes its end after unmapping (the kernel does, when it dies), and who exported it waits for that.
"""

from __future__ import annotations

import socket


def wait_for_end(lease: socket.socket) -> None:
    """Until the other side has closed its end; as long as it lives, if it does not."""
    lease.setblocking(True)
    try:
        while lease.recv(64):
            pass
    except OSError:
        pass  # a reset connection is an end too
