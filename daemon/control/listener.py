"""The control socket while the daemon serves: when its file goes, a new socket is bound in its place."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

from ..config.model import ConfigError, DaemonConfig
from ..telemetry.logs import Log
from .access import listen, take_away

LOST_NS = 3_000_000_000
FIRST_FD = 3  # SD_LISTEN_FDS_START of sd_listen_fds(3)


class Listener:
    """`sock`, which systemd opened or which is bound here, at `path`. Raises ConfigError when it cannot be bound."""

    def __init__(self, config: DaemonConfig, log: Log) -> None:
        inherited = inherited_socket()
        self._config, self._log = config, log
        self.sock: socket.socket = inherited if inherited is not None else listen(config)
        self.path: str = self.sock.getsockname()
        self._bound = os.stat(self.path) if inherited is None else None  # else it is the socket unit's
        self._gone_ns = 0
        self._said = ""

    def look(self, now_ns: int) -> bool:
        """Called once a second; True: `sock` is a new one, for the file had been gone for LOST_NS.

        Who attached notices nothing either way. Where another daemon listens now nothing is taken from it.
        """
        if self._bound is None:
            return False
        try:
            if os.path.samestat(os.stat(self.path), self._bound):
                self._gone_ns, self._said = 0, ""
                return False
        except FileNotFoundError:
            pass
        except OSError:  # not ours to see any more, and perhaps still there
            return False
        self._gone_ns = self._gone_ns or now_ns
        if now_ns - self._gone_ns < LOST_NS:
            return False
        try:
            self.sock = listen(self._config, patience_s=0)
        except ConfigError as error:
            self._gone_ns = now_ns  # not every second: it may be another daemon that is asked
            if str(error) != self._said:
                self._said = str(error)
                self._log.warning("socket.lost", error=self._said)
            return False
        self._gone_ns = 0
        with contextlib.suppress(OSError):  # gone again, which the next look sees
            self._bound = os.stat(self.path)
        self._log.warning("socket.renewed", socket=self.path)
        return True

    def close(self) -> None:
        if self._bound is not None:
            take_away(self._config.socket, self._bound)
        self.sock.close()


def inherited_socket(environ: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """The control socket that a socket unit opened, or None. Raises ConfigError when it is not of the right kind."""
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit() or int(count) == 0:
        return None
    if count != "1":
        raise ConfigError(f"one socket is wanted of the socket unit: LISTEN_FDS={count}")
    try:
        sock = socket.socket(fileno=FIRST_FD)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"the socket unit's descriptor is no socket: {error.strerror}: fd={FIRST_FD}") from None
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET or not listens:
        raise ConfigError(
            f"the socket unit must have ListenSequentialPacket= with a path: family={sock.family.name} "
            f"type={sock.type.name}"
        )
    os.set_inheritable(FIRST_FD, False)
    sock.setblocking(False)
    return sock
