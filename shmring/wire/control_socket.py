"""Where the control socket lies, and which process, user and group is on its other side."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping

MAX_SOCKET_PATH_BYTES = 107  # sun_path has 108, one of them the final zero
_CREDENTIALS = struct.Struct("iII")  # struct ucred of unix(7)


def default_socket(environ: Mapping[str, str] = os.environ) -> str:
    """Where daemon and engines meet: $RUNTIME_DIRECTORY (systemd), $XDG_RUNTIME_DIR/kvprefetch or /run/kvprefetch."""
    if runtime := environ.get("RUNTIME_DIRECTORY"):
        return os.path.join(runtime.split(":")[0], "kvprefetchd.sock")
    if session := environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(session, "kvprefetch", "kvprefetchd.sock")
    return "/run/kvprefetch/kvprefetchd.sock"


def check_socket_path(value: object) -> object:
    """The value of a `socket` key, whatever its type. ValueError for a path that no Unix socket can have."""
    if isinstance(value, (str, os.PathLike)):
        path = os.fsencode(value)
        if not 1 <= len(path) <= MAX_SOCKET_PATH_BYTES or b"\0" in path:
            raise ValueError(f"should have 1 to {MAX_SOCKET_PATH_BYTES} bytes, none of them zero")
    return value


def peer_of(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group id of the other side: of a connection when it was made, of its listener's when bound."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid
