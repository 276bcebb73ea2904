"""The control socket's path, and the process, user and group on its other side."""

from __future__ import annotations

import os
import pwd
import socket
import struct
from collections.abc import Mapping

MAX_SOCKET_PATH_BYTES = 107  # sun_path has 108 with its final zero
_CREDENTIALS = struct.Struct("iII")  # struct ucred of unix(7)


def default_socket(environ: Mapping[str, str] = os.environ) -> str:
    """Return the meeting place of engine, daemon and commands: $KVPREFETCHD_SOCKET, or a socket in $RUNTIME_DIRECTORY
    (systemd), $XDG_RUNTIME_DIR/kvprefetch or /run/kvprefetch."""
    if named := environ.get("KVPREFETCHD_SOCKET"):
        return named
    folder = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    if not folder:
        folder = os.path.join(environ.get("XDG_RUNTIME_DIR") or "/run", "kvprefetch")
    return os.path.join(folder, "kvprefetchd.sock")


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
