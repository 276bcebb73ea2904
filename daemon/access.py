"""Who may use the control socket: the socket file's owner and mode, and the credentials the kernel reports."""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .config import ConfigError, DaemonConfig

_CREDENTIALS = struct.Struct("3i")
_SO_PEERGROUPS = 59  # asm-generic/socket.h; Python has no name for it
_MAX_GROUPS = 256  # the 1024 bytes that Python reads at most; of a user in more groups only the primary one counts


class Credentials(NamedTuple):
    """SO_PEERCRED of a connection, with its supplementary groups."""

    pid: int
    uid: int
    groups: frozenset[int]


def credentials_of(sock: socket.socket) -> Credentials:
    """What the kernel noted when the peer connected."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    try:
        more = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:  # more groups than fit, or a kernel before 4.13
        more = b""
    return Credentials(pid, uid, frozenset((gid, *struct.unpack(f"{len(more) // 4}I", more))))


@dataclass(frozen=True)
class Access:
    """Root, our own user, the users of `uids`, and members of the group that owns the socket file may attach."""

    gid: int
    uids: frozenset[int]

    def may_attach(self, peer: Credentials) -> bool:
        return self.may_steer(peer) or peer.uid in self.uids or self.gid in peer.groups

    def may_steer(self, peer: Credentials) -> bool:
        """Change what concerns every engine: only root and our own user."""
        return peer.uid in (0, os.geteuid())


def group_id(name: str) -> int:
    """Number of a group given by name or number. Raises ConfigError."""
    if name.isdigit():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"socket_group: no such group: socket_group={name!r}") from None


def access_of(sock: socket.socket, config: DaemonConfig) -> Access:
    """The rule for a listening socket: the owning group is read from its file."""
    try:
        gid = os.stat(sock.getsockname()).st_gid
    except (OSError, TypeError, ValueError):  # no path, or not one we can see
        gid = -1
    return Access(gid, frozenset(config.allow_uids))


def listen(config: DaemonConfig) -> socket.socket:
    """Bind the control socket, replacing a dead one. Raises ConfigError when the path is taken or not usable."""
    path = config.socket
    gid = group_id(config.socket_group) if config.socket_group is not None else -1
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_way(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.bind(str(path))
            if gid != -1:
                os.chown(path, -1, gid)
            os.chmod(path, int(config.socket_mode, 8))
            sock.listen(64)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise ConfigError(
            f"socket: cannot be bound: {error.strerror or error}: socket={str(path)!r} "
            f"socket_group={config.socket_group!r}; --socket names another place"
        ) from None


def take_away(path: Path, bound: os.stat_result) -> None:
    """Remove the socket file that was `bound`, unless another daemon has put its own there since."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), bound):
            path.unlink()


def _make_way(path: Path) -> None:
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"socket: the path exists and is not a socket: socket={str(path)!r}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise ConfigError(f"socket: another daemon is serving: socket={str(path)!r}")
