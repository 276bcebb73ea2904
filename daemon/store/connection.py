"""The connection to a Mooncake cluster: opened once, guarded for every call, closed behind the last one.

A call into Mooncake before `setup` or after `close` is a segmentation fault.  So every call passes `_local`, which
counts the calls in flight under a lock and admits none unless the connection is open.  A call that asks the master
passes `_call` too, which the circuit breaker guards (breaker.py): only a call in which *every* key failed transiently
counts against the breaker.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from . import addresses, window
from .breaker import Attempt, Breaker
from .errors import StoreUnavailable
from .joining import Joined, join
from .settings import MooncakeSettings

QUIET_S = 10.0  # without a call; then a question says whether the master is still there
_CLOSE_WAIT_S = 65.0  # after its peer's death a transfer waits 60 s inside Mooncake, and nothing shortens it
_abandoned: list[Joined] = []  # clients that were never closed: their destructors would close them, and wait for it


class Connection:
    """One Mooncake client and its guards. Any thread may call; Mooncake releases the GIL inside its calls."""

    def __init__(self, settings: MooncakeSettings, log: Any, clock: Callable[[], float], rpc_timeout_ms: int) -> None:
        self._settings, self._log, self._rpc_timeout_ms = settings, log, rpc_timeout_ms
        self._client: Any = None
        self._joined = Joined(None)
        self._port: socket.socket | None = None  # bound, so that no other client here gets the port of our name
        self._state = threading.Condition()
        self.is_open = False
        self._in_flight = 0
        self._under_way = False  # Mooncake gave up a transfer that may still go on
        self._breaker = Breaker(clock)
        # Whether a call is worth making: the store is open, and its last call did not fail as a whole.
        self.answering = False

    def open(self) -> None:
        """Join the cluster, once. Raises StoreError.

        Holds the GIL for 0.05 to 0.2 s, and for `rpc_timeout_ms` where the master accepts and then says nothing.
        """
        if self._port is None:
            self._port = socket.socket()
            self._port.bind(("", 0))
        joined = join(self._settings, self._port.getsockname()[1], self._rpc_timeout_ms, self._log)
        self.adopt(joined)
        protocol = self._settings.protocol
        if addresses.without_rdma(protocol):
            self._log.warning("rdma.absent", protocol=protocol)
        if untried := window.untried(window.installed()):
            self._log.warning("mooncake.untried", error=untried)
        if joined.why:
            self._log.warning("reads.blocking", error=joined.why)
        reads = "sleeping" if joined.sleeping else "blocking"
        self._log.info("store.opened", master=self._settings.master_server_address, protocol=protocol, reads=reads)

    def adopt(self, joined: Joined) -> None:
        """Admit calls, to a client that has joined."""
        with self._state:
            self._joined, self._client, self.is_open = joined, joined.client, True
            self.answering = self._breaker.closed

    def close(self, *, goodbye: bool = True) -> None:
        """Refuse new calls, wait for those in flight, then leave the cluster; may hold the GIL for 2 s. Idempotent.

        Closing the client under a call (in flight after 65 s) or a transfer (perhaps still under way) would crash the
        process; the client then stays until the process ends.  So it does without `goodbye`, for a process that ends
        with its master, and in a cluster of several masters, where leaving takes up to 31 s.
        """
        goodbye = goodbye and addresses.elected(self._settings.master_server_address) is None
        with self._state:
            was_open, self.is_open, self.answering = self.is_open, False, False
            idle = self._state.wait_for(lambda: self._in_flight == 0, _CLOSE_WAIT_S)
        if was_open and idle and goodbye and not self._under_way:
            self._client.close()
        elif was_open:
            _abandoned.append(self._joined)
        if self._port is not None:
            self._port.close()
        if was_open:
            self._log.info("store.closed", in_flight=self._in_flight)

    @property
    def due_for_probe(self) -> bool:
        """Whether it is time to ask a store that failed whether it is back, or one that nobody asked for a while."""
        return self.is_open and (self._breaker.due or (self._breaker.closed and self._breaker.quiet_s >= QUIET_S))

    def suspect(self, what: str) -> None:
        """Open the breaker, as a failed call does: a question to the master is past its deadline."""
        with contextlib.suppress(StoreUnavailable):
            self._verdict(None, True, what)

    @contextlib.contextmanager
    def _local(self) -> Iterator[Any]:
        """Yield the client, for one call that needs no other process. Raises StoreUnavailable when it is not open."""
        with self._state:
            if not self.is_open:
                raise StoreUnavailable("the store is not open")
            self._in_flight += 1
        try:
            yield self._client
        finally:
            with self._state:
                self._in_flight -= 1
                self._state.notify_all()

    @contextlib.contextmanager
    def _call(self) -> Iterator[tuple[Any, Attempt]]:
        """Yield the client and the breaker's attempt, for one call. Raises StoreUnavailable."""
        attempt = self._breaker.begin()
        if attempt is None:
            raise StoreUnavailable("the store failed, and is tried again soon")
        try:
            with self._local() as client:
                yield client, attempt
        finally:
            self._breaker.end(attempt)

    def _verdict(self, attempt: Attempt | None, failed: bool, what: str, code: int = 0) -> None:
        """Report a call's outcome to the breaker. Raises StoreUnavailable after one that failed."""
        if failed:
            pause_s = self._breaker.failed(attempt)
            self._note_answering()
            self._log.warning("store.failed", call=what, code=code, pause_s=pause_s)
            raise StoreUnavailable(f"{what} failed with code {code}")
        if self._breaker.worked():
            self._note_answering()
            self._log.info("store.recovered", call=what)

    def _note_answering(self) -> None:
        """Follow each turn of the breaker, so that the last one to look has seen the last turn."""
        with self._state:
            self.answering = self.is_open and self._breaker.closed
