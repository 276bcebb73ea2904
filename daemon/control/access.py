"""Which users may use the control socket: credentials from the kernel, and the rule that the configuration makes."""

from __future__ import annotations

import grp
import os
import socket
import struct
from dataclasses import dataclass
from typing import NamedTuple

from ...shmring.wire.checks import shown
from ...shmring.wire.control_socket import peer_of
from ..config.model import ConfigError, DaemonConfig

NOT_ALLOWED = "may not attach: the socket's group and allow_uids may"
_SO_PEERGROUPS = 59  # asm-generic/socket.h; Python has no name for it
_MAX_GID = (1 << 32) - 2
_MAX_GROUPS = 256  # the 1024 bytes that Python reads at most; of a user in more groups only the primary one counts


class Credentials(NamedTuple):
    """SO_PEERCRED of a connection, with its supplementary groups."""

    pid: int
    uid: int
    groups: frozenset[int]


def credentials_of(sock: socket.socket) -> Credentials:
    """Return the credentials that the kernel noted when the peer connected."""
    pid, uid, gid = peer_of(sock)
    try:
        more = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:  # more groups than fit, or a kernel before 4.13
        more = b""
    return Credentials(pid, uid, frozenset((gid, *struct.unpack(f"{len(more) // 4}I", more))))


@dataclass(frozen=True)
class Access:
    """Root, our own user, the users of `uids`, and members of the socket file's group (`gid`) may attach."""

    gid: int
    uids: frozenset[int]

    def may_attach(self, peer: Credentials) -> bool:
        return self.scope(peer) is None or peer.uid in self.uids or self.gid in peer.groups

    def scope(self, peer: Credentials) -> int | None:
        """Return the user id of the engines that this peer may see and steer; None for an operator: all engines.

        Operators are root and our own user.
        """
        return None if peer.uid in (0, os.geteuid()) else peer.uid


def group_id(name: str) -> int:
    """Return the number of a group given by name or number. Raises ConfigError."""
    if name.isascii() and name.isdigit():
        if len(name) > 10 or int(name) > _MAX_GID:
            raise ConfigError(f"socket_group: should be a name or 0 to {_MAX_GID}: socket_group={shown(name)}")
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"socket_group: no such group: socket_group={shown(name)}") from None


def access_of(sock: socket.socket, config: DaemonConfig) -> Access:
    """Return the rule for a listening socket, with the group that owns its file."""
    try:
        gid = os.stat(sock.getsockname()).st_gid
    except (OSError, TypeError, ValueError):  # an abstract name, or a file that we may not see
        gid = -1
    return Access(gid, frozenset(config.allow_uids))
