"""The Mooncake client: guards its calls, maps its codes, fails fast when the store is away.

A call into Mooncake before `setup` or after `close` is a segmentation fault, so every call passes `Store._call`,
which counts the calls in flight under a lock and admits none unless the store is open. Codes are per key, so
`classify` maps them in one place, and only a call in which *every* key failed transiently counts against the breaker
(breaker.py).
Bytes of a removed object stay in the files of a disk tier, to be found at the next start: see `Store.remove_matching`.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from . import addresses
from .breaker import Attempt, Breaker
from .buckets import Removal, patterns, purge
from .errors import ErrorClass, classify, classify_get
from .give_up import UNDER_WAY, Move, move
from .joining import StoreError as StoreError
from .joining import join
from .puts import Puts
from .replicas import ReplicaReader, void_what_moved
from .settings import MooncakeSettings
from .storage_nodes import Get, StorageNodes
from .zeros import holed

Medium = Literal["memory", "disk"]

_REMEMBERED_KEYS = 65_536  # what `remove_matching` re-checks by name and `flush` waits for
_CLOSE_WAIT_S = 65.0  # a transfer whose peer died waits 60 s inside Mooncake, and nothing shortens it
_left: list[Any] = []  # clients that said no goodbye: their destructors would, and wait for it


class StoreUnavailable(Exception):
    """A whole call failed for a passing reason, the breaker is open, or the store is not open."""


class Store:
    """One Mooncake client. Calls may come from several threads at once; Mooncake releases the GIL inside them.

    `log` is a bound structlog logger. `rpc_timeout_ms` bounds one question to the master, not a transfer.
    """

    def __init__(
        self, settings: MooncakeSettings, log: Any, *, clock: Callable[[], float] = time.monotonic,
        rpc_timeout_ms: int = 2000,
    ) -> None:  # fmt: skip
        self._settings, self._log, self._clock, self._rpc_timeout_ms = settings, log, clock, rpc_timeout_ms
        self._client: Any = None
        self._named: socket.socket | None = None  # holds the port in our name, so that no other client has it
        self._state = threading.Condition()
        self._open = False
        self._in_flight = 0
        self._under_way = False  # a transfer that Mooncake gave up may still go on
        self._breaker = Breaker(clock)
        self._nodes = StorageNodes(log, clock)
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._unflushed: OrderedDict[str, None] = OrderedDict()
        self._puts = Puts()
        self.disk = Path(settings.ssd_offload_path) if settings.enable_ssd_offload else None  # this process's own tier
        self._replicas = ReplicaReader(settings.private)
        heartbeat_s = float(os.environ.get("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "10"))
        self._settle_s = 2 * heartbeat_s + 0.5 if self.disk else 0.0  # how long a removal looks on (remove_matching)
        # How long a removal takes at least; half a second is for the calls.
        self.removal_ms = min(600_000, int(1e3 * (self._settle_s + 0.5))) if self.disk else 0

    def open(self) -> None:
        """Join the cluster. Raises StoreError.

        Holds the GIL for 0.05 to 0.2 s, and for `rpc_timeout_ms` where the master accepts and then says nothing.
        """
        with self._state:
            if self._client is not None:
                raise StoreError("the store was opened before; a Store is opened once")
        if self._named is None:
            self._named = socket.socket()
            self._named.bind(("", 0))
        client = join(self._settings, self._named.getsockname()[1], self._rpc_timeout_ms, self._log)
        with self._state:
            self._client, self._open = client, True
        protocol = self._settings.protocol
        if addresses.without_rdma(protocol):
            self._log.warning("rdma.absent", protocol=protocol)
        self._log.info("store.opened", master=self._settings.master_server_address, protocol=protocol)

    def close(self, *, goodbye: bool = True) -> None:
        """Refuse new calls, wait for those in flight, then leave the cluster; may hold the GIL for 2 s. Idempotent.

        A call still in flight after 65 s, or a transfer that may still be under way, would crash the process if the
        client went away under it; the client is then left as it is, for the end of the process. So it is without
        `goodbye`, which a process that ends with its master does not say, nor one where several masters are: it would
        take up to 31 s.
        """
        goodbye = goodbye and addresses.elected(self._settings.master_server_address) is None
        with self._state:
            was_open, self._open = self._open, False
            idle = self._state.wait_for(lambda: self._in_flight == 0, _CLOSE_WAIT_S)
        if was_open and idle and goodbye and not self._under_way:
            self._client.close()
        elif was_open:
            _left.append(self._client)
        if self._named is not None:
            self._named.close()
        if was_open:
            self._log.info("store.closed", in_flight=self._in_flight)

    @contextlib.contextmanager
    def _local(self) -> Iterator[Any]:
        """The client, for one call that needs no other process. Raises StoreUnavailable when there is none."""
        with self._state:
            if not self._open:
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
        """The client for one call, and the attempt that it is. Raises StoreUnavailable: none, or breaker open."""
        attempt = self._breaker.begin()
        if attempt is None:
            raise StoreUnavailable(f"the store failed; next try in {self._breaker.wait_s:.1f} s")
        try:
            with self._local() as client:
                yield client, attempt
        finally:
            self._breaker.end(attempt)

    def _verdict(self, attempt: Attempt | None, failed: bool, what: str, code: int = 0) -> None:
        """Tell the breaker what became of a call. Raises StoreUnavailable after one that failed."""
        if failed:
            pause_s = self._breaker.failed(attempt)
            self._log.warning("store.failed", call=what, code=code, pause_s=pause_s)
            raise StoreUnavailable(f"{what} failed with code {code}")
        if self._breaker.worked():
            self._log.info("store.recovered", call=what)

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def answering(self) -> bool:
        """Whether a call is worth making: the store is open, and its last call did not fail as a whole."""
        return self._open and self._breaker.closed

    @property
    def due_for_probe(self) -> bool:
        """Whether it is time to ask a store that failed whether it is back."""
        return self._open and self._breaker.due

    def probe(self) -> None:
        """Ask the master anything, so that no request has to find out whether it is back."""
        with contextlib.suppress(StoreUnavailable):
            self.exist(["kvprefetch.probe"])

    def suspect(self, what: str) -> None:
        """A question to the master is past its deadline: opens the breaker as a failed one does."""
        with contextlib.suppress(StoreUnavailable):
            self._verdict(None, True, what)

    def _remember(self, keys: Iterable[str], into: OrderedDict[str, None]) -> None:
        with self._state:
            for key in keys:
                into[key] = None
                into.move_to_end(key)
            while len(into) > _REMEMBERED_KEYS:
                into.popitem(last=False)

    def register(self, address: int, length: int) -> None:
        """Make `length` bytes at `address` usable in transfers. Raises StoreError, StoreUnavailable."""
        with self._local() as client:
            if code := client.register_buffer(address, length):
                raise StoreError(f"registering {length} bytes at {address:#x} failed with code {code}")

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises StoreError, StoreUnavailable."""
        with self._local() as client:
            if code := client.unregister_buffer(address):
                raise StoreError(f"unregistering {address:#x} failed with code {code}")

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Which keys exist; renews the lease of each that does. Raises StoreUnavailable."""
        if not keys:
            return []
        with self._call() as (client, attempt):
            codes: list[int] = client.batch_is_exist(list(keys))
            self._verdict(attempt, all(code < 0 for code in codes), "exist", codes[0] if codes else -1)
        found = [code == 1 for code in codes]
        self._remember((key for key, here in zip(keys, found, strict=True) if here), self._seen)
        return found

    def _move(self, call: Move, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """The one place that hands memory to Mooncake; see give_up.py."""
        try:
            codes = move(call, keys, addresses, sizes)
        except BaseException:
            self._under_way = True  # nothing is known of the transfers
            raise
        self._under_way |= UNDER_WAY in codes
        return codes

    def get_into(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], get: Get | None = None
    ) -> list[ErrorClass]:
        """Read each value to its address; OK only if exactly its `size` bytes arrived from where it lay before and
        after (replicas.py). CORRUPT: a disk lost a page (zeros.py). UNDER_WAY: the caller must never use that memory
        again. Raises StoreUnavailable: no transfer is under way.

        Each key once: of one that stands twice Mooncake fills the last destination only, and says OK for both.
        A storage node that is put aside (storage_nodes.py) is not asked: TRANSFER. The caller marks a given-up `get`.
        """
        if not keys:
            return []
        if len(set(keys)) != len(keys):
            raise ValueError(f"a key stands twice in one get: keys={len(keys)} different={len(set(keys))}")
        with self._call() as (client, attempt):
            before, code = self._replicas.read(client, keys), 0

            def read(part: Sequence[int]) -> list[ErrorClass]:
                nonlocal code
                these, large = [keys[i] for i in part], [sizes[i] for i in part]
                codes = self._move(client.batch_get_into, these, [addresses[i] for i in part], large)
                code = codes[0] if codes else -1
                return classify_get(client, these, large, codes)

            if self._settings.private:  # all memory is our own, which does not hang
                results = read(range(len(keys)))
            else:
                results = self._nodes.read(keys, before, get or Get(), read)
            self._verdict(attempt, all(r is ErrorClass.TRANSIENT for r in results), "get", code)
            if ErrorClass.OK in results:
                void_what_moved(results, keys, before, self._replicas.read(client, keys))
            for i, result in enumerate(results) if self.disk or not self._settings.private else ():
                if result is ErrorClass.OK and holed(addresses[i], sizes[i]):
                    results[i] = ErrorClass.CORRUPT
        self._remember((key for key, r in zip(keys, results, strict=True) if r is ErrorClass.OK), self._seen)
        return results

    def put_from(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[ErrorClass]:
        """Write each value; a key that exists keeps its value and counts as OK. Raises StoreUnavailable.

        UNDER_WAY: Mooncake may still read that memory, which must not change any more.
        NO_SPACE means that memory is full of values not yet on disk or under lease: try again in about a second.
        """
        if not keys:
            return []
        with self._call() as (client, attempt):
            with self._puts.of(keys):
                codes = self._move(client.batch_put_from, keys, addresses, sizes)
            results = [ErrorClass.OK if code == -705 else classify(code) for code in codes]
            self._verdict(attempt, all(r is ErrorClass.TRANSIENT for r in results), "put", codes[0] if codes else -1)
        done = [key for key, r in zip(keys, results, strict=True) if r is ErrorClass.OK]
        self._remember(done, self._seen)
        if self._settings.enable_ssd_offload:
            self._remember(done, self._unflushed)
        return results

    def _described(self, keys: Sequence[str]) -> list[Sequence[Any]]:
        with self._call() as (client, _):
            table = client.batch_get_replica_desc(list(keys)) if keys else {}
        return [table.get(key, ()) for key in keys]

    def media(self, keys: Sequence[str], size: int | None = None) -> list[Medium | None]:
        """Where each value lies; memory wins over disk, None is nowhere. Raises StoreUnavailable when not open.

        With `size`, a value in memory that has another lies nowhere. Of those on a disk alone it is not told. A value
        of an owner that is put aside (storage_nodes.py) lies nowhere, either.
        """
        found, aside = list[Medium | None](), self._nodes.aside()
        for each in self._described(keys):
            memory = [r.get_memory_descriptor().buffer_descriptor for r in each if r.is_memory_replica()]
            unfit = any(size not in (None, part.size) or part.transport_endpoint in aside for part in memory)
            found.append(None if unfit or not each else "memory" if memory else "disk")
        return found

    def flush(self, timeout_s: float) -> bool:
        """Wait until the values put here (the last 65,536) that still exist are on this process's disk tier.

        True once they are; at once when this process owns no disk tier. Raises StoreUnavailable.
        """
        deadline = self._clock() + timeout_s
        while True:
            with self._state:
                keys = list(self._unflushed)
            for start in range(0, len(keys), 1024):
                part = keys[start : start + 1024]
                there = self._described(part)
                if not all(there):
                    self.exist(part[:1])  # a master that is gone knows of no replica either: then this raises
                with self._state:
                    for key, replicas in zip(part, there, strict=True):
                        if not replicas or not all(each.is_memory_replica() for each in replicas):
                            self._unflushed.pop(key, None)
            with self._state:
                left = len(self._unflushed)
            if left == 0 or self._clock() >= deadline:
                return left == 0
            time.sleep(0.1)

    def remove_matching(self, prefixes: Sequence[str], timeout_s: float) -> Removal:
        """Remove every value whose key is one of `prefixes` and hex digits, leased ones too; true if it is gone.

        The master forgets an object at once, but no file of a disk tier goes with it, and its owner would find it
        again at its next start. So with a disk tier of this process the matching files are deleted too, and the sweep
        is repeated until two heartbeats of the tier brought nothing back (a value on its way to disk is registered
        again when written).

        Not so: the time was up, the master did not answer, a put of such a key hangs, or a value also lay on a disk of
        another process, which cannot be cleaned from here. What cannot be seen: a value another client was writing at
        that moment, so stop writers first. A key removed and then put again is kept in memory only until the next
        start: the tier still counts it as written.
        """
        if not prefixes:
            return Removal(True, 0)
        theirs, a_key = patterns(prefixes)
        ours = re.compile(rf"{a_key}\Z")
        disk = self.disk
        deadline = self._clock() + timeout_s
        if not self._puts.wait(ours.match, timeout_s):
            return Removal(False, 0)
        with self._state:
            seen = [key for key in self._seen if ours.match(key)]
        quiet_since: float | None = None
        reach, checked, most = True, set[str](), 0  # what comes back was counted before
        while True:
            with contextlib.suppress(StoreUnavailable):
                if disk is None and quiet_since is None:
                    reach = all(each.is_memory_replica() for replicas in self._described(seen) for each in replicas)
                with self._call() as (client, attempt):
                    with self._replicas.removal():
                        count = int(client.remove_by_regex(theirs, True))
                    self._verdict(attempt, classify(count) is ErrorClass.TRANSIENT, "remove", count)
                most = max(most, count, files := (purge(disk, a_key, checked) if disk else 0))
                now = self._clock()
                if count != 0 or files or quiet_since is None or any(self.exist(seen)):
                    quiet_since = now
                elif now - quiet_since >= self._settle_s:
                    with self._state:
                        for key in seen:
                            self._seen.pop(key, None)
                            self._unflushed.pop(key, None)
                    self._log.info("store.removed", prefixes=len(prefixes), durable=reach)
                    return Removal(reach, most)
            if self._clock() >= deadline:
                return Removal(False, most)
            time.sleep(0.1)
