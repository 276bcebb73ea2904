"""The planner: which blocks to fetch into which slots, for which request first. Pure: events in, fetch orders out.

Orders go out by urgency: requests at the queue head first, then by scheduler priority, then by the time at which the
request's fetch would begin in order of arrival, plus OVERTAKEN times its own length.  So a few blocks do not wait for a
long prompt's, and later requests delay that by OVERTAKEN of its lengths at most.  Blocks in the store's memory and
blocks on its disks have a lane each.  A block that several requests want is fetched once and pinned once per request
(blocks.py).

A request without room takes the room of the least urgent request, if that is less urgent than itself and unclaimed.
That one then waits for room again, in its own place.  An urgency changes twice at most, when the request is looked up
and when the scheduler asks for it, so two requests cannot go on taking from each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence, Set
from itertools import islice

from ...kv.prompts import Choice, Prompt
from .blocks import BlockTable
from .holdings import Holdings
from .queues import Queues, Stop
from .requests import AnnounceTimes, Failure, FlagPort, Key, Order, Request
from .runs import Lane, Run

MAX_TRIES = 64  # requests that an engine may have claimed, tried for one slot
SMALLEST_SHARE = 16  # of a chunk: the least that a call over a slow link has
AHEAD_SHARE = 4  # of a call: for announced requests; hinted ones wait no longer for it


class Planner:
    """Plans one engine's staging slots [0, slot_count), without those that are in `quarantined` when they come back.

    `device_slots`: the numbers of second slots of blocks, which it gives back with the first ones.
    """

    def __init__(
        self,
        slot_count: int,
        flags: FlagPort,
        *,
        chunk_blocks: int,
        disk_chunk_blocks: int = 0,
        quarantined: Set[int] = frozenset(),
        device_slots: Sequence[int] = (),
    ) -> None:
        self._flags = flags
        self._chunk_blocks = (max(1, chunk_blocks), max(1, disk_chunk_blocks or chunk_blocks))
        self.blocks = BlockTable(slot_count, quarantined, device_slots)
        self.requests: dict[Key, Request] = {}
        self._numbers: dict[int, Request] = {}
        self._queues = Queues(self._numbers)
        # Whether next_order(lane) is worth a call, and whether the lane's most urgent request waits for room.
        self.ready, self.starving = self._queues.ready, self._queues.starving
        self.holdings = Holdings(self.blocks, self._queues)
        self._orders: dict[int, Order] = {}
        self._overdue: dict[int, Order] = {}
        self._sequence = 0
        self._taker: Request | None = None  # waits for slots that others gave up for it
        self.block_ns = [0.0, 0.0]  # what a block takes in each lane, as measured; 0 while nothing is known

    # --- events -----------------------------------------------------------------------------------------------------

    def hint(
        self, key: Key, prompt: Prompt, priority: int, arrived_ns: int = 0, announced: AnnounceTimes | None = None
    ) -> Request:
        """A request arrived, or is `announced`. This pins leading blocks that are in staging or on their way.

        The caller lets its prompt ask the store, then calls choose().
        """
        self._sequence += 1
        local = prompt.local_blocks
        number = self._sequence
        request = Request(key, prompt, priority, number, prompt.names, arrived_ns, shown=local, announced=announced)
        self.requests[key] = self._numbers[request.sequence] = request
        self.holdings.pin_known(request, request.blocks)
        if request.issued:
            prompt.holds(request.issued)
        return request

    def choose(self, request: Request) -> Choice:
        """The request's prompt knows the longest prefix: stage it.

        Where a block will not come, the next shorter one is staged.  There is a Broken where that needs other blocks:
        then the caller asks the store for them, and chooses again.
        """
        choice = self.holdings.choose(request, request.issued)
        if not request.ranked and request.announced is None:
            self._queues.rank(request, self.block_ns)
        if request.wants_work:
            self._queues.enter(request)
        return choice

    def absent(self, request: Request, block: int) -> None:
        """The store has this block of the request no more. It keeps those that are staged, or on their way."""
        if not request.final and request.issued <= block < request.limit:
            request.failure = Failure("lease")
            self.holdings.lose(request, range(block, block + 1))

    def ask(self, key: Key) -> None:
        """The scheduler reached this request while it was pending."""
        if (request := self.requests.get(key)) is not None and not request.asked:
            request.asked = True
            request.place()
            if request.wants_work:
                self._queues.enter(request)

    def stop(self, key: Key) -> list[int]:
        """Order nothing more for this request: the engine recomputes what is neither in staging nor on its way.

        It is final once that is there.  Return the numbers of the orders that the caller may `drop` one by one, the
        last one first: their blocks are for this request alone.
        """
        request = self.requests.get(key)
        if request is None or request.stopped:
            return []
        request.stopped = True  # of a final request, too: it may lose its blocks
        if request.limit >= 0 and not request.final:
            self.holdings.pin_known(request, request.limit)
            request.limit = request.issued
            self.holdings.advance(request)
        self._queues.changed()
        return self._last_orders(request)

    def _last_orders(self, request: Request) -> list[int]:
        """Return the orders for this request alone, the last one first, up to one that brings blocks for others."""
        slots, found = set(request.held[request.ready :]), list[int]()
        for order in reversed(self._orders.values()):
            if slots.isdisjoint(order.slots):
                continue
            runs = self.blocks.runs(order.slots)
            if not all(run.pins == 1 and run.holders == request.sequence for run in runs):
                break
            found.append(order.number)
        return found

    def drop(self, number: int) -> None:
        """The store call of this order has not begun, and never will.

        Its request goes on without it. Its slots wait for fetched(): should the call have begun after all, the blocks
        that it brings count as all others.
        """
        self._fail_all(self._orders[number], 0, None)

    def finish(self, key: Key, *loaded: range) -> Request | None:
        """The engine released or cancelled it and `loaded` these blocks. This unpins all of it."""
        request = self.requests.get(key)
        if request is not None:
            self.holdings.drop(request, loaded)
            del self.requests[key], self._numbers[request.sequence]
        return request

    def fetched(self, number: int, results: Sequence[bool], now_ns: int, failure: Failure | None = None) -> None:
        """An order came back. The first failed block of a request ends its usable prefix; `failure` says why."""
        if (overdue := self._overdue.pop(number, None)) is not None:
            self.blocks.wasted[overdue.lane] += sum(results)
            for run in list(self.blocks.runs(overdue.slots)):
                self.blocks.returned(run)
            self._queues.changed()
            return
        order = self._orders.pop(number)
        for at in range(1, 0 if all(results) else len(results)):
            if results[at] != results[at - 1]:
                self.blocks.cut(order.slots[at])
        runs, at = list(self.blocks.runs(order.slots)), 0
        for run in runs:
            self.blocks.staged(run) if results[at] else self.blocks.failed(run, failure)
            at += len(run.slots)
            self.blocks.returned(run)
        self._wake(runs, now_ns)

    def overdue(self, number: int, now_ns: int, failure: Failure | None = None) -> None:
        """An order missed its deadline. Its requests go on without it; its slots wait for fetched()."""
        self._overdue[number] = self._orders.pop(number)
        self._fail_all(self._overdue[number], now_ns, failure)

    def _fail_all(self, order: Order, now_ns: int, failure: Failure | None) -> None:
        runs = list(self.blocks.runs(order.slots))
        for run in runs:
            self.blocks.failed(run, failure)
        self._wake(runs, now_ns)

    def _wake(self, runs: Sequence[Run], now_ns: int) -> None:
        for run in runs:
            waiters, run.waiters = run.waiters, []
            for request in waiters:
                if request.waits is run:
                    request.waits = None
                    self.holdings.advance(request, now_ns)
        self._queues.changed()

    def tick(self) -> None:
        """Try stopped lanes again, since an engine gives up a claim without an event."""
        self._queues.changed()

    def reset(self) -> list[Request]:
        """The KV of every block is void: end all announced and unclaimed requests, return these, and empty the index.

        This fetches nothing more for the others: the store may still hold old KV, which a later hint would find here.
        """
        ended = []
        for key, request in list(self.requests.items()):
            if request.announced is not None:
                self.finish(key)
            elif self._flags.expire(key):
                self.finish(key)
                ended.append(request)
            else:
                request.limit, request.final = 0, True
        self.blocks.detach_all()
        self.holdings.settle()
        return ended

    def give_up(self, lane: Lane) -> None:
        """This lane can fetch nothing: requests that wait for it go on with the blocks that they have."""
        while (request := self._queues.head(lane)) is not None:
            self.holdings.stop(request, Failure("overdue"))
        self._queues.changed()

    # --- orders -----------------------------------------------------------------------------------------------------

    def next_order(self, lane: Lane = Lane.MEMORY, most: int | None = None, *, ahead: bool = False) -> Order | None:
        """Return the lane's most urgent blocks for one store call, into free room or room of less urgent requests.

        `most`: blocks of this call, if fewer than the lane's calls may have: then the link is slow, and the call is for
        one request.  `ahead`: for announced requests, in place of hinted ones; one such call at a time, a small one.
        An announced request without room ends with what it has.
        """
        if ahead and any(order.ahead for order in self._orders.values()):
            return None
        digests: list[bytes] = []
        slots = array("I")
        whole = max(1, self._chunk_blocks[lane] // AHEAD_SHARE) if ahead else self._chunk_blocks[lane]
        chunk = min(whole, max(most, whole // SMALLEST_SHARE)) if most else whole
        while self.ready[lane] and len(slots) < chunk:
            request = self._queues.head(lane)
            if request is None or (request.announced is not None) is not ahead:
                break
            taker = self._taker if self._taker is not None and self._taker.wants_work else request
            if self._queues.must_yield(lane, request.urgency) or taker.urgency < request.urgency:
                break
            stop = self._issue(request, lane, digests, slots, chunk)
            self.holdings.advance(request)
            if stop is Stop.LATER:
                break
            if stop is Stop.LANE:
                self._queues.enter(request)
            elif stop is not Stop.FULL and ahead:
                self.stop(request.key)
            elif stop is not Stop.FULL:
                if not slots and self._serve_in_part(request):
                    continue
                self._queues.starve(lane)
                break
            elif chunk < whole or 2 * len(slots) >= chunk:
                break  # this request would wait for the next one's blocks
        if not slots:
            return None
        self._sequence += 1
        order = self._orders[self._sequence] = Order(self._sequence, lane, digests, slots, ahead)
        return order

    def starved(self, lane: Lane) -> bool:
        """Whether a request of this lane waits for room in staging."""
        return self._queues.starved(lane)

    def _issue(self, request: Request, lane: Lane, digests: list[bytes], slots: array[int], chunk: int) -> Stop:
        """Pin this request's next blocks, and add the absent ones to an order of up to `chunk` blocks."""
        while not request.final and request.issued < request.limit and (room := chunk - len(slots)) > 0:
            self.holdings.pin_known(request, request.limit)
            start = request.issued
            if start >= request.limit:
                break
            if self.holdings.room <= 0:
                self.holdings.pause()
                return Stop.LATER
            request.lane = request.lane_of(start)
            if request.lane is not lane:
                return Stop.LANE
            free = array("I")
            stop = self._take_slots(free, 1, request)
            if free:  # most requests find none, which spares them the digests
                wanted = request.digests(start, min(start + room, request.lane_ends(start)))
                stop = self._take_slots(free, self.blocks.missing(wanted), request)
                run = self.blocks.add(wanted[: len(free)], free, lane, request)
                digests += run.digests
                slots += free
                self.holdings.hold(request, run)
            if stop is not Stop.FULL:
                return stop
        return Stop.FULL

    def _take_slots(self, slots: array[int], count: int, request: Request) -> Stop:
        """Take slots for `count` blocks, from other requests if need be; return why it took fewer."""
        self._taker = None if self._taker is request else self._taker
        while len(slots) < count:
            if self.holdings.room <= 0:
                self.holdings.pause()
                self._taker = request
                return Stop.LATER
            if free := self.blocks.take_slots(count - len(slots), request):
                slots += free
            elif not self._take_back(request):
                return Stop.NO_ROOM
        return Stop.FULL

    def _take_back(self, taker: Request) -> bool:
        """Take all blocks of the least urgent request that gives back a slot at once; False if none.

        Only of a request that is less urgent than the taker, and unclaimed.
        """
        self._taker = taker if self.holdings.debts or self.blocks.void else None
        if self._taker is not None:
            return False  # these slots come first, and to it
        urgency, alone = taker.urgency, map(self._numbers.get, self.blocks.sole)
        less = [(its, each) for each in alone if each is not None and (its := each.urgency) > urgency]
        self.holdings.room -= len(less) // 4
        tried = islice((each for _, each in sorted(less, reverse=True)), MAX_TRIES)
        # No engine reads the flag of an announced request.
        request = next((each for each in tried if each.announced is not None or self._flags.take_back(each.key)), None)
        if request is None:
            return False
        self.holdings.take_back(request)
        if request.wants_work:
            self._queues.enter(request)
        else:  # void since a reset
            self.holdings.advance(request)
        return True

    def _serve_in_part(self, request: Request) -> bool:
        """If no slot will be freed, end a request's prefix at the blocks it has; False if waiting can still help.

        It ends this request's prefix if the request holds every slot there is.  Otherwise, if all requests with
        slots wait for each other, it ends the most urgent one's.
        """
        if self._orders or self.holdings.owes:
            return False
        stuck = sum(len(each.slots) for each in self._overdue.values())
        if request.issued < self.blocks.slot_count - stuck - self.blocks.quarantined:
            if any(each.final and each.held for each in self.requests.values()):
                return False
            waiting = [each for each in self.requests.values() if each.held and each.limit >= 0]
            if not waiting:
                return False
            request = min(waiting, key=lambda each: each.urgency)
        self.holdings.stop(request, Failure("no_room"))
        return True

    # --- what others see --------------------------------------------------------------------------------------------

    def gauges(self) -> dict[str, int]:
        """Count requests and orders beside the slots; `leases` are blocks that wait for their fetch."""
        return {
            **self.blocks.gauges(),
            "slots_stuck": sum(len(order.slots) for order in self._overdue.values()),
            "requests": len(self.requests),
            "leases": sum(each.limit - each.issued for each in self.requests.values() if each.wants_work),
            "orders": len(self._orders),
        }

    def check(self) -> set[int]:
        """Assert that requests, orders and the table of blocks agree. Returns the slots of unloaded blocks."""
        for request in self.requests.values():
            runs = list(self.blocks.runs(request.held))
            assert [slot for run in runs for slot in run.slots] == list(request.held), "whole runs"
            digests = tuple(digest for run in runs for digest in run.digests)
            assert digests == request.digests(0, request.issued)
            assert request.lanes == b"".join(bytes([run.lane]) * len(run.slots) for run in runs)
        in_call = {slot for order in (*self._orders.values(), *self._overdue.values()) for slot in order.slots}
        held = [(each.sequence, each.held) for each in self.requests.values()]
        return self.blocks.check([*held, *(each[:2] for each in self.holdings.debts)], in_call)
