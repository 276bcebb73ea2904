"""Keeps to this machine what Mooncake's client listens on: it binds to all addresses, and asks nobody who they are.

Whoever reaches its data port may read and write registered memory, staging included, and no setting says where it
binds.  So its sockets get a filter that passes only what came over the loopback interface; what others send is dropped,
as by a firewall.  It needs no privilege, and connections that a socket accepts inherit it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

# linux/filter.h, asm-generic/socket.h; LOOPBACK_IFINDEX in every network namespace.
_SO_ATTACH_FILTER = 26
_LOOPBACK = 1
_PROGRAM = (
    (0x20, 0, 0, 0xFFFFF000 + 8),  # BPF_LD | BPF_W | BPF_ABS: SKF_AD_OFF + SKF_AD_IFINDEX, where the packet came in
    (0x15, 0, 1, _LOOPBACK),  # BPF_JMP | BPF_JEQ | BPF_K
    (0x06, 0, 0, 0xFFFFFFFF),  # BPF_RET: all of it
    (0x06, 0, 0, 0),  # BPF_RET: nothing
)


def listening() -> set[int]:
    """The inodes of this process's TCP sockets that listen."""
    return {inode for inode, each in _sockets() if _listens(each)}


def confine(before: set[int]) -> None:
    """Shut out other machines from all that listens and is not in `before`, and from what it accepted since.

    Raises OSError where the kernel does not let us.
    """
    ports = set()
    for inode, each in _sockets():
        if inode not in before and _listens(each):
            _attach(each)
            ports.add(each.getsockname()[1])
    for _, each in _sockets():
        if not _listens(each) and each.getsockname()[1] in ports:
            _attach(each)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """This process's TCP sockets and their inodes, each open until the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by its owner meanwhile
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                        yield int(target[8:-1]), each


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _attach(each: socket.socket) -> None:
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _PROGRAM))
    each.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_PROGRAM), ctypes.addressof(program))
    )  # fmt: skip
