"""The calls into Mooncake that the daemon makes: look up, get, put, flush and remove, each key's code as an ErrorClass.

Codes are per key, and `errors.classify` maps them in one place.  connection.py guards the calls, sleeping_reads.py
reads without a busy thread, give_up.py finds transfers that may still be under way, storage_nodes.py keeps gets from
waiting for a node that hangs, and replicas.py and zeros.py find bytes that are not the value's.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import compress, islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from . import addresses, checksums
from .checksums import SUM_BYTES
from .connection import Connection
from .errors import ErrorClass, StoreError, StoreUnavailable, classify, classify_get
from .give_up import UNDER_WAY, move
from .joining import Joined
from .replicas import ReplicaReader, void_what_moved
from .settings import MooncakeSettings
from .sleeping_reads import SleepingReads, Value
from .storage_nodes import Get, StorageNodes
from .unreadable import Lasting, read_apart, shortened
from .zeros import Borders, holed

Medium = Literal["memory", "disk"]
_T = TypeVar("_T")

_FLUSH_KEYS = 1024  # of one question
_UNFLUSHED_KEYS = 65_536  # of the values put last


class Store(Connection):
    """One Mooncake client's calls. Several threads may call at once.

    `log` is a bound structlog logger. `rpc_timeout_ms` bounds one question to the master, not a transfer. `lease_ns`:
    how long the master keeps a value after a question for it.
    """

    def __init__(
        self,
        settings: MooncakeSettings,
        log: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        rpc_timeout_ms: int = 2000,
        lease_ns: int = 10_000_000_000,
    ) -> None:
        super().__init__(settings, log, clock, rpc_timeout_ms)
        self._lease_ns = lease_ns
        self._sleeping: SleepingReads | None = None
        self._clock = clock
        self.disk = Path(settings.ssd_offload_path) if settings.enable_ssd_offload else None  # this process's own
        # Tries the embedded store's disk, which is this process's own alone; None: there is none.
        self.disk_works: Callable[[], bool] | None = None
        self._nodes = StorageNodes(log, clock)
        self._replicas = ReplicaReader(settings.private)
        self._lasting = Lasting()
        self._unflushed: OrderedDict[str, None] = OrderedDict()
        # Removed because of their files on the disk, which Mooncake writes no second time before its next start.
        self._memory_only: set[str] = set()
        self._flushing = threading.Lock()  # around `_unflushed`
        self._pages: list[mmap.mmap] = []  # that Mooncake did not let go of

    def adopt(self, joined: Joined) -> None:
        """Admit calls, to a client that has joined."""
        if joined.sleeping:
            self._sleeping = SleepingReads(joined.engine, self._lease_ns)
        super().adopt(joined)

    @property
    def aside(self) -> frozenset[str]:
        return self._nodes.aside()

    def register(self, address: int, length: int) -> None:
        """Make `length` bytes at `address` usable in transfers. Raises StoreError, StoreUnavailable."""
        with self._local() as client:
            if code := client.register_buffer(address, length):
                raise StoreError(f"the store refuses staging: register_buffer failed with code {code}: bytes={length}")

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises StoreError, StoreUnavailable: the memory is registered still, and must stay mapped.

        Mooncake 0.3.13 forgets the memory before it tells the metadata server.  Where that is away, it never lets go of
        the memory.  So a page is registered first, which leaves nothing behind where it fails.
        """
        with self._local() as client, contextlib.ExitStack() as undo:
            if self._settings.metadata_server != addresses.P2P:
                page = mmap.mmap(-1, mmap.PAGESIZE)
                where = ctypes.addressof(ctypes.c_char.from_buffer(page))
                if code := client.register_buffer(where, mmap.PAGESIZE):
                    raise StoreError(f"the metadata server does not answer: register_buffer failed with code {code}")
                undo.callback(self._let_go, client, page, where)
            if code := client.unregister_buffer(address):
                raise StoreError(f"unregister_buffer failed with code {code}")

    def _let_go(self, client: Any, page: mmap.mmap, address: int) -> None:
        """Unregister a page; where that fails it stays mapped."""
        if client.unregister_buffer(address):
            self._pages.append(page)

    def probe(self) -> None:
        """Ask the master anything, so that no request has to find out whether it is back."""
        with contextlib.suppress(StoreUnavailable):
            self.exist(["kvprefetch.probe"])

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Return which keys exist, and renew the lease of each that does. Raises StoreUnavailable."""
        if not keys:
            return []
        with self._call() as (client, attempt):
            codes: list[int] = client.batch_is_exist(list(keys))
            self._verdict(attempt, all(code < 0 for code in codes), "exist", codes[0] if codes else -1)
        return [code == 1 for code in codes]

    def note(self, key: str, value: bytes) -> None:
        """Store a small value, unless the key has one, and renew its lease. Raises StoreUnavailable."""
        if not self.exist([key])[0]:
            with self._call() as (client, _):
                client.put(key, value)

    def notes(self, keys: Sequence[str], most: int) -> dict[str, bytes]:
        """Return the small values of the first keys that have one. Raises StoreUnavailable."""
        found = list(islice(compress(keys, self.exist(keys)), most))
        with self._call() as (client, _):
            return {key: value for key in found if (value := client.get(key))}

    def get_into(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes: Sequence[int],
        get: Get | None = None,
        *,
        written: Sequence[Borders] = (),
        sums: Sequence[int] = (),
    ) -> list[ErrorClass]:
        """Read each value to its address. Raises StoreUnavailable: then no transfer is under way.

        OK: exactly `size` bytes arrived, from a replica that lay there before and after (replicas.py).
        CORRUPT: a disk lost a page of what is `written` of the value (zeros.py), by default all of it; or the checksum,
        which comes to its address of `sums`, is another one, and the value was removed.  UNREADABLE: its file on a
        disk; where that disk is this process's own, or has the only replica and the fault lasts, the value was removed,
        and is a MISS.  UNDER_WAY: the caller must never use that memory again.
        TRANSFER: also without a try, for values of a storage node that is put aside.  The caller sets `get.late` when
        it gives this get up, and `get.dropped` when nobody wants it unless it has begun.  Each key may stand once: of
        two equal ones Mooncake fills the last destination only, and says OK for both.
        """
        if not keys:
            return []
        if len(set(keys)) != len(keys):
            raise ValueError(f"a key stands twice in one get: keys={len(keys)} different={len(set(keys))}")
        get, sleeping = get or Get(), None if sums else self._sleeping
        corrupt: list[str] = []
        unreadable: list[int] = []
        with self._call() as (client, attempt):
            until_ns = sleeping.leased_until_ns() if sleeping is not None else 0
            before, code = self._replicas.read(client, keys), 0

            def read(part: Sequence[int]) -> list[ErrorClass]:
                if sleeping is None:
                    return block(part)
                values = [Value(addresses[i], sizes[i], before.get(keys[i], ())) for i in part]
                came = self._moving(sleeping.read, values, until_ns, get)
                left = [i for i, each in zip(part, came, strict=True) if each is None]
                others = iter(block(left) if left else ())
                return [next(others) if each is None else each for each in came]

            def block(part: Sequence[int]) -> list[ErrorClass]:
                nonlocal code
                get.begun = True
                some_keys, some_sizes = [keys[i] for i in part], [sizes[i] for i in part]
                some_sums = [sums[i] for i in part] if sums else ()
                where = [addresses[i] for i in part]
                codes = self._move(client, "batch_get_into", some_keys, where, some_sizes, some_sums)
                code = codes[0]

                def alone(at: int) -> int:
                    sum_of = some_sums[at : at + 1]
                    return self._move(client, "batch_get_into", [some_keys[at]], [where[at]], [some_sizes[at]], sum_of)[
                        0
                    ]

                bad = read_apart(
                    codes,
                    alone,
                    self.disk_works,
                    lambda: get.late or get.dropped,
                    lambda at: some_keys[at] in self._lasting,
                )
                unreadable.extend(part[at] for at in bad)
                whole = [size + SUM_BYTES for size in some_sizes] if sums else some_sizes
                found = classify_get(client, some_keys, whole, codes)
                return [ErrorClass.UNREADABLE if at in bad else each for at, each in enumerate(found)]

            if self._settings.private:  # all memory is our own, which does not hang
                results = block(range(len(keys)))
            else:
                results = self._nodes.read(keys, before, get, read)
            self._verdict(attempt, all(r is ErrorClass.TRANSIENT for r in results), "get", code)
            if ErrorClass.OK in results:
                void_what_moved(results, keys, before, self._replicas.read(client, keys))
            if self.disk or not self._settings.private:
                good = [i for i, each in enumerate(results) if each is ErrorClass.OK]
                theirs = [written[i] for i in good] if written else ()
                for i in holed([addresses[i] for i in good], [sizes[i] for i in good], theirs):
                    results[good[i]] = ErrorClass.CORRUPT
            if sums:
                good = [i for i, each in enumerate(results) if each is ErrorClass.OK]
                for at in checksums.wrong((addresses[i], sizes[i], sums[i]) for i in good):
                    results[good[at]] = ErrorClass.CORRUPT
                    corrupt.append(keys[good[at]])
        for i in unreadable:
            # The own disk's value goes, so that it is stored anew.
            removed = self.disk_works is not None or self._lost_for_all(keys[i])
            self._log.warning("store.unreadable", value=shortened(keys[i]), removed=removed)
            if removed:
                results[i] = ErrorClass.MISS
                corrupt.append(keys[i])
        if corrupt:
            self._memory_only.update(corrupt)
            with contextlib.suppress(StoreUnavailable):  # else the caller would believe that nothing is under way
                self.remove(corrupt)
        return results

    def _lost_for_all(self, key: str) -> bool:
        """Whether no client can read a cluster's value: the only replica is on a node's disk, and the fault lasts.

        That node reads the file for all clients.  Of several replicas Mooncake says neither which one it read, nor can
        it be asked for another one.
        """
        if not self._lasting.failed(key, self._clock()):
            return False
        with contextlib.suppress(StoreUnavailable):
            [replicas] = self.described([key])
            return len(replicas) == 1 and bool(replicas[0].is_local_disk_replica())
        return False

    def put_from(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], sums: Sequence[int] = ()
    ) -> list[ErrorClass]:
        """Write each value; a key that exists keeps its value and counts as OK. Raises StoreUnavailable.

        `sums`: where the checksum of each value may be written, with which the value then ends.
        UNDER_WAY: Mooncake may still read that memory, which must not change any more.
        NO_SPACE: memory is full of values not yet on disk or under lease; try again in about a second.
        """
        if not keys:
            return []
        if sums:
            checksums.write(zip(addresses, sizes, sums, strict=True))
        with self._call() as (client, attempt):
            codes = self._move(client, "batch_put_from", keys, addresses, sizes, sums)
            results = [ErrorClass.OK if code >= 0 or code == -705 else classify(code) for code in codes]
            self._verdict(attempt, all(r is ErrorClass.TRANSIENT for r in results), "put", codes[0] if codes else -1)
        if self.disk:
            with self._flushing:
                good = compress(keys, [each is ErrorClass.OK for each in results])
                self._unflushed.update(dict.fromkeys(key for key in good if key not in self._memory_only))
                while len(self._unflushed) > _UNFLUSHED_KEYS:
                    self._unflushed.popitem(last=False)
        return results

    def _move(
        self,
        client: Any,
        name: str,
        keys: Sequence[str],
        addresses: Sequence[Any],
        sizes: Sequence[Any],
        sums: Sequence[int],
    ) -> list[int]:
        """Hand memory to Mooncake's blocking calls, here alone; see give_up.py. `sums`: each value's second buffer."""
        if sums:
            name = f"{name}_multi_buffers"
            addresses = [list(both) for both in zip(addresses, sums, strict=True)]
            sizes = [[size, SUM_BYTES] for size in sizes]
        codes = self._moving(move, getattr(client, name), keys, addresses, sizes)
        self._under_way |= UNDER_WAY in codes
        return codes

    def _moving(self, call: Callable[..., _T], *args: Any) -> _T:
        """Hand memory to Mooncake, here alone."""
        try:
            return call(*args)
        except BaseException:
            self._under_way = True  # nothing is known of the transfers
            raise

    def described(self, keys: Sequence[str]) -> list[Sequence[Any]]:
        """Return Mooncake's descriptors of each key's replicas, nothing for a key that does not exist."""
        with self._call() as (client, _):
            table = client.batch_get_replica_desc(list(keys)) if keys else {}
        return [table.get(key, ()) for key in keys]

    def media(self, keys: Sequence[str], size: int | None = None) -> list[Medium | None]:
        """Return where each value lies; memory wins over disk, None is nowhere. Raises StoreUnavailable.

        With `size`, a value in memory that has another size lies nowhere; Mooncake does not say the size of one on
        disk alone.  Nor lies a value of a storage node that is put aside anywhere.
        """
        found, aside = list[Medium | None](), self._nodes.aside()
        for each in self.described(keys):
            memory = [r.get_memory_descriptor().buffer_descriptor for r in each if r.is_memory_replica()]
            unfit = any(size not in (None, part.size) or part.transport_endpoint in aside for part in memory)
            found.append(None if unfit or not each else "memory" if memory else "disk")
        return found

    def flush(self, timeout_s: float) -> bool:
        """Wait until the values put here (the last 65,536) that still exist are on this process's disk.

        Return whether they are; at once when this process owns no disk. Raises StoreUnavailable.
        """
        deadline = self._clock() + timeout_s
        while True:
            with self._flushing:
                keys = list(self._unflushed)
            for start in range(0, len(keys), _FLUSH_KEYS):
                part = keys[start : start + _FLUSH_KEYS]
                there = self.described(part)
                if not all(there):
                    self.exist(part[:1])  # a master that is gone knows of no replica either: then this raises
                with self._flushing:
                    for key, replicas in zip(part, there, strict=True):
                        if not replicas or not all(each.is_memory_replica() for each in replicas):
                            self._unflushed.pop(key, None)
            if not self._unflushed or self._clock() >= deadline:
                return not self._unflushed
            time.sleep(0.1)

    def remove(self, keys: Sequence[str]) -> tuple[int, int]:
        """Remove the values of these keys, leased ones too; return how many are gone now, and how many stayed.

        It takes as long as the master takes for so many keys, however full the store is.  The file that a disk has of a
        value stays, and the next start of the disk's owner finds it.  Raises StoreUnavailable.
        """
        with self._local() as client, self._replicas.removal():
            results = [classify(code) for code in client.batch_remove(list(keys), True)]
        removed = results.count(ErrorClass.OK)
        return removed, len(keys) - removed - results.count(ErrorClass.MISS)
