"""The sockets of the HTTP door, which listen from the start, and its process, which begins with the first connection.

The process parses, hashes and waits for the daemon, as an operator on the control socket, so nothing that a caller
sends costs the main loop more than one message.  An end of the process costs the callers of that moment an answer: the
sockets stay, and the next connection begins another one.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import select
import socket
import subprocess
import sys
from pathlib import Path

from ..config.model import ConfigError, DaemonConfig, Taken
from ..telemetry.logs import Log
from .listener import BRIEFLY_S, is_at, listen, take_away

MEMORY_BYTES = 256 << 20  # of its process, with bodies of many callers in work
PAUSE_NS = 1_000_000_000  # between two starts
LOOPBACK = "127.0.0.1"


class DoorSockets:
    """Owns the listening sockets; `epoll` watches them while no process serves them.

    Raises ConfigError for a bad port, Taken for one in use.  Without its Unix socket the door is closed, and the daemon
    serves on.
    """

    def __init__(self, config: DaemonConfig, epoll: select.epoll, log: Log) -> None:
        self._config, self._epoll, self._log = config, epoll, log
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets: list[socket.socket] = []
        self._bound: os.stat_result | None = None
        self._watched, self._begun_ns = True, 0
        if config.door == "off":
            return
        try:
            self._sockets = [listen(config, path=config.door_socket, kind=socket.SOCK_STREAM)]
            self._bound = config.door_socket.stat()
            if config.door_port:
                self._sockets.append(_listen_on(config.door_port))
        except (ConfigError, OSError) as error:
            self.close()
            if config.door_port:
                raise
            log.warning("door.closed", error=f"{error}: socket={str(config.door_socket)!r}")
        self._watch()

    def ready(self, fds: list[int], now_ns: int) -> None:
        """Begin the process where one of these descriptors is a socket of the door's."""
        if self._process is not None or not any(each.fileno() in fds for each in self._sockets):
            return
        for each in self._sockets:
            self._epoll.unregister(each)
        passed = [each.fileno() for each in self._sockets]
        token = os.fspath(self._config.door_token) if self._config.door_token is not None else ""
        words = [os.fspath(self._config.socket), token, *map(str, passed)]
        try:
            # Its standard input ends with this process, and then it ends, too.  A folder of the current directory
            # could hide the package from -m.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvprefetch.daemon.door", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=passed,
                cwd="/",
                # Else each thread keeps the memory of a large body that it freed (mallopt(3)).
                env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
            )
        except OSError as error:
            self._log.warning("door.failed", error=f"its process cannot be started: {error}")
        self._watched, self._begun_ns = False, now_ns

    def tick(self, now_ns: int) -> None:
        """Watch the sockets again once the process has ended; called several times a second."""
        status = None if self._process is None else self._process.poll()
        if self._watched or (self._process is not None and status is None) or now_ns < self._begun_ns + PAUSE_NS:
            return
        if status is not None:
            self._log.warning("door.failed", error=f"its process ended: status={status}")
        self._end()
        self._watch()

    @property
    def untaken_bytes(self) -> int:
        """How much of MEMORY_BYTES the process has not taken; 0 for a door that is closed."""
        taken = 0
        if self._process is not None:
            with contextlib.suppress(OSError, ValueError, IndexError):  # it ends just now
                taken = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
        return max(0, MEMORY_BYTES - taken) if self._sockets else 0

    @property
    def there(self) -> bool:
        """Whether the file of its Unix socket is there; a door that is closed misses none."""
        return self._bound is None or is_at(self._config.door_socket, self._bound)

    def listen_anew(self) -> None:
        """Replace the Unix socket, and end the process that serves the one before. Raises ConfigError, OSError."""
        sock = listen(self._config, BRIEFLY_S, path=self._config.door_socket, kind=socket.SOCK_STREAM)
        self._bound = self._config.door_socket.stat()
        self._end()
        for each in self._sockets if self._watched else ():
            self._epoll.unregister(each)
        self._sockets[0].close()
        self._sockets[0] = sock
        self._watch()

    def _watch(self) -> None:
        self._watched = True
        for each in self._sockets:
            self._epoll.register(each, select.EPOLLIN)

    def _end(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self._end()
        if self._bound is not None:
            take_away(self._config.door_socket, self._bound)
        for each in self._sockets:
            each.close()
        self._sockets = []


def _listen_on(port: int) -> socket.socket:
    try:
        sock = socket.create_server((LOOPBACK, port), backlog=128)
    except OSError as error:
        kind = Taken if error.errno == errno.EADDRINUSE else ConfigError
        why = f"{os.strerror(error.errno or 0)}: door_port={port}; another one, or 0 for none"
        raise kind(f"door_port: cannot be bound: {why}") from None
    sock.setblocking(False)
    return sock
