"""The blocks that each request holds in staging, and how many of them its flag publishes. Pure.

A request may hold a run for each of its blocks, where an engine hints them in a wrong order.  So one event pins, shows
or gives back so many runs at most, and `settle` goes on with the rest.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ...kv.prompts import Choice
from .blocks import BlockTable
from .queues import Queues
from .requests import Broken, Failure, Publication, Request, TakenBack
from .runs import BlockState, Run

RUNS = 2048  # of one event: some 5 ms


class Debt(NamedTuple):
    """Slots that a request of this number pins and holds no more; it `loaded` these of them.

    `until_ns`: as long as an announcement counts that staged them; otherwise 0.
    """

    number: int
    slots: array[int]
    loaded: Sequence[range] = ()
    until_ns: int = 0


class Holdings:
    """Pins, publishes and unpins blocks for requests. `changes`: what became of requests, in order.

    `room`: runs that this event may still pin, show or give back: RUNS, once its changes were carried out.  `debts`:
    slots that `settle` gives back.  `owes`: there is something to do for `settle`, or for another order.
    """

    def __init__(self, blocks: BlockTable, queues: Queues) -> None:
        self._blocks, self._queues = blocks, queues
        self.changes: deque[Broken | Publication | TakenBack] = deque()
        self.room = RUNS
        self.debts = deque[Debt]()
        self._behind: dict[Request, int] = {}  # to be advanced further, with the time of their last bytes
        self._paused = self.owes = False

    def pause(self) -> None:
        """This event did its share, and another order goes on."""
        self._paused = self.owes = True

    def settle(self) -> None:
        """Go on with what earlier events left."""
        self._paused = False
        self._pay()
        if freed := self._blocks.free_void(self.room):
            self.room -= freed
            self._queues.changed()
        while self._behind and self.room > 0:
            request = next(iter(self._behind))
            self.advance(request, self._behind.pop(request))
        self._note_owed()

    def _note_owed(self) -> None:
        self.owes = bool(self._behind or self._paused or self.debts or self._blocks.void)

    def _pay(self) -> None:
        """Unpin slots, the last ones of a request first."""
        while self.debts and self.room > 0:
            number, slots, loaded, until_ns = self.debts[0]
            start = len(slots)
            while start > 0 and self.room > 0:
                start = max(0, start - len(self._blocks.at(slots[start - 1]).slots))
                self.room -= 1
            part = slots[start:]
            del slots[start:]
            for some in loaded:
                if some and some.stop > start:
                    self._blocks.loaded(part, max(0, some.start - start), some.stop - start)
            if until_ns:
                self._blocks.ahead(part, until_ns)
            self._blocks.unpin(part, number)
            self._queues.changed()
            if not slots:
                self.debts.popleft()

    def pin_known(self, request: Request, stop: int) -> None:
        """Pin the request's next blocks, up to the first that is neither in staging nor on its way."""
        names, size, find = request.names, request.prompt.name_bytes, self._blocks.find
        while request.issued < stop and self.room > 0 and (run := find(names, size, request.issued, stop)) is not None:
            self.hold(request, run)
            self.room -= 1

    def hold(self, request: Request, run: Run) -> None:
        self._blocks.pin(run, request.sequence)
        if request.announced is None:
            run.ahead_until_ns = 0
        request.held.extend(run.slots)
        request.issued += len(run.slots)
        request.lanes += bytes([run.lane]) * len(run.slots)

    def advance(self, request: Request, now_ns: int = 0) -> None:
        """Publish what the staged blocks show; final once no more will come. `now_ns`: 0 if no bytes arrived."""
        if request.final or request.limit < 0:
            return
        held, start = request.held, request.ready
        ready = start
        while ready < len(held) and self.room > 0 and (run := self._blocks.at(held[ready])).state is BlockState.STAGED:
            ready += len(run.slots)
            self.room -= 1
        request.ready = ready
        if now_ns and ready > start:
            request.first_byte_ns = request.first_byte_ns or now_ns
            request.last_byte_ns = now_ns
            self._blocks.join(held, start, ready)
        if ready < request.issued:
            run = self._blocks.at(held[ready])
            if run.state is BlockState.STAGED:
                self._behind[request] = now_ns or self._behind.get(request, 0)
                self.owes = True
            elif run.state is BlockState.FAILED:
                request.failure = run.failure
                self.lose(request, range(ready, ready + len(run.slots)))
                return
            elif request.waits is not run:
                run.waiters.append(request)
                request.waits = run
        final, shown = ready >= request.limit, request.prompt.shown(ready)
        if final or shown > request.shown:
            slots, published = held[request.published : ready], request.published
            request.published, request.shown = ready, shown
            self.changes.append(Publication(request, published, slots, shown, final))
        request.final = final

    def show_nothing(self, request: Request) -> None:
        """End it with its local blocks."""
        self._unpin(request, 0)
        request.ready = request.published = request.limit = 0
        self.advance(request)

    def stop(self, request: Request, failure: Failure) -> None:
        """No more blocks can come: go on with those that it has."""
        request.failure = failure
        self.lose(request, range(request.issued, request.limit))

    def lose(self, request: Request, blocks: range) -> None:
        """These blocks will not come: go on with the next shorter prefix."""
        request.prompt.lost(blocks)
        if request.prompt.partial:
            self.choose(request, min(blocks.start, request.issued))
            if request.wants_work:
                self._queues.enter(request)
        else:
            request.limit = -1
            self.changes.append(Broken(request))

    def choose(self, request: Request, good: int) -> Choice:
        """Give a request the longest prefix there is; of those that it holds, `good` blocks may be part of it.

        The caller enters a request that wants work then.
        """
        choice, before = request.prompt.choose(), array("I")
        if choice.names is request.names:
            self._unpin(request, min(good, choice.entries))
        else:
            request.names, before, request.held, request.issued = choice.names, request.held, before, 0
            request.lanes.clear()
            request.ready = request.published = 0
        request.limit, request.waits = choice.entries, None
        request.on_disk = choice.on_disk if 1 in choice.on_disk else b""
        self.pin_known(request, request.limit)
        self._give_back(request, before)  # after the pins of the same blocks in their new places
        if request.stopped:
            request.limit = request.issued
        self.advance(request)
        return choice

    def take_back(self, request: Request) -> None:
        """Give up all blocks for now; the request finds those that still lie in staging when its turn comes."""
        self._withdraw(request)
        self.changes.append(TakenBack(request))
        # Nobody looked up the blocks that it found in staging: their runs know the lane.
        request.on_disk = bytes(request.lanes) + request.on_disk[request.issued :]
        request.ready = request.published = 0
        request.shown = request.prompt.local_blocks
        request.final = False
        request.taken_back += 1
        self._unpin(request, 0)
        if request.stopped:  # nothing is fetched again
            request.limit = 0
            self.advance(request)

    def drop(self, request: Request, loaded: Sequence[range]) -> None:
        """Give up all blocks for good; the engine loaded these."""
        self._withdraw(request)
        request.final, request.waits = True, None
        until_ns = request.announced.until_ns if request.announced is not None else 0
        self._unpin(request, 0, loaded, until_ns)

    def _withdraw(self, request: Request) -> None:
        """Drop the publications of this request that nobody carried out yet."""
        if self.changes:
            kept = [each for each in self.changes if not isinstance(each, Publication) or each.request is not request]
            self.changes = deque(kept)

    def _unpin(self, request: Request, start: int, loaded: Sequence[range] = (), until_ns: int = 0) -> None:
        dropped, request.issued = request.held[start:], min(start, request.issued)
        del request.held[start:], request.lanes[start:]
        self._give_back(request, dropped, loaded, until_ns)

    def _give_back(self, request: Request, slots: array[int], loaded: Sequence[range] = (), until_ns: int = 0) -> None:
        """Remove the request's pins of these slots, which it holds no more."""
        if slots:
            self.debts.append(Debt(request.sequence, slots, loaded, until_ns))
            self._pay()
            self._note_owed()
