"""The connections of the control socket: accepted within bounds for each user, and closed.

A user who may attach can open connections, start engines that never become complete, and leave received descriptors
unread. Each of these costs the daemon descriptors, so each has a bound. Where a bound is reached, the user with the
most pays. A connection of an attached engine is never closed to make room.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import select
import socket
import termios
from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from typing import Literal

from ...shmring.wire.attach import Refused
from ..telemetry.logs import Log
from .access import Access, credentials_of
from .group import Peer
from .refusals import Refusals

ACCEPTS = 16  # connections accepted in one turn of the loop
MAX_WAITING = 256  # connections that belong to no attached engine: commands, strangers, incomplete engines
MAX_STRANGERS = 64  # of these, connections of users who may not attach; each is closed once it was refused
RESUMED = 4  # connections in one turn of the loop
# Processes of all attached engines of one user. Each costs the daemon up to five descriptors and two in flight: those
# count against the daemon's user from the message that carries them until the process reads it.
MAX_PROCESSES = 128
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Connections:
    """Accepts connections on `sock`; `epoll` watches them. `access` says which users may attach."""

    def __init__(self, sock: socket.socket, access: Access, epoll: select.epoll, log: Log, refusals: Refusals) -> None:
        self.sock, self.access, self._refusals = sock, access, refusals
        sock.setblocking(False)  # `accept` stops where none waits
        self._epoll, self._log = epoll, log
        self._peers: dict[int, Peer] = {}  # by descriptor, the oldest first
        self.asking: list[Peer] = []  # not looked at: their user's questions took too much time
        self._new_first = True
        self._unread: list[Peer] = []  # closed here, but descriptors sent to them are still in flight
        epoll.register(sock, select.EPOLLIN)

    def listen_on(self, sock: socket.socket, access: Access) -> None:
        """Accept on another socket from now on, and close the one before; connections stay."""
        self._epoll.unregister(self.sock)
        self.sock.close()
        self.sock, self.access = sock, access
        self._epoll.register(sock, select.EPOLLIN)

    def get(self, fd: int) -> Peer | None:
        return self._peers.get(fd)

    def accept(self) -> list[Peer]:
        """Accept waiting connections, at most ACCEPTS; return the peers that were closed to make room for them."""
        closed: list[Peer] = []
        for _ in range(ACCEPTS):
            try:
                sock, _ = self.sock.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    closed += self._make_room(os.strerror(error.errno))
                    if not closed:  # until the next tick: what nobody accepts stays readable
                        self._epoll.modify(self.sock, 0)
                break
            sock.setblocking(False)
            credentials = credentials_of(sock)
            peer = Peer(sock, credentials, self.access.may_attach(credentials))
            if not peer.allowed and sum(not other.allowed for other in self._peers.values()) >= MAX_STRANGERS:
                sock.close()
                continue
            self._peers[sock.fileno()] = peer
            self._epoll.register(sock, select.EPOLLIN)
        for _ in range(sum(peer.waiting for peer in self._peers.values()) - MAX_WAITING):
            closed += self._make_room(f"too many connections that belong to no attached engine: max={MAX_WAITING}")
        return closed

    def _make_room(self, error: str) -> list[Peer]:
        """Close and return the oldest waiting connection of the user who has most of them; none where none waits."""
        waiting = [peer for peer in self._peers.values() if peer.waiting]
        if not waiting:
            self._log.warning("peers.full", error=error)
            return []
        [(uid, _)] = Counter(peer.credentials.uid for peer in waiting).most_common(1)
        oldest = next(peer for peer in waiting if peer.credentials.uid == uid)
        self._log.warning("peers.full", error=error, pid=oldest.credentials.pid, uid=uid)
        oldest.send(Refused(error=f"{error}; this was the oldest of uid={uid}", final=False))
        self.close(oldest)
        return [oldest]

    def processes(self, uid: int) -> int:
        """Count the processes of one user that hold descriptors: of attached engines, and those that did not read."""
        attached = sum(peer.credentials.uid == uid and not peer.waiting for peer in self._peers.values())
        return attached + sum(peer.credentials.uid == uid for peer in self._unread)

    def refuse(
        self, peer: Peer, error: str, *, final: bool, ours: bool = False, forbidden: Literal[True] | None = None
    ) -> None:
        """Send a refusal; the caller closes the connection. With `final` asking again soon changes nothing.

        `ours`: as `Refusals.add` says.

        The log has one line for all processes of an engine, and for all their tries, until the reason changes.
        """
        pid, uid, _ = peer.credentials
        engine = peer.hello.engine_id if peer.hello is not None else ""
        if self._refusals.add(uid, pid, engine, error, ours=ours):
            if engine:
                self._log.error("engine.refused", engine=engine, pid=pid, uid=uid, error=error, final=final)
            else:
                self._log.warning("peer.refused", pid=pid, uid=uid, error=error, final=final)
        peer.send(Refused(error=error, final=final, forbidden=forbidden))

    def pause(self, peer: Peer) -> None:
        """Do not look at a connection until `resume`, unless its process hangs up."""
        self.asking.append(peer)
        self._epoll.modify(peer.sock, 0)

    def paused(self, peer: Peer) -> bool:
        return peer in self.asking

    def resume(self, may_ask: Callable[[int], bool]) -> bool:
        """Look again at some connections whose user `may_ask`; return whether others wait.

        In turns, as many come first that asked nothing yet as others; of these, those that waited longest.
        """
        allowed = sorted((each for each in self.asking if may_ask(each.credentials.uid)), key=lambda each: each.read_ns)
        new = [each for each in allowed if each.read_ns == 0]
        others = allowed[len(new) :]
        pairs = zip_longest(new, others) if self._new_first else zip_longest(others, new)
        self._new_first = not self._new_first
        for peer in [each for pair in pairs for each in pair if each is not None][:RESUMED]:
            self.asking.remove(peer)
            self._epoll.modify(peer.sock, select.EPOLLIN)
        return bool(self.asking)

    def close(self, peer: Peer) -> None:
        """End a connection. Its socket stays open while descriptors sent on it are unread, so that they are counted."""
        if self._peers.pop(peer.sock.fileno(), None) is None:
            return
        if peer in self.asking:
            self.asking.remove(peer)
        self._epoll.unregister(peer.sock)
        if peer.handed and _unread_bytes(peer.sock):
            peer.sock.shutdown(socket.SHUT_RDWR)  # the process reads the rest, then the end of file
            self._unread.append(peer)
        else:
            peer.sock.close()

    def tick(self) -> None:
        """Listen again after a pause, and close the sockets of descriptors that were read meanwhile."""
        self._epoll.modify(self.sock, select.EPOLLIN)
        for peer in [peer for peer in self._unread if not _unread_bytes(peer.sock)]:
            self._unread.remove(peer)
            peer.sock.close()

    def close_all(self) -> None:
        for peer in list(self._peers.values()):
            self.close(peer)
        for peer in self._unread:
            peer.sock.close()
        self.sock.close()


def _unread_bytes(sock: socket.socket) -> int:
    """Count the bytes sent that the other side has not read (SIOCOUTQ); 0 once it closed its end."""
    count = array.array("i", [0])
    fcntl.ioctl(sock, termios.TIOCOUTQ, count)
    return count[0]
