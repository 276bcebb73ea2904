"""Reads values from the memory of storage nodes while the calling thread sleeps; a get of Mooncake's spins meanwhile.

Mooncake's transfer engine says without waiting whether a transfer of one piece of memory has ended.  (Of one of several
pieces it says -1 at the first failure, while others may still write.)  It cancels nothing and gives nothing up: a
transfer fails when its connection does, or after 30 s without progress.  A read returns when all of its transfers have
ended, however late that is; no memory is written afterwards.  Reads from one node take turns (pace.py).

Values that follow one another in the node's memory and in ours are one piece, up to PIECE_BYTES.  Each transfer costs
CPU, here and in the node, whatever its size.  The node's memory may consist of areas that Mooncake registered
apart, and then a piece across two of them fails: after a failure no piece reaches across the same places again.

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
from itertools import accumulate
from typing import Any, NamedTuple

from .errors import ErrorClass
from .pace import Pace, Read
from .replicas import Place
from .storage_nodes import Get

_MARGIN = 10  # the part of a lease in which nothing counts any more: clocks do not run equally fast
PIECE_BYTES = 1 << 20  # of one transfer: a call's other pieces use Mooncake's other connections to the node meanwhile
_MOST_BORDERS = 4096
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
class _Piece:
    """Values that are read in one transfer: their indices, where they begin on both sides, and their bytes."""

    indices: list[int]
    address: int
    source: int
    size: int
    number: int = 0  # of the transfer, while it is under way


@dataclass(eq=False)
class _Transfers:
    """One read's pieces from one node. `left`: the transfers that have not ended."""

    read: Read
    pieces: Sequence[_Piece]
    left: list[_Piece] = field(default_factory=list)
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
        self._borders: set[tuple[str, int]] = set()  # places that no piece reaches across

    def leased_until_ns(self) -> int:
        """Return the end of a lease that a question grants which is asked after this."""
        return self._clock_ns() + self._leased_ns

    def read(self, values: Sequence[Value], until_ns: int, get: Get) -> list[ErrorClass | None]:
        """Return each value's result; None: it was not read, since no replica lies in memory that can be reached.

        FOREIGN: the value has another size.  TRANSFER: also of a value that was not begun before `get` was given up.
        LOOKUP_AGAIN: it was read, but not before `until_ns`, the end of the lease; or it was not begun before that, or
        before `get` was dropped.
        """
        results: list[ErrorClass | None] = [None] * len(values)
        nodes = {place.node for value in values for place in value.places}
        reached = {node for node in nodes if self._reaches(node)}
        wanted: dict[str, list[_Piece]] = {}
        some = len(reached) < len(nodes)
        for i, value in enumerate(values):
            if {place.size for place in value.places} - {value.size}:
                results[i] = ErrorClass.FOREIGN
            elif get.late:
                results[i] = ErrorClass.TRANSFER
            elif places := [place for place in value.places if place.node in reached] if some else value.places:
                results[i] = ErrorClass.TRANSFER  # until it came
                self._add(wanted, i, value, places)
        with self._lock:
            under_way = [
                _Transfers(self._pace.ask(node, sum(piece.size for piece in pieces), self._clock_ns()), pieces)
                for node, pieces in wanted.items()
            ]
        while under_way := [each for each in under_way if not self._go_on(each, values, results, get, until_ns)]:
            self._sleep(max(0, min(each.read.look_ns for each in under_way) - self._clock_ns()) / 1e9)
        if self._clock_ns() > until_ns:
            results = [ErrorClass.LOOKUP_AGAIN if each is ErrorClass.OK else each for each in results]
        return results

    def _add(self, wanted: dict[str, list[_Piece]], index: int, value: Value, places: Collection[Place]) -> None:
        """Add the value to a node's last piece if it goes on there, or begin one of the node with least to send."""
        for node, source, size in places:
            last = wanted[node][-1] if node in wanted else None
            if (
                last is not None
                and (last.address + last.size, last.source + last.size) == (value.address, source)
                and last.size + size <= PIECE_BYTES
                and (node, source) not in self._borders
            ):
                last.indices.append(index)
                last.size += size
                return
        place = min(places, key=lambda each: self._load(each.node, wanted)) if len(places) > 1 else next(iter(places))
        wanted.setdefault(place.node, []).append(_Piece([index], value.address, place.address, place.size))

    def _load(self, node: str, wanted: Mapping[str, Sequence[_Piece]]) -> int:
        """Return the bytes that this node sends first."""
        return self._pace.waiting(node) + sum(piece.size for piece in wanted.get(node, ()))

    def _go_on(
        self, transfers: _Transfers, values: Sequence[Value], results: list[ErrorClass | None], get: Get, until_ns: int
    ) -> bool:
        """Begin them when it is their turn, or look at them; return whether all have ended."""
        read, now_ns = transfers.read, self._clock_ns()
        if now_ns < read.look_ns:
            return False
        if not read.begun and (get.dropped or now_ns > until_ns):  # the bytes would not count, and would delay others
            for i in (index for piece in transfers.pieces for index in piece.indices):
                results[i] = ErrorClass.LOOKUP_AGAIN
        elif not read.begun and not get.late:
            with self._lock:
                begins = self._pace.turn(read, now_ns)
            if begins:
                self._begin(transfers, get)
            return False
        transfers.came &= read.begun
        return self._look(transfers, values, results)

    def _reaches(self, node: str) -> bool:
        """Whether the engine may ask this node; one that is new or failed answers a probe first."""
        return node in self._known or self._engine.send_probe(node) == 0

    def _begin(self, transfers: _Transfers, get: Get) -> None:
        get.begun = True
        begin, node = self._engine.batch_transfer_async_read, transfers.read.node
        # While this one waited for its turn, a read of another thread may have failed.
        for piece in transfers.pieces if self._reaches(node) else ():
            if not get.late and (number := begin(node, [piece.address], [piece.source], [piece.size])):  # 0: it failed
                piece.number = number
                transfers.left.append(piece)
        if len(transfers.left) == len(transfers.pieces):
            self._known.add(node)
        else:
            self._failed(transfers)

    def _failed(self, transfers: _Transfers) -> None:
        transfers.came = False
        self._known.discard(transfers.read.node)

    def _look(self, transfers: _Transfers, values: Sequence[Value], results: list[ErrorClass | None]) -> bool:
        """Return whether all have ended."""
        read, left, check = transfers.read, transfers.left, self._engine.transfer_check_status
        while left:
            piece = left[-1]  # the last one ends last
            if (ended := ENDED.get(check(piece.number))) is None:
                with self._lock:
                    self._pace.looked(read, self._clock_ns())
                return False
            left.pop()  # from now on its number names nothing
            for i in piece.indices:
                results[i] = ended
            if ended is not ErrorClass.OK:
                self._failed(transfers)
                self._keep_apart(read.node, piece, values)
        with self._lock:
            self._pace.ended(read, self._clock_ns(), came=transfers.came)
        return True

    def _keep_apart(self, node: str, piece: _Piece, values: Sequence[Value]) -> None:
        """Join no values any more where those of this piece meet."""
        if len(self._borders) > _MOST_BORDERS:
            self._borders.clear()
        sums = accumulate(values[i].size for i in piece.indices[:-1])
        self._borders.update((node, piece.source + each) for each in sums)


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
