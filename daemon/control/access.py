"""Who may use the control socket: the socket file's owner and mode, and the credentials the kernel reports."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...shmring.wire.checks import shown
from ...shmring.wire.control_socket import peer_of
from ..config.model import ConfigError, DaemonConfig, Taken

_SO_PEERGROUPS = 59  # asm-generic/socket.h; Python has no name for it
_LOCK_S = 2.0
# Connections that wait to be accepted; beyond, those with a timeout are refused. When a daemon starts anew, all the
# processes of a node's engines come at once.
_BACKLOG = 1024
_MAX_GID = (1 << 32) - 2
_MAX_GROUPS = 256  # the 1024 bytes that Python reads at most; of a user in more groups only the primary one counts


class Credentials(NamedTuple):
    """SO_PEERCRED of a connection, with its supplementary groups."""

    pid: int
    uid: int
    groups: frozenset[int]


def credentials_of(sock: socket.socket) -> Credentials:
    """What the kernel noted when the peer connected."""
    pid, uid, gid = peer_of(sock)
    try:
        more = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    except OSError:  # more groups than fit, or a kernel before 4.13
        more = b""
    return Credentials(pid, uid, frozenset((gid, *struct.unpack(f"{len(more) // 4}I", more))))


@dataclass(frozen=True)
class Access:
    """Root, our own user, the users of `uids`, and members of the group that owns the socket file may attach.

    With `share_namespaces` an engine may name the namespaces of other users.
    """

    gid: int
    uids: frozenset[int]
    share_namespaces: bool = False

    def may_attach(self, peer: Credentials) -> bool:
        return self.scope(peer) is None or peer.uid in self.uids or self.gid in peer.groups

    def scope(self, peer: Credentials) -> int | None:
        """Return the user id of the engines that this peer may see and steer; None stands for all engines, which are an
        operator's: of root or our own user."""
        return None if peer.uid in (0, os.geteuid()) else peer.uid


def group_id(name: str) -> int:
    """Number of a group given by name or number. Raises ConfigError."""
    if name.isascii() and name.isdigit():
        if len(name) > 10 or int(name) > _MAX_GID:
            raise ConfigError(f"socket_group: should be a name or 0 to {_MAX_GID}: socket_group={shown(name)}")
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"socket_group: no such group: socket_group={shown(name)}") from None


def access_of(sock: socket.socket, config: DaemonConfig) -> Access:
    """The rule for a listening socket: the owning group is read from its file."""
    try:
        gid = os.stat(sock.getsockname()).st_gid
    except (OSError, TypeError, ValueError):  # no path, or not one we can see
        gid = -1
    return Access(gid, frozenset(config.allow_uids), config.namespaces == "shared")


def listen(config: DaemonConfig, patience_s: float = _LOCK_S) -> socket.socket:
    """Bind the control socket, replacing a dead one. Raises ConfigError when the path is not usable, Taken when another
    daemon has it."""
    path = config.socket
    gid = group_id(config.socket_group) if config.socket_group is not None else -1
    try:
        _make_folders(path.parent)
        with _alone_in(path.parent, patience_s) as folder:
            _check_folder(folder, path)
            _make_way(folder, path)
            return _bound(folder, path, gid, int(config.socket_mode, 8))
    except OSError as error:
        kind = Taken if error.errno == errno.EADDRINUSE else ConfigError
        cure = "--socket names another place"
        if gid != -1 and error.errno == errno.EPERM:
            cure = "the daemon's user must be a member of that group"
        raise kind(
            f"socket: cannot be bound: {error.strerror or error}: socket={str(path)!r} "
            f"socket_group={config.socket_group!r}; {cure}"
        ) from None


def take_away(path: Path, bound: os.stat_result) -> None:
    """Remove the socket file that was `bound`, unless another daemon has put its own there since.

    Where that cannot be done the file stays, and the next daemon replaces it.
    """
    with contextlib.suppress(OSError), _alone_in(path.parent) as folder:
        if os.path.samestat(os.stat(path.name, dir_fd=folder, follow_symlinks=False), bound):
            os.unlink(path.name, dir_fd=folder)


def _make_folders(folder: Path) -> None:
    """Make the folders that are missing, for all to enter: who may connect is up to the socket's mode."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        try:
            os.mkdir(each, 0o700)
        except FileExistsError:
            continue
        fd = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_uid == os.geteuid():  # else it is another one by now
                os.fchmod(fd, 0o755)
        finally:
            os.close(fd)


@contextlib.contextmanager
def _alone_in(folder: Path, patience_s: float = _LOCK_S) -> Iterator[int]:
    """The folder's descriptor, while no other daemon makes or removes a socket in it: of two that start at once one
    would take the other's, bound and not yet listening, for a dead one.

    Each needs it for a moment; whoever keeps it for longer is no daemon that starts, and is not waited for.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.01)
        yield fd
    finally:
        os.close(fd)


def _check_folder(folder: int, path: Path) -> None:
    """As root, refuse a folder in which another user could put a socket of their own in the place of ours."""
    found = os.fstat(folder)
    open_to_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if os.geteuid() == 0 and (found.st_uid != 0 or open_to_others):
        raise ConfigError(
            f"socket: other users could replace it in its folder: socket={str(path)!r} folder_uid={found.st_uid} "
            f"folder_mode={stat.S_IMODE(found.st_mode):04o}: as root, name a folder that root owns and nobody else may "
            "write to, or start the daemon as the folder's user"
        )


def _make_way(folder: int, path: Path) -> None:
    try:
        found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(f"socket: the path exists and is not a socket: socket={str(path)!r}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)  # a daemon that hangs, with a full queue, would let us wait
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            os.unlink(path.name, dir_fd=folder)
            return
        except BlockingIOError:
            pass
    raise Taken(f"socket: another daemon is serving: socket={str(path)!r}; --socket names another place")


def _bound(folder: int, path: Path, gid: int, mode: int) -> socket.socket:
    """A socket that listens at a free path, or nothing there. Raises OSError.

    Nobody can connect before it listens. Owner and mode are set on the file that was opened, through /proc: by path
    they would go to whatever a link in its place points at.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.bind(str(path))
        file = os.open(path.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            found = os.fstat(file)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                raise OSError(errno.ESTALE, "another file is in its place")
            try:
                if gid != -1:
                    os.chown(f"/proc/self/fd/{file}", -1, gid)
                os.chmod(f"/proc/self/fd/{file}", mode)
                sock.listen(_BACKLOG)
                sock.setblocking(False)
            except BaseException:
                os.unlink(path.name, dir_fd=folder)
                raise
        finally:
            os.close(file)
    except BaseException:
        sock.close()
        raise
    return sock
