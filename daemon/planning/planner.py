"""The planner: which blocks to fetch into which slots, for which request first. Pure: events in, fetch orders out.

A block that several requests want is fetched once and pinned once per request (blocks.py); blocks are kept in runs,
which is what a request holds, waits for and gives back.  Work goes out by urgency:
asked for at the queue head, then scheduler priority, then arrival; blocks in the store's memory and blocks on its disks
in lanes of their own.  A request without room takes that of the least urgent one, if that is less urgent than itself
and not claimed; that one then waits for room again, in its own place of the queue.  Urgencies only ever rise, once for
each request, so two cannot go on taking from each other.  Time is handed in; flags are reached through a port.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set

from .blocks import Blocks, BlockState, Lane, Run
from .queues import Queues, Stop
from .requests import FlagPort, Key, Order, Request, Urgency
from .victims import Victims

__all__ = ["FlagPort", "Key", "Lane", "Order", "Planner", "Request"]

DISK_SHARE = 0.75  # of the slots, at most, for blocks from disk that are wanted now
WARM_SHARE = 4  # a warming takes a quarter of a call, and of the slots, at a time


class Planner:
    """Plans one engine's staging slots [0, slot_count), but for those that are `lost` when they come back."""

    def __init__(
        self,
        slot_count: int,
        flags: FlagPort,
        *,
        chunk_blocks: int,
        disk_chunk_blocks: int | None = None,
        lost: Set[int] = frozenset(),
    ) -> None:
        self._flags = flags
        self._chunk_blocks = (max(1, chunk_blocks), max(1, disk_chunk_blocks or chunk_blocks))
        self._blocks = Blocks(slot_count, max(1, int(slot_count * DISK_SHARE)), lost)
        self.requests: dict[Key, Request] = {}
        self._numbers: dict[int, Request] = {}
        self._queues = Queues(self._numbers)
        self._victims = Victims(self._blocks, self._numbers, flags)
        self._served: set[int] = set()  # numbers of requests that hold slots and want no more
        self._orders: dict[int, Order] = {}
        self._overdue: dict[int, Order] = {}
        self._sequence = 0
        self.touch = self._blocks.touch
        self.wasted = self._blocks.wasted

    # --- events -----------------------------------------------------------------------------------------------------

    def hint(self, key: Key, hashes: bytes, hash_bytes: int, blocks: int, local: int, priority: int) -> Request:
        """A request arrived. Its blocks [local, issued) are in staging or on their way already, and pinned now.

        The caller looks the digests [issued, blocks) up and then calls looked_up().
        """
        self._sequence += 1
        request = Request(key, hashes, hash_bytes, blocks, local, priority, self._sequence, ready=local, issued=local)
        self.requests[key] = self._numbers[request.sequence] = request
        self._pin_known(request, blocks)
        return request

    def looked_up(self, key: Key, found: int, on_disk: bytes = b"") -> None:
        """The store holds blocks up to `found` (absolute, at least `local`).

        `on_disk` has a byte for each block from `local` on: 1 for one that lies only on disk.  May be called again for
        a request that waited long; then it can only get shorter.
        """
        request = self.requests.get(key)
        if request is None or request.final:
            return
        limit = max(request.local, min(found, request.blocks))
        request.on_disk = on_disk if any(on_disk) else b""
        if request.limit < 0:
            self._shorten(request, limit)
            self._pin_known(request, limit)
        else:
            request.limit = max(request.issued, min(limit, request.limit))
        self._advance(request)
        if request.wants_work:
            self._queues.enter(request)

    def ask(self, key: Key) -> None:
        """The scheduler reached this request and found it pending."""
        request = self.requests.get(key)
        if request is None or request.asked:
            return
        request.asked = True
        if request.sequence in self._blocks.sole:
            self._blocks.sole_changed.add(request.sequence)
        if request.wants_work:
            self._queues.enter(request)

    def finish(self, key: Key, loaded: range = range(0)) -> Request | None:
        """The engine released or cancelled it, and `loaded` these blocks of it: nothing stays pinned."""
        request = self.requests.get(key)
        if request is not None:
            if loaded:
                start, stop = (max(0, block - request.local) for block in (loaded.start, loaded.stop))
                self._blocks.loaded(request.held, start, stop)
            self._drop(request)
        return request

    def fetched(self, number: int, results: Sequence[bool], now_ns: int) -> None:
        """An order came back with these of its blocks. The first failed one of a request ends its usable prefix."""
        if (overdue := self._overdue.pop(number, None)) is not None:
            self.wasted[overdue.lane] += sum(results)
            for run in list(self._blocks.runs(overdue.slots)):
                self._blocks.returned(run)
            self._queues.changed()
            return
        order = self._orders.pop(number)
        for at in range(1, 0 if all(results) else len(results)):
            if results[at] != results[at - 1]:
                self._blocks.cut(order.slots[at])
        runs = list(self._blocks.runs(order.slots))
        at = 0
        for run in runs:
            ok, at = results[at], at + len(run)
            if not ok:
                run.state = BlockState.FAILED
                self._blocks.detach(run)
            else:
                self._blocks.fetched(run)
                if run.first_requester is not None:
                    run.first_requester.fetched_blocks += len(run)
                    run.first_requester.disk_blocks += run.lane * len(run)
            run.first_requester = None
            self._blocks.returned(run)
        self._wake(runs, now_ns)

    def overdue(self, number: int, now_ns: int) -> None:
        """An order did not come back in time: its requests go on without it, its slots wait for fetched()."""
        order = self._overdue[number] = self._orders.pop(number)
        runs = list(self._blocks.runs(order.slots))
        for run in runs:
            run.state = BlockState.FAILED
            self._blocks.detach(run)
            run.first_requester = None
        self._wake(runs, now_ns)

    def _wake(self, runs: Sequence[Run], now_ns: int) -> None:
        for run in runs:
            waiters, run.waiters = run.waiters, []
            for request in waiters:
                if request.waits is run:
                    request.waits = None
                    self._advance(request, now_ns)
        self._queues.changed()

    def tick(self) -> None:
        """Called now and then: flags change hands unseen, so lanes that found no room look again."""
        self._queues.changed()

    def reset(self) -> list[Request]:
        """The KV of every block is void: end what is unclaimed, forget the index. Returns the requests that ended.

        For the others nothing is fetched any more: as long as the store has it, a later hint would find it here.
        """
        ended = []
        for request in list(self.requests.values()):
            if self._flags.expire(request.key):
                ended.append(request)
                self._drop(request)
            else:
                request.final, request.limit = True, request.local
                if request.held:
                    self._served.add(request.sequence)
        self._blocks.detach_all()
        return ended

    def end(self) -> None:
        """The engine is gone: what it has not loaded by now is waste."""
        self._blocks.waste_rest()

    def give_up(self, lane: Lane) -> None:
        """Nothing can be fetched in this lane: those that wait for it go on with what they have."""
        while (request := self._queues.head(lane)) is not None:
            request.limit = request.issued
            self._advance(request)
        self._queues.changed()

    # --- orders -----------------------------------------------------------------------------------------------------

    def next_order(self, lane: Lane = Lane.MEMORY) -> Order | None:
        """The lane's most urgent blocks that fit one store call, into room that is there or is taken from others."""
        digests: list[bytes] = []
        slots = array("I")
        chunk = self._chunk_blocks[lane]
        while self.wants(lane) and len(slots) < chunk:
            request = self._queues.head(lane)
            if request is None or self._queues.must_yield(lane, request.urgency):
                break
            stop = self._issue(request, lane, digests, slots)
            self._advance(request)
            if stop is Stop.LANE:
                self._queues.enter(request)
            elif stop is not Stop.FULL:
                if not slots and self._serve_in_part(request, lane):
                    continue
                self._queues.stop(lane, stop)
                break
            elif 2 * len(slots) >= chunk:
                # Filling up with the next request's blocks would make this one wait for them.
                break
        return self._order(lane, digests, slots)

    def warm(self, digests: Sequence[bytes], lane: Lane, warming: str) -> Order | None:
        """An order for the first of these blocks, which no request wants yet, into room that none needs.

        None when there is no such room.  The blocks belong to nobody: the next hint finds them staged.
        """
        most = max(1, min(self._chunk_blocks[lane], self._blocks.slot_count) // WARM_SHARE)
        slots = self._blocks.add_warm(digests[:most], lane, warming)
        return self._order(lane, digests[: len(slots)], slots)

    def _order(self, lane: Lane, digests: Sequence[bytes], slots: array[int]) -> Order | None:
        if not slots:
            return None
        self._sequence += 1
        order = self._orders[self._sequence] = Order(self._sequence, lane, digests, slots)
        return order

    @property
    def wanted(self) -> bool:
        """Whether a request wants a block that is not on its way."""
        return any(self._queues.head(lane) is not None for lane in Lane)

    def wants(self, lane: Lane) -> bool:
        """Whether next_order(lane) is worth a call."""
        return self._queues.wants(lane)

    def _issue(self, request: Request, lane: Lane, digests: list[bytes], slots: array[int]) -> Stop:
        """Pin this request's next blocks and order the missing ones."""
        while request.wants_work and (room := self._chunk_blocks[lane] - len(slots)) > 0:
            self._pin_known(request, request.limit)
            start = request.issued
            if start >= request.limit:
                break
            request.lane = request.lane_of(start)
            if request.lane is not lane:
                return Stop.LANE
            taken = array("I")
            stop = self._take_slots(taken, 1, request.urgency, lane)
            if taken:  # most find none: their digests are not cut out for that
                wanted = request.digests(start, min(start + room, request.lane_ends(start)))
                stop = self._take_slots(taken, self._blocks.missing(wanted), request.urgency, lane)
                run = self._blocks.add(wanted[: len(taken)], taken, lane, request)
                digests += run.digests
                slots += taken
                self._hold(request, run)
            if stop is not Stop.FULL:
                return stop
        return Stop.FULL

    def _take_slots(self, slots: array[int], count: int, urgency: Urgency, lane: Lane) -> Stop:
        """Take slots for `count` blocks of this lane, from others if need be; why there are fewer, if so."""
        while len(slots) < count:
            most = min(count, self._blocks.budget(lane)) - len(slots)
            if most <= 0:
                if not self._take_back(urgency, lane):
                    return Stop.NO_BUDGET
            elif taken := self._blocks.take_slots(most):
                slots += taken
            elif not self._take_back(urgency, None):
                return Stop.NO_ROOM
        return Stop.FULL

    def _pin_known(self, request: Request, stop: int) -> None:
        """Pin the next blocks as far as they are in staging or on their way."""
        hashes, size = request.hashes, request.hash_bytes
        while request.issued < stop and (run := self._blocks.find(hashes, size, request.issued, stop)) is not None:
            self._hold(request, run)

    def _hold(self, request: Request, run: Run) -> None:
        self._blocks.pin(run, request.sequence)
        request.held.extend(run.slots)
        request.issued += len(run)

    def _take_back(self, urgency: Urgency, lane: Lane | None) -> bool:
        """Take all that the least urgent request holds of those that give back a slot (of this lane) at once.

        False when there is none.  What nobody needed in the meantime it finds again when its turn comes.
        """
        request = self._victims.take_back(urgency, lane)
        if request is None:
            return False
        # Of what it found in staging no look-up said where it lies.
        lanes = b"".join(bytes([run.lane]) * len(run) for run in self._blocks.runs(request.held))
        request.on_disk = lanes + request.on_disk[len(lanes) :]
        request.ready = request.issued = request.local
        request.final = False
        request.taken_back += 1
        self._served.discard(request.sequence)
        self._unpin(request, 0)
        if request.wants_work:
            self._queues.enter(request)
        else:  # void since a reset
            self._advance(request)
        return True

    def _serve_in_part(self, request: Request, lane: Lane) -> bool:
        """Where no slot will come back, somebody's prefix so far is all of it: whether there was anyone to tell so.

        That is the request that found no room, if it holds every slot it may.  Otherwise it waits for those that were
        served, or for what is on its way; without either, all that hold slots wait for each other, and the most urgent
        of them goes on with what it has.
        """
        if self._orders:
            return False
        held = {slot: run.lane for run in self._blocks.runs(request.held) for slot in run.slots}
        stuck = [order.lane for order in self._overdue.values() for _ in order.slots]
        all_of_them = len(held) >= self._blocks.slot_count - len(stuck) - self._blocks.lost
        of_lane = sum(held.values()) >= self._blocks.disk_slots - sum(stuck)
        if not (all_of_them or (lane is Lane.DISK and of_lane)):
            waiting = (each for each in self.requests.values() if each.held and each.limit >= 0)
            first = None if self._served else min(waiting, key=lambda each: each.urgency, default=None)
            if first is None:
                return False
            request = first
        request.limit = request.issued
        self._advance(request)
        return True

    # --- state ------------------------------------------------------------------------------------------------------

    def _advance(self, request: Request, now_ns: int = 0) -> None:
        """Publish what became contiguous; READY once nothing more will come. `now_ns`: bytes arrived."""
        if request.final or request.limit < 0:
            return
        local, held, start = request.local, request.held, request.ready
        ready = start
        for run in self._blocks.runs(held[start - local :]):
            if run.state is not BlockState.STAGED:
                break
            ready += len(run)
        request.ready = ready
        if ready < request.issued:
            if run.state is BlockState.FAILED:
                self._shorten(request, ready)
            elif request.waits is not run:
                run.waiters.append(request)
                request.waits = run
        if now_ns and ready > start:
            request.first_byte_ns = request.first_byte_ns or now_ns
            request.last_byte_ns = now_ns
            self._blocks.join(held, start - local, ready - local)
        final = ready >= request.limit
        if ready == start and not final:
            return
        published = self._flags.publish(request.key, start, held[start - local : ready - local], ready, final)
        request.final = final or not published
        if request.final and request.held:
            self._served.add(request.sequence)

    def _shorten(self, request: Request, limit: int) -> None:
        """Blocks from `limit` on are no use to it."""
        request.limit = limit
        self._unpin(request, limit - request.local)
        request.issued = min(request.issued, limit)

    def _drop(self, request: Request) -> None:
        del self.requests[request.key], self._numbers[request.sequence]
        self._served.discard(request.sequence)
        request.final = True
        request.waits = None
        self._unpin(request, 0)

    def _unpin(self, request: Request, start: int) -> None:
        dropped = request.held[start:]
        del request.held[start:]
        if dropped:
            self._blocks.unpin(dropped, request.sequence)
            self._queues.changed()

    # --- what an auditor sees ---------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, int]:
        """Slots by use, requests and orders; pinned is zero when no request is left.

        `slots_stuck` wait for a store call that everyone gave up; `leases` are blocks that wait for their fetch.
        """
        return {
            **self._blocks.gauges(),
            "slots_stuck": sum(len(order.slots) for order in self._overdue.values()),
            "requests": len(self.requests),
            "leases": sum(each.limit - each.issued for each in self.requests.values() if each.wants_work),
            "orders": len(self._orders),
        }

    @property
    def has_work(self) -> bool:
        return any(self.wants(lane) for lane in Lane)
