"""The control socket: where the two sides meet, and the process, user and group on its other side.

An engine and the commands look in one order: at the named path alone, or at the system's, then at this user's own.
They pass over a place where no daemon listens, and one that refuses this user, but not a daemon that is busy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .admin import StatusQuery
from .attach import Refused
from .codec import receive_message, send_message
from .records import ProtocolError

MAX_SOCKET_PATH_BYTES = 107  # sun_path has 108 with its final zero
SYSTEM_SOCKET = "/run/kvprefetch/kvprefetchd.sock"
USERS_FOLDER = "/run/user"  # systemd's folder of each user who is logged in; su, cron and containers do not name it
TEMP_FOLDER = "/tmp"  # not $TMPDIR, in which two sides may differ
DAEMON_USER = "kvprefetch"
_CREDENTIALS = struct.Struct("iII")  # struct ucred of unix(7)


class Stranger(PermissionError):
    """The process that listens there runs as a user `uid` whom this process does not trust."""

    def __init__(self, path: str, uid: int, daemon_user: str | int) -> None:
        super().__init__(
            f"the process that listens at {path} does not run as {daemon_user=}: {uid=} is neither root nor this "
            "engine's user, nothing is shared with it; to trust it, name its user in daemon_user"
        )
        self.uid = uid


class Forbidden(PermissionError):
    """The daemon there says that this process's user may not attach."""


class FoundDaemon(NamedTuple):
    """A connection to the daemon at `path`; or None, and the path that was looked at last.

    `passed`: the paths without a connection, each with why.
    """

    sock: socket.socket | None
    path: str
    passed: list[tuple[str, OSError]]

    @property
    def startable(self) -> bool:
        """Whether no daemon listens at that path: one may be started there."""
        return self.sock is None and isinstance(self.passed[-1][1], FileNotFoundError | ConnectionRefusedError)


def own_socket(environ: Mapping[str, str] = os.environ) -> str:
    """Return where this user's daemon listens: $KVPREFETCHD_SOCKET, in $RUNTIME_DIRECTORY (systemd), at the system's
    place for root and the user who owns that folder, or in a folder of the user's own."""
    if named := environ.get("KVPREFETCHD_SOCKET"):
        return named
    if folder := environ.get("RUNTIME_DIRECTORY", "").split(":")[0]:
        return os.path.join(folder, os.path.basename(SYSTEM_SOCKET))
    return next(_own_sockets(environ))


def sockets(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the paths at which this user's engines and commands look for a daemon, the first one first."""
    if named := environ.get("KVPREFETCHD_SOCKET"):
        return [named]
    return [*dict.fromkeys((SYSTEM_SOCKET, *_own_sockets(environ)))]


def _own_sockets(environ: Mapping[str, str]) -> Iterator[str]:
    uid = os.geteuid()
    if uid == 0 or is_private(os.path.dirname(SYSTEM_SOCKET), uid):
        yield SYSTEM_SOCKET
        return
    for folder in dict.fromkeys((environ.get("XDG_RUNTIME_DIR", ""), f"{USERS_FOLDER}/{uid}")):
        if os.path.isabs(folder) and is_private(folder, uid):
            yield os.path.join(folder, "kvprefetch", os.path.basename(SYSTEM_SOCKET))
    yield os.path.join(TEMP_FOLDER, f"kvprefetch-{uid}", os.path.basename(SYSTEM_SOCKET))


def user_folder(kind: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the user's folder of this kind for us, which need not exist: DATA for values, STATE for logs (XDG)."""
    named, below = environ.get(f"XDG_{kind}_HOME", ""), {"DATA": "share", "STATE": "state"}[kind]
    base = named if os.path.isabs(named) else os.path.expanduser(f"~/.local/{below}")
    return os.path.join(base, "kvprefetch")


def is_private(folder: str, uid: int) -> bool:
    """Whether the folder is this user's, and no other may write to it."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def find(
    paths: Sequence[str], daemon_user: str | int = DAEMON_USER, timeout_s: float = 1.0, *, ask: bool = False
) -> FoundDaemon:
    """Connect to the first daemon that runs as root, as this process's user or as `daemon_user`, and takes this user.

    No other daemon stands in for one that does not answer in time: it is busy, and comes back.
    A daemon at the only path is not asked whom it takes, unless with `ask`: it refuses the caller's message.
    """
    passed = list[tuple[str, OSError]]()
    for path in paths:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC))
            try:
                sock.settimeout(timeout_s)
                sock.connect(path)
                if (uid := peer_of(sock)[1]) not in (0, os.geteuid(), user_id(daemon_user)):
                    raise Stranger(path, uid, daemon_user)
                if (ask or len(paths) > 1) and os.geteuid() not in (0, uid):
                    _ask(sock)
            except OSError as error:
                passed.append((path, error))
                if isinstance(error, BlockingIOError | TimeoutError):
                    return FoundDaemon(None, path, passed)
                continue
            undo.pop_all()
            return FoundDaemon(sock, path, passed)
    return FoundDaemon(None, paths[-1], passed)


def _ask(sock: socket.socket) -> None:
    """Raise Forbidden where the daemon does not take this user, and TimeoutError where it says nothing."""
    try:
        send_message(sock, StatusQuery())  # which every release answers, and goes on
        received = receive_message(sock, max_fds=0)
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, "the daemon does not answer") from None
    except (OSError, ProtocolError):  # whoever goes on with this connection says what is wrong with it
        return
    if received is not None and isinstance(answer := received[0], Refused) and answer.forbidden:
        raise Forbidden(errno.EACCES, f"it refuses this user: {answer.error}")


def check_socket_path(value: object) -> object:
    """Return a `socket` setting of any type unchanged. Raises ValueError for a path that no Unix socket can have."""
    if isinstance(value, (str, os.PathLike)):
        path = os.fsencode(value)
        if not 1 <= len(path) <= MAX_SOCKET_PATH_BYTES or b"\0" in path:
            raise ValueError(f"should have 1 to {MAX_SOCKET_PATH_BYTES} bytes, none of them zero")
    return value


def peer_of(sock: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group id of the other side: of a connecting process, or of a listener at its bind."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def user_id(user: str | int) -> int | None:
    """Number of a user given by name or number; None for a name unknown on this machine."""
    try:
        return user if isinstance(user, int) else pwd.getpwnam(user).pw_uid
    except KeyError:
        return None
