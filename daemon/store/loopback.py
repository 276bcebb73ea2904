"""Keeps other machines from the sockets of Mooncake's client, which listen on all addresses without a password.

A peer of the data port may read and write registered memory, staging included, and no setting changes the address.  So
this module binds each socket to the loopback interface (SO_BINDTODEVICE, without privilege since Linux 5.7): a packet
that comes in elsewhere finds no socket.  Where the kernel refuses, the socket gets a filter that drops such packets
(SO_ATTACH_FILTER, which some kernels allow root only).  Accepted connections inherit both.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

# linux/filter.h, asm-generic/socket.h, linux/sockios.h, linux/if.h; interface 1 is "lo" in every network namespace.
SO_ATTACH_FILTER = 26
_SIOCGIFFLAGS, _IFF_UP, _IFF_LOOPBACK = 0x8913, 0x1, 0x8
LOOPBACK = b"lo"
_PROGRAM = (
    (0x20, 0, 0, 0xFFFFF000 + 8),  # BPF_LD | BPF_W | BPF_ABS: SKF_AD_OFF + SKF_AD_IFINDEX, where the packet came in
    (0x15, 0, 1, 1),  # BPF_JMP | BPF_JEQ | BPF_K: the loopback interface
    (0x06, 0, 0, 0xFFFFFFFF),  # BPF_RET: all of it
    (0x06, 0, 0, 0),  # BPF_RET: nothing
)
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_CONNECTED = ("01", "03", "08")  # ESTABLISHED, SYN_RECV, CLOSE_WAIT of include/net/tcp_states.h
_LISTENS = "0A"  # LISTEN of the same
_SETTLE_S = 2.0


def refusal() -> str:
    """Say why this process can confine no socket, such as "Operation not permitted"; empty when it can."""
    with socket.socket() as probe:
        try:
            _shut(probe)
        except OSError as error:
            return os.strerror(error.errno or 0)
    return ""


def interfaces() -> list[str]:
    """Return the names of the network interfaces that are up, without the loopback interface."""
    found = []
    with socket.socket(type=socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it is gone meanwhile
                request = fcntl.ioctl(asked, _SIOCGIFFLAGS, struct.pack("16s24x", os.fsencode(name)))
                flags = struct.unpack("16xH22x", request)[0]
                if flags & _IFF_UP and not flags & _IFF_LOOPBACK:
                    found.append(name)
    return found


def listening() -> set[int]:
    """Return the inodes of this process's listening TCP sockets."""
    return {inode for inode, each in _sockets() if _listens(each)}


def listening_ports(pid: int) -> set[int]:
    """Return the TCP ports on which a process of ours listens; none when it has ended."""
    theirs = set[str]()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                theirs.add(os.readlink(link))
    return {port for port, inode in _rows(_LISTENS) if f"socket:[{inode}]" in theirs}


def confine(before: set[int]) -> None:
    """Shut other machines out of the listening sockets that are not in `before`, and of their connections.

    Raises OSError where the kernel refuses, or where the client does not accept an earlier connection within 2 s.
    """
    ports, shut = set(), set[int]()
    for inode, each in _sockets():
        if inode not in before and _listens(each):
            _shut(each)
            ports.add(each.getsockname()[1])
    deadline = time.monotonic() + _SETTLE_S
    # Nothing new comes in from here on, but an earlier handshake may still give an unconfined connection.
    # Inode 0 stands for the unaccepted ones.
    while left := {inode for port, inode in _rows(*_CONNECTED) if port in ports} - shut:
        if time.monotonic() > deadline:
            if 0 not in left:  # another process may use such a port of the other address family
                break
            raise OSError(errno.EBUSY, "a connection from before is not accepted")
        for inode, each in _sockets():
            with contextlib.suppress(OSError):  # disconnected meanwhile
                if inode not in shut and not _listens(each) and each.getsockname()[1] in ports:
                    _shut(each)
                    shut.add(inode)
        time.sleep(0.001)


def _rows(*states: str) -> Iterator[tuple[int, int]]:
    """Yield local port and inode of each TCP socket of this network namespace that is in one of these states."""
    for table in _TABLES:
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in table.read_text().splitlines()[1:]:
                words = line.split()
                if words[3] in states:
                    yield int(words[1].rpartition(":")[2], 16), int(words[9])


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield this process's TCP sockets with their inodes; each is open until the next one."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                        yield int(target[8:-1]), each


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _shut(each: socket.socket) -> None:
    """Let only packets of the loopback interface reach this socket. Raises the filter's OSError."""
    try:
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0") != LOOPBACK:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, LOOPBACK)
    except OSError:
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in _PROGRAM))
        each.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(_PROGRAM), ctypes.addressof(program))
        )
