"""The connections of the control socket: bounds for each user, and the choice of the one that makes room for another.

Whoever may attach can open connections, say a hello whose engine never becomes complete, and leave unread what it is
handed.  Each of these costs the daemon descriptors, so each has a bound, and a bound that is reached costs the user who
uses most of it.  Connections of attached engines are never closed to make room.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import termios
from collections import Counter
from collections.abc import Callable

from ...shmring.wire.attach import Refused
from ..telemetry.logs import Log
from .access import Access, credentials_of
from .group import Peer

ACCEPTS = 16  # connections taken in one turn of the loop
MAX_WAITING = 256  # connections that belong to no attached engine: commands, strangers, incomplete engines
MAX_STRANGERS = 64  # of these, connections of users who may not attach, until they spoke and were told
# Processes of all attached engines of one user. Each costs the daemon up to five descriptors, and two in flight: from
# the message that carries them until the process reads it, they count against the daemon's user.
MAX_PROCESSES = 128
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connections:
    """Accepts connections on `sock` and closes them. `drop` takes a peer out of its group and closes it."""

    def __init__(
        self, sock: socket.socket, access: Access, log: Log, *, drop: Callable[[Peer], None],
        watch: Callable[[int], None], unwatch: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.sock, self.access = sock, access  # a reload may change the access
        sock.setblocking(False)  # accept() asks until none waits
        self._log, self._drop, self._watch, self._unwatch = log, drop, watch, unwatch
        self._peers: dict[int, Peer] = {}  # by descriptor, the oldest first
        self._unread: list[Peer] = []  # ended here, but descriptors that they were handed are still in flight
        self._paused = False

    def get(self, fd: int) -> Peer | None:
        return self._peers.get(fd)

    def accept(self) -> None:
        """Take the connections that wait, ACCEPTS at most."""
        for _ in range(ACCEPTS):
            try:
                sock, _ = self.sock.accept()
            except OSError as error:
                if error.errno in _NO_ROOM and not self._make_room(os.strerror(error.errno)):
                    self._unwatch(self.sock.fileno())  # it stays readable: without a pause the loop would spin
                    self._paused = True
                break
            sock.setblocking(False)
            credentials = credentials_of(sock)
            peer = Peer(sock, credentials, self.access.may_attach(credentials))
            if not peer.allowed and sum(not other.allowed for other in self._peers.values()) >= MAX_STRANGERS:
                sock.close()
                continue
            self._peers[sock.fileno()] = peer
            self._watch(sock.fileno())
        for _ in range(sum(peer.waiting for peer in self._peers.values()) - MAX_WAITING):
            self._make_room(f"too many connections that belong to no attached engine: max={MAX_WAITING}")

    def _make_room(self, error: str) -> bool:
        """Close the oldest waiting connection of the user who has most of them. False when none waits."""
        waiting = [peer for peer in self._peers.values() if peer.waiting]
        if not waiting:
            self._log.warning("peers.full", error=error)
            return False
        [(uid, _)] = Counter(peer.credentials.uid for peer in waiting).most_common(1)
        oldest = next(peer for peer in waiting if peer.credentials.uid == uid)
        self._log.warning("peers.full", error=error, pid=oldest.credentials.pid, uid=uid)
        oldest.tell(Refused(error=f"{error}; this was the oldest of uid={uid}", final=False))
        self._drop(oldest)
        return True

    def processes(self, uid: int) -> int:
        """Processes of one user that hold descriptors: those of attached engines, and those that did not read."""
        attached = sum(peer.credentials.uid == uid and not peer.waiting for peer in self._peers.values())
        return attached + sum(peer.credentials.uid == uid for peer in self._unread)

    def close(self, peer: Peer) -> None:
        """End a connection. The socket stays open while descriptors sent on it are unread, so that they are counted."""
        fd = peer.sock.fileno()
        if self._peers.pop(fd, None) is None:
            return
        self._unwatch(fd)
        if peer.handed and _unread_bytes(peer.sock):
            peer.sock.shutdown(socket.SHUT_RDWR)  # the process reads what is there, then the end of file
            self._unread.append(peer)
        else:
            peer.sock.close()

    def tick(self) -> None:
        """Listen again after a pause, and let go of what was read meanwhile. Called a few times a second."""
        if self._paused:
            self._paused = False
            self._watch(self.sock.fileno())
        for peer in [peer for peer in self._unread if not _unread_bytes(peer.sock)]:
            self._unread.remove(peer)
            peer.sock.close()

    def listen_on(self, sock: socket.socket, access: Access) -> None:
        """Accept connections on this socket from now on."""
        self._unwatch(self.sock.fileno())
        self.sock.close()
        self.sock, self.access, self._paused = sock, access, False
        self._watch(sock.fileno())

    def close_all(self) -> None:
        """End all connections, and listen no more."""
        for peer in list(self._peers.values()):
            self.close(peer)
        for peer in self._unread:
            peer.sock.close()
        self._unwatch(self.sock.fileno())
        self.sock.close()


def _unread_bytes(sock: socket.socket) -> int:
    """How much of what was sent the other side has not read; 0 once it is closed there (SIOCOUTQ)."""
    count = array.array("i", [0])
    fcntl.ioctl(sock, termios.TIOCOUTQ, count)
    return count[0]
