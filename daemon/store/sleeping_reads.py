"""Reads values from the memory of storage nodes while the calling thread sleeps; a get of Mooncake's spins meanwhile.

Mooncake's transfer engine carries each value as a transfer of its own, and says without waiting whether that one has
ended.  (Of a transfer of several values it says -1 at the first failure, while others may still write.)  It cancels
nothing and gives nothing up: a transfer fails when its connection does, or after 30 s without progress.  A read returns
when all of its transfers have ended, however late that is; no memory is written afterwards.

A get of Mooncake's also guards what it reads, and here that is ours: the value's size, the lease that the question for
its place granted, and which replica to read.  That it did not move meanwhile, replicas.py checks for both.

The engine asks a node that it does not know for its description, under a lock that every transfer takes: a node that
hangs then would hold up those of all others for a minute.  So a probe goes first, to a node that is new or failed.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .errors import ErrorClass
from .pace import Asked, Pace
from .replicas import Place
from .storage_nodes import Get

_MARGIN = 10  # the part of a lease in which nothing counts any more: clocks do not run equally fast
_TEST_BYTES = 4096
_TEST_S = 2.0
ENDED = {1: ErrorClass.OK, -1: ErrorClass.TRANSFER}  # of transfer_check_status; anything else: not yet
_kept: list[object] = []  # memory of a test that did not end


def boot_ns() -> int:
    """Return a clock that nobody sets, and that goes on while the machine is suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Value(NamedTuple):
    """What to read: `size` bytes to `address`, from one of `places`."""

    address: int
    size: int
    places: Collection[Place]


@dataclass(eq=False)
class _Transfers:
    """One read's transfers from one node. `left`: those that have not ended, each as its value's index and its id."""

    asked: Asked
    left: list[tuple[int, int]] = field(default_factory=list)
    came: bool = True  # until one failed


class SleepingReads:
    """The reads of one store. Any thread may call. `engine`: Mooncake's, which its client uses too."""

    def __init__(
        self,
        engine: Any,
        lease_ns: int,
        *,
        clock_ns: Callable[[], int] = boot_ns,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._engine, self._clock_ns, self._sleep = engine, clock_ns, sleep
        self._leased_ns = lease_ns - lease_ns // _MARGIN
        self._lock = threading.Lock()
        self._pace = Pace()
        self._known: set[str] = set()  # nodes that the engine has asked, and that did not fail since

    def leased_until_ns(self) -> int:
        """Return the end of a lease that a question grants which is asked after this."""
        return self._clock_ns() + self._leased_ns

    def read(self, values: Sequence[Value], until_ns: int, get: Get) -> list[ErrorClass | None]:
        """Return each value's result; None: it was not read, since no replica lies in memory that can be reached.

        FOREIGN: the value has another size.  TRANSFER: also of a value that was not begun before `get` was given up.
        LOOKUP_AGAIN: it was read, but not before `until_ns`, the end of the lease.
        """
        results: list[ErrorClass | None] = [None] * len(values)
        nodes = {place.node for value in values for place in value.places}
        reached = {node for node in nodes if node in self._known or self._engine.send_probe(node) == 0}
        wanted: dict[str, list[tuple[int, Value, Place]]] = {}
        for i, value in enumerate(values):
            if any(place.size != value.size for place in value.places):
                results[i] = ErrorClass.FOREIGN
            elif get.late:
                results[i] = ErrorClass.TRANSFER
            elif places := [place for place in value.places if place.node in reached]:
                place = places[0] if len(places) == 1 else min(places, key=lambda each: self._load(each, wanted))
                wanted.setdefault(place.node, []).append((i, value, place))
        under_way = [self._start(node, theirs, results, get) for node, theirs in wanted.items()]
        while under_way:
            self._sleep(max(0, min(each.asked.look_ns for each in under_way) - self._clock_ns()) / 1e9)
            under_way = [each for each in under_way if not self._look(each, results)]
        if self._clock_ns() > until_ns:
            results = [ErrorClass.LOOKUP_AGAIN if each is ErrorClass.OK else each for each in results]
        return results

    def _load(self, place: Place, wanted: Mapping[str, Sequence[object]]) -> int:
        """Return the bytes that this place's node sends before this value."""
        return self._pace.waiting(place.node) + len(wanted.get(place.node, ())) * place.size

    def _start(
        self, node: str, wanted: Sequence[tuple[int, Value, Place]], results: list[ErrorClass | None], get: Get
    ) -> _Transfers:
        with self._lock:
            started = _Transfers(self._pace.ask(node, sum(place.size for _, _, place in wanted), self._clock_ns()))
        begin = self._engine.batch_transfer_async_read
        for i, value, place in wanted:
            results[i] = ErrorClass.TRANSFER
            if not get.late and (number := begin(node, [value.address], [place.address], [place.size])):  # 0: it failed
                started.left.append((i, number))
        if len(started.left) == len(wanted):
            self._known.add(node)
        else:
            self._failed(started)
        return started

    def _failed(self, transfers: _Transfers) -> None:
        transfers.came = False
        self._known.discard(transfers.asked.node)

    def _look(self, transfers: _Transfers, results: list[ErrorClass | None]) -> bool:
        """Return whether all have ended; False also if it is not time to look."""
        asked, left, check = transfers.asked, transfers.left, self._engine.transfer_check_status
        if self._clock_ns() < asked.look_ns:
            return False
        while left:
            i, number = left[-1]  # the last one ends last
            if (ended := ENDED.get(check(number))) is None:
                with self._lock:
                    self._pace.looked(asked, self._clock_ns())
                return False
            left.pop()  # from now on its id names nothing
            results[i] = ended
            if ended is not ErrorClass.OK:
                self._failed(transfers)
        with self._lock:
            self._pace.ended(asked, self._clock_ns(), came=transfers.came)
        return True


def self_test(engine: Any, client: Any, node: str) -> str:
    """Say why reads cannot sleep here; empty when they can. `node`: the engine's own name.

    The engine reads its own memory through the network: what is registered comes, and what is not fails.
    """
    memory = ctypes.create_string_buffer(os.urandom(_TEST_BYTES), 2 * _TEST_BYTES)
    _kept.append(memory)
    address, ended = ctypes.addressof(memory), []
    try:
        if engine.send_probe(node):
            return "the engine does not answer a probe"
        client.register_buffer(address, len(memory))
        for source in (address, address + _TEST_BYTES + 1):  # the second reaches beyond
            if not (number := engine.batch_transfer_async_read(node, [address + _TEST_BYTES], [source], [_TEST_BYTES])):
                return "a transfer does not begin"
            deadline = time.monotonic() + _TEST_S
            while not (status := engine.transfer_check_status(number)):
                if time.monotonic() > deadline:
                    return f"a transfer takes longer than {_TEST_S:.0f} s"
                time.sleep(0.001)
            ended.append(status)
        client.unregister_buffer(address)
    except (AttributeError, TypeError) as error:  # another Mooncake
        return str(error)
    came = memory.raw[:_TEST_BYTES] == memory.raw[_TEST_BYTES:]
    if ended != [1, -1] or not came:
        return f"the test's transfers ended otherwise than 1, -1: {ended} bytes={'equal' if came else 'different'}"
    _kept.remove(memory)
    return ""
