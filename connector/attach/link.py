"""The connection to the daemon: one thread per engine process that attaches, watches, and attaches again.

The engine's own threads only read `epoch` (one attribute) and never wait for this thread.  An error here is
logged, once per kind, and means for the engine that there is no daemon.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ...shmring.errors import SegmentCorrupt
from ...shmring.segment import Segment
from ...shmring.wire.attach import Absent, Attached, Hello, Notice, Refused, Reset, ResetDone, Stored
from ...shmring.wire.codec import receive_message, send_message
from ...shmring.wire.control_socket import DAEMON_USER, SYSTEM_SOCKET, Forbidden, FoundDaemon, Stranger, find, sockets
from ...shmring.wire.records import ProtocolError
from .epoch import SchedulerEpoch, WorkerEpoch

RETRY_S = 0.5
FINAL_RETRY_S = 10.0
BEAT_S = 1.0
# An engine without an epoch for so long logs the reason. The daemon may take some of it to reserve memory.
PATIENCE_S = 30.0
# Steps in a row without a name of an ended epoch before a worker forgets it: far more than vLLM has in flight, so one
# of them was built after the scheduler side saw the end.
FORGET_STEPS = 64
# Messages about saves that the scheduler side has not taken; it takes them with every step.
MAX_STORED = 4096
# Messages about absent blocks that it has not taken.
MAX_ABSENTS = 64

log = logging.getLogger("vllm.kvprefetch.link")


S = TypeVar("S", bound=SchedulerEpoch | WorkerEpoch)


class Link(Generic[S]):
    """Keeps a process attached; its thread asks for `hello` whenever it connects.

    `map_epoch` maps the memory that came with Attached and owns the descriptors.  With `keep_ended`, as in a worker,
    a load may name an ended epoch until steps or the scheduler's next hello show otherwise.  Without it, as in a
    scheduler, the log says once why there was no epoch for PATIENCE_S; workers wait for the scheduler in silence.
    The link's thread unmaps the memory of epochs that nobody uses any more.
    `path` names the socket; None looks for one each time (control_socket.py).  A process that waits for its epoch
    goes on to a daemon that comes first in that order, so that all processes of an engine meet at the same.
    Where no daemon listens, the thread calls `start` and tries again, but never to replace the system's.  `start` says
    (true) that one is starting.
    A daemon must run as root, as this process's user or as `daemon_user` (name or number).
    `epoch` is the current epoch or None, `confirmed_reset` the last reset that the daemon knows of in this epoch;
    `stored` collects the daemon's messages about saves, `absent` those about blocks that the store lost.
    """

    def __init__(
        self,
        path: str | None,
        hello: Callable[[], Hello],
        map_epoch: Callable[[Attached, Sequence[int]], S],
        *,
        keep_ended: bool = False,
        daemon_user: str | int = DAEMON_USER,
        start: Callable[[], object] | None = None,
    ) -> None:
        self.epoch: S | None = None
        self.confirmed_reset = 0
        self.stored: deque[Stored] = deque(maxlen=MAX_STORED)
        self.absent: deque[Absent] = deque(maxlen=MAX_ABSENTS)
        self.hello, self._map, self._keep_ended = hello, map_epoch, keep_ended
        self._named, self._path, self._served = path, "", ""  # where it connects now, and where it had an epoch
        self._alone_since, self._daemon_user, self._start = time.monotonic(), daemon_user, start
        self._sock: socket.socket | None = None
        self._stop = threading.Event()
        self._settled = threading.Event()  # it was attached, or no daemon will be there soon
        self._logged: set[str] = set()
        # Worker: every epoch that a load may still name; for ended ones, the steps in a row that have not named it.
        self._mapped: dict[int, S] = {}
        self.ended: dict[int, int] = {}
        self._lock = threading.Lock()
        self._segments: list[Segment] = []  # of epochs, until the thread has unmapped them
        self._thread = threading.Thread(target=self._run, name="kvprefetch-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Wait for the first epoch at an engine's start: PATIENCE_S at most, and only while there may soon be one."""
        self._settled.wait(PATIENCE_S)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the connection and the thread; waits at most a second."""
        self._stop.set()
        self._hang_up()
        if self.running:
            self._thread.join(1.0)

    def detach(self, epoch: S | None, reason: str) -> None:
        """Drop this epoch, because its memory cannot be right; if it is the current one, come back with another."""
        log.error("kvprefetch: detached from the daemon: %s", reason)
        if epoch is not None:
            epoch.ended()
        if epoch is self.epoch:
            self.epoch = None
            self._hang_up()

    # --- epochs a worker keeps mapped -------------------------------------------------------------------------------

    def mapped(self, number: int) -> S | None:
        """The epoch of this number, current or not yet retired."""
        return self._mapped.get(number)

    def keep(self, live_epochs: Sequence[int]) -> None:
        """A step's metadata names `live_epochs`. Forget the ended epochs that FORGET_STEPS steps have not named."""
        if not self.ended:
            return
        with self._lock:
            for number in list(self.ended):
                self.ended[number] = 0 if number in live_epochs else self.ended[number] + 1
                if self.ended[number] >= FORGET_STEPS:
                    self._forget(number)

    def _forget(self, number: int) -> None:
        self._mapped.pop(number, None)
        del self.ended[number]

    # --- reset ------------------------------------------------------------------------------------------------------

    def send_reset(self, generation: int, weights: str) -> bool:
        """Ask for a reset without waiting; False where no daemon takes it now. A hello also has the last one."""
        sock = self._sock
        if sock is None or self.epoch is None:
            return False
        try:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            if not poll.poll(0):  # it reads nothing, and the socket is full
                return False
            send_message(sock, Reset(reset_generation=generation, weights=weights))
        except (OSError, ValueError):  # ValueError: the thread has just closed it
            return False
        return True

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            wait_s = RETRY_S
            try:
                wait_s = self._attach()
            except (ProtocolError, SegmentCorrupt) as error:
                wait_s = FINAL_RETRY_S
                self._log_once("protocol", logging.ERROR, "kvprefetch: cannot talk to the daemon: %s", error)
            except Exception as error:
                self._log_once(type(error).__name__, logging.WARNING, "kvprefetch: connection failed: %s", error)
            finally:
                self._lost()
            if wait_s >= FINAL_RETRY_S:
                self._settled.set()
            self._unmap()
            self._stop.wait(wait_s)

    def _attach(self) -> float:
        """One connection from hello to its end; the seconds until the next attempt."""
        hello = self.hello()  # may read files: not while the daemon waits for it
        places = self._places()
        if self._served in places:  # its daemon comes back; another one would have other KV
            places = places[: places.index(self._served) + 1]
        found = find(places, self._daemon_user, BEAT_S)
        self._path = found.path
        for path, error in found.passed:
            if path == self._served and isinstance(error, Forbidden):
                self._served = ""  # the next places count again; a lack of rights may pass, as at the daemon's start
            if isinstance(error, Stranger):
                self._log_once(str(error), logging.ERROR, "kvprefetch: %s", error)
            elif found.sock is not None and not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                self._log_once(
                    path, logging.INFO, "kvprefetch: no daemon for this user at %s: %s", path, error.strerror
                )
        if (sock := found.sock) is None:
            return self._absent(found)
        try:
            send_message(sock, hello)
            self._sock = sock
            return self._watch(sock, hello)
        finally:
            self._sock = None
            sock.close()

    def _places(self) -> list[str]:
        return [self._named] if self._named is not None else sockets()

    def _absent(self, found: FoundDaemon) -> float:
        """No daemon answers: start one, or say why. The seconds until the next attempt."""
        own = found.path == self._places()[-1] or self._served != SYSTEM_SOCKET
        if self._start is not None and own and found.startable:
            if not self._start():
                self._settled.set()
            return RETRY_S
        self._settled.set()
        if isinstance(found.passed[-1][1], Stranger):
            return FINAL_RETRY_S
        text = "kvprefetch: no daemon at %s; the engine serves without it and looks again"
        where = ", ".join(
            f"{path} ({'of another user' if isinstance(error, Stranger) else error.strerror})"
            for path, error in found.passed
        )
        self._log_once("absent", logging.WARNING, text, where)
        return RETRY_S

    def _comes_later(self) -> bool:
        """Whether a daemon takes this user at a place before the one where this process waits."""
        places = self._places()
        if self._path not in places[1:]:
            return False
        sock = find(places[: places.index(self._path)], self._daemon_user, BEAT_S, ask=True).sock
        if sock is not None:
            sock.close()
        return sock is not None

    def _watch(self, sock: socket.socket, hello: Hello) -> float:
        while not self._stop.is_set():
            if (epoch := self.epoch) is not None:
                epoch.tick(time.monotonic_ns())
            self._unmap()
            try:
                received = receive_message(sock, max_fds=2)
            except TimeoutError:
                self._log_no_epoch("it has not answered our hello; `kvprefetchd status` shows why")
                if self.epoch is None and self._comes_later():
                    break
                continue
            if received is None:
                self._log_no_epoch("it ended the connection without an answer; its log may say why")
                break
            message, fds = received
            if isinstance(message, Attached):
                if hello.scheduler is not None:
                    self.confirmed_reset = hello.scheduler.reset_generation
                self._attached(sock, message, fds)
                continue
            for fd in fds:
                socket.close(fd)
            if isinstance(message, ResetDone):
                self.confirmed_reset = max(self.confirmed_reset, message.reset_generation)
            elif isinstance(message, Stored):
                self.stored.append(message)
            elif isinstance(message, Absent):
                self.absent.append(message)
            elif isinstance(message, Notice):
                self._logged.add("alone")  # this says more
                log.warning("kvprefetch: %s", message.text)
            elif isinstance(message, Refused):
                level = logging.ERROR if message.final else logging.INFO
                self._log_once(f"refused {message.error}", level, "kvprefetch: the daemon refused: %s", message.error)
                self._log_no_epoch(f"it refused: {message.error}")
                if message.forbidden:
                    self._served = ""
                return FINAL_RETRY_S if message.final else RETRY_S
            else:
                raise ProtocolError(f"message is not expected here: type={message.type}")
        return RETRY_S

    def _attached(self, sock: socket.socket, message: Attached, fds: Sequence[int]) -> None:
        epoch = self._map(message, fds)
        self._segments.append(epoch.segment)
        epoch.tick(time.monotonic_ns())
        if self._keep_ended:
            with self._lock:
                self._mapped[epoch.number] = epoch
                for number in self.ended.keys() - set(message.live_epochs):
                    self._forget(number)
        self.epoch = epoch
        send_message(sock, epoch.mapped())
        self._logged.clear()
        self._settled.set()
        self._served = self._path
        text = "kvprefetch: attached to the daemon at %s: epoch=%d slots=%d"
        log.info(text, self._path, message.epoch, message.slot_count)

    def _lost(self) -> None:
        """The connection is over: nothing new may start on its epoch."""
        with self._lock:
            for number in self._mapped:
                self.ended.setdefault(number, 0)
        epoch, self.epoch = self.epoch, None
        if epoch is not None:
            self._alone_since = time.monotonic()
            epoch.ended()
            if not self._stop.is_set():
                # The daemon ended, or another process of this engine did, as at every shutdown.
                log.info("kvprefetch: the attachment has ended: epoch=%d; requests are recomputed", epoch.number)

    def _unmap(self) -> None:
        """Unmap memory without an epoch, on this thread: in the engine's step it would cost 50 ms per GiB."""
        live = self.epoch.segment if self.epoch is not None else None  # closing it would empty its page tables
        self._segments = [each for each in self._segments if each is live or not each.close()]

    def _hang_up(self) -> None:
        if (sock := self._sock) is not None:
            with contextlib.suppress(OSError):  # it ended by itself
                sock.shutdown(socket.SHUT_RDWR)

    def _log_no_epoch(self, why: str) -> None:
        """Log once that a daemon is there but does not attach this engine."""
        alone_s = time.monotonic() - self._alone_since
        if not self._keep_ended and self.epoch is None and alone_s >= PATIENCE_S:
            text = "kvprefetch: not attached for %.0f s to the daemon at %s: %s. The engine serves without it"
            self._log_once("alone", logging.WARNING, text, alone_s, self._path, why)

    def _log_once(self, kind: str, level: int, text: str, *values: object) -> None:
        """Log once per kind until the next attachment."""
        if kind not in self._logged:
            self._logged.add(kind)
            log.log(level, text, *values)
