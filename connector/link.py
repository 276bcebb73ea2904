"""The connection to the daemon: one thread per engine process that attaches, watches, and attaches again.

The engine's own threads only read `session` (one attribute) and never wait for this one, except for a reset.  Whatever
goes wrong here is logged, once per kind, and means for the engine that there is no daemon.
"""

from __future__ import annotations

import logging
import os
import pwd
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from ..shmring.errors import SegmentCorrupt
from ..shmring.segment import Segment
from ..shmring.wire.attach import Attached, Hello, Mapped, Notice, Refused, Reset, ResetDone, Stored
from ..shmring.wire.codec import receive_message, send_message
from ..shmring.wire.control_socket import peer_of
from ..shmring.wire.records import ProtocolError

RETRY_S = 0.5
FINAL_RETRY_S = 10.0
BEAT_S = 1.0
# How long an engine may be without a session before its log says why. The daemon may take some of it to reserve memory.
PATIENCE_S = 30.0
# Steps in a row that do not name an ended epoch before a worker forgets it: far more than vLLM has in flight, so one of
# them was built after the scheduler side saw the end.
FORGET_STEPS = 64
# Messages about saves that the scheduler has not taken; an engine takes them with every step.
MAX_STORED = 4096

log = logging.getLogger("vllm.kvprefetch.link")


class Session(Protocol):
    """What the link needs of a mapped epoch."""

    @property
    def epoch(self) -> int: ...
    @property
    def segment(self) -> Segment: ...
    def mapped(self) -> Mapped: ...
    def beat(self, now_ns: int) -> None: ...
    def ended(self) -> None: ...


S = TypeVar("S", bound=Session)


class Link(Generic[S]):
    """Keeps a process attached. `hello` is asked for on the link's own thread, whenever it connects.

    `map_session` maps what came with Attached and owns the descriptors.  With `keep_ended` a load may still name an
    ended epoch, until steps or the scheduler's next hello say otherwise: so it is in a worker.  Without it the log says
    once why there has been no session for PATIENCE_S; workers wait for the scheduler as long as the engine starts.
    The memory of a session that nobody uses any more is unmapped on the link's thread.
    Only a daemon of root, of this process's user or of `daemon_user` (name or number) is spoken to.
    `session` is the current epoch or None.  `confirmed_reset` is the highest reset generation the daemon confirmed.
    `stored` collects what the daemon said about saves.
    """

    def __init__(
        self, path: str, hello: Callable[[], Hello], map_session: Callable[[Attached, Sequence[int]], S],
        *, keep_ended: bool = False, daemon_user: str | int = 0,
    ) -> None:  # fmt: skip
        self.session: S | None = None
        self.confirmed_reset = 0
        self.stored: deque[Stored] = deque(maxlen=MAX_STORED)
        self._path, self._hello, self._map, self._keep_ended = path, hello, map_session, keep_ended
        self._apart_since, self._daemon_user = time.monotonic(), daemon_user
        self._sock: socket.socket | None = None
        self._stop = threading.Event()
        self._said: set[str] = set()
        self._replied = threading.Event()
        self._reply: ResetDone | None = None
        # Worker: every epoch a load may still name; for ended ones, how many steps in a row have not named it.
        self._mapped: dict[int, S] = {}
        self._ended: dict[int, int] = {}
        self._lock = threading.Lock()
        self._segments: list[Segment] = []  # of the sessions that were mapped, until this thread has unmapped them
        self._thread = threading.Thread(target=self._run, name="kvprefetch-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the connection and the thread; waits at most a second."""
        self._stop.set()
        self._hang_up()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def detach(self, reason: str) -> None:
        """What stands in the current session's memory cannot be true: drop it, and come back with a new epoch."""
        log.error("kvprefetch: detached from the daemon: %s", reason)
        session, self.session = self.session, None
        if session is not None:
            session.ended()
        self._hang_up()

    # --- epochs a worker keeps mapped -------------------------------------------------------------------------------

    def mapped(self, epoch: int) -> S | None:
        """The session of this epoch, current or not yet retired."""
        return self._mapped.get(epoch)

    def keep(self, live_epochs: Sequence[int]) -> None:
        """A step's metadata names `live_epochs`. Forget the ended epochs that FORGET_STEPS steps have not named."""
        if not self._ended:
            return
        with self._lock:
            for epoch in list(self._ended):
                self._ended[epoch] = 0 if epoch in live_epochs else self._ended[epoch] + 1
                if self._ended[epoch] >= FORGET_STEPS:
                    self._forget(epoch)

    def _forget(self, epoch: int) -> None:
        self._mapped.pop(epoch, None)
        del self._ended[epoch]

    # --- reset ------------------------------------------------------------------------------------------------------

    def send_reset(self, generation: int, timeout_ms: int) -> bool:
        """Ask for a reset without waiting; False when there is no daemon to ask."""
        sock = self._sock
        if sock is None or self.session is None:
            return False
        try:
            send_message(sock, Reset(reset_generation=generation, timeout_ms=timeout_ms))
        except OSError:
            return False
        return True

    def request_reset(self, generation: int, timeout_ms: int) -> bool:
        """Ask for a reset and wait up to `timeout_ms`; True only when the daemon confirmed this generation."""
        self._replied.clear()
        if not self.send_reset(generation, timeout_ms):
            return False
        deadline = time.monotonic() + timeout_ms / 1e3
        while self._replied.wait(max(0.0, deadline - time.monotonic())):
            self._replied.clear()
            if self.session is None or (self._reply is not None and self._reply.reset_generation >= generation):
                break
        return self.confirmed_reset >= generation

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            wait_s = RETRY_S
            try:
                wait_s = self._attach()
            except (ProtocolError, SegmentCorrupt) as error:
                wait_s = FINAL_RETRY_S
                self._say("protocol", logging.ERROR, "kvprefetch: cannot talk to the daemon: %s", error)
            except Exception as error:
                self._say(type(error).__name__, logging.WARNING, "kvprefetch: connection failed: %s", error)
            finally:
                self._lost()
            self._unmap()
            self._stop.wait(wait_s)

    def _attach(self) -> float:
        """One connection from hello to its end; the seconds until the next attempt."""
        hello = self._hello()  # may read files: not while the daemon waits for it
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(BEAT_S)
            try:
                sock.connect(self._path)
            except OSError as error:
                self._say(
                    "absent", logging.WARNING,
                    "kvprefetch: no daemon at %s (%s); the engine serves without it and looks again",
                    self._path, error.strerror or error,
                )  # fmt: skip
                return RETRY_S
            if (uid := peer_of(sock)[1]) not in (0, os.geteuid(), _uid(self._daemon_user)):
                self._say(
                    "stranger", logging.ERROR,
                    "kvprefetch: daemon_user=%r does not run what listens at %s: uid=%d is neither root nor this "
                    "engine's user, nothing is shared with it; if it is to be trusted, name its user in daemon_user",
                    self._daemon_user, self._path, uid,
                )  # fmt: skip
                return FINAL_RETRY_S
            send_message(sock, hello)
            self._sock = sock
            return self._watch(sock)
        finally:
            self._sock = None
            sock.close()

    def _watch(self, sock: socket.socket) -> float:
        while not self._stop.is_set():
            if (session := self.session) is not None:
                session.beat(time.monotonic_ns())
            self._unmap()
            try:
                received = receive_message(sock, max_fds=2)
            except TimeoutError:
                self._apart("it has not answered this engine's hello; `kvprefetchd status` shows whether it hangs")
                continue
            if received is None:
                self._apart("it ended the connection without an answer; its log may say why")
                break
            message, fds = received
            if isinstance(message, Attached):
                self._attached(sock, message, fds)
                continue
            for fd in fds:
                socket.close(fd)
            if isinstance(message, ResetDone):
                if message.ok:
                    self.confirmed_reset = max(self.confirmed_reset, message.reset_generation)
                self._reply = message
                self._replied.set()
            elif isinstance(message, Stored):
                self.stored.append(message)
            elif isinstance(message, Notice):
                self._said.add("apart")  # this says more
                log.warning("kvprefetch: %s", message.text)
            elif isinstance(message, Refused):
                level = logging.ERROR if message.final else logging.INFO
                self._say(f"refused {message.error}", level, "kvprefetch: the daemon refused: %s", message.error)
                self._apart(f"it refused: {message.error}")
                return FINAL_RETRY_S if message.final else RETRY_S
            else:
                raise ProtocolError(f"message is not expected here: type={message.type}")
        return RETRY_S

    def _attached(self, sock: socket.socket, message: Attached, fds: Sequence[int]) -> None:
        session = self._map(message, fds)
        self._segments.append(session.segment)
        session.beat(time.monotonic_ns())
        if self._keep_ended:
            with self._lock:
                self._mapped[session.epoch] = session
                for epoch in self._ended.keys() - set(message.live_epochs):
                    self._forget(epoch)
        self.session = session
        send_message(sock, session.mapped())
        self._said.clear()
        log.info("kvprefetch: attached to the daemon: epoch=%d slots=%d", message.epoch, message.slot_count)

    def _lost(self) -> None:
        """The connection is over: nobody may start anything on its epoch."""
        session, self.session = self.session, None
        self._replied.set()
        if session is not None:
            self._apart_since = time.monotonic()
            session.ended()
            if not self._stop.is_set():
                # By the daemon's end, or that of another process of this engine, as at every shutdown.
                log.info("kvprefetch: the session has ended: epoch=%d; requests are recomputed", session.epoch)
        with self._lock:
            for epoch in self._mapped:
                self._ended.setdefault(epoch, 0)

    def _unmap(self) -> None:
        """Unmap what no session stands on: here, because in the engine's step it would cost 50 ms per GiB."""
        if len(self._segments) > (self.session is not None):
            self._segments = [segment for segment in self._segments if not segment.close()]

    def _hang_up(self) -> None:
        sock = self._sock
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it ended by itself

    def _apart(self, why: str) -> None:
        """A daemon is there, and no session comes of it: without this line nobody would know."""
        apart_s = time.monotonic() - self._apart_since
        if not self._keep_ended and self.session is None and apart_s >= PATIENCE_S:
            self._say(
                "apart", logging.WARNING,
                "kvprefetch: not attached for %.0f s to the daemon at %s: %s. The engine serves without it",
                apart_s, self._path, why,
            )  # fmt: skip

    def _say(self, kind: str, level: int, text: str, *values: object) -> None:
        """Log once per kind until the next attachment."""
        if kind not in self._said:
            self._said.add(kind)
            log.log(level, text, *values)


def _uid(user: str | int) -> int | None:
    """Number of a user given by name or number; None for a name that this machine does not know."""
    try:
        return user if isinstance(user, int) else pwd.getpwnam(user).pw_uid
    except KeyError:
        return None
