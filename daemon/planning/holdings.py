"""The blocks that each request holds in staging, and how many of them its flag publishes. Pure."""

from __future__ import annotations

from array import array
from collections import deque

from ...kv.prompts import Choice
from .blocks import Blocks
from .queues import Queues
from .requests import Broken, Failure, Publication, Request, TakenBack
from .runs import BlockState, Run


class Holdings:
    """Pins, publishes and unpins blocks for requests. `changes`: what became of requests, in order."""

    def __init__(self, blocks: Blocks, queues: Queues) -> None:
        self._blocks, self._queues = blocks, queues
        self.changes: deque[Broken | Publication | TakenBack] = deque()

    def pin_known(self, request: Request, stop: int) -> None:
        """Pin the request's next blocks, up to the first that is neither in staging nor on its way."""
        names, size = request.names, request.prompt.name_bytes
        while request.issued < stop and (run := self._blocks.find(names, size, request.issued, stop)) is not None:
            self.hold(request, run)

    def hold(self, request: Request, run: Run) -> None:
        """Pin the request's next run."""
        self._blocks.pin(run, request.sequence)
        if request.announced is None:
            run.ahead_until_ns = 0
        request.held.extend(run.slots)

    def advance(self, request: Request, now_ns: int = 0) -> None:
        """Publish what the staged blocks show; final once no more will come. `now_ns`: 0 if no bytes arrived."""
        if request.final or request.limit < 0:
            return
        held, start = request.held, request.ready
        ready = start
        for run in self._blocks.runs(held[start:]):
            if run.state is not BlockState.STAGED:
                break
            ready += len(run)
        request.ready = ready
        if now_ns and ready > start:
            request.first_byte_ns = request.first_byte_ns or now_ns
            request.last_byte_ns = now_ns
            self._blocks.join(held, start, ready)
        if ready < request.issued:
            if run.state is BlockState.FAILED:
                request.failure = run.failure
                self.lose(request, range(ready, ready + len(run)))
                return
            if request.waits is not run:
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
        else:
            request.limit = -1
            self.changes.append(Broken(request))

    def choose(self, request: Request, good: int) -> Choice:
        """Give a request the longest prefix there is; of those that it holds, `good` blocks may be part of it."""
        choice, before = request.prompt.choose(), array("I")
        if choice.names is request.names:
            self._unpin(request, min(good, choice.entries))
        else:
            request.names, before, request.held = choice.names, request.held, before
            request.ready = request.published = 0
        request.limit, request.waits = choice.entries, None
        request.on_disk = choice.on_disk if 1 in choice.on_disk else b""
        self.pin_known(request, request.limit)
        self._give_back(request, before)  # after the pins of the same blocks in their new places
        if request.stopped:
            request.limit = request.issued
        self.advance(request)
        if request.wants_work:
            self._queues.enter(request)
        return choice

    def take_back(self, request: Request) -> None:
        """Give up all blocks for now; the request finds those that still lie in staging when its turn comes."""
        self._withdraw(request)
        self.changes.append(TakenBack(request))
        # Nobody looked up the blocks that it found in staging: their runs know the lane.
        lanes = b"".join(bytes([run.lane]) * len(run) for run in self._blocks.runs(request.held))
        request.on_disk = lanes + request.on_disk[len(lanes) :]
        request.ready = request.published = 0
        request.shown = request.prompt.local_blocks
        request.final = False
        request.taken_back += 1
        self._unpin(request, 0)
        if request.stopped:  # nothing is fetched again
            request.limit = 0
            self.advance(request)

    def drop(self, request: Request) -> None:
        """Give up all blocks for good."""
        self._withdraw(request)
        request.final, request.waits = True, None
        self._unpin(request, 0)

    def _withdraw(self, request: Request) -> None:
        """Drop the publications of this request that nobody carried out yet."""
        if self.changes:
            kept = [each for each in self.changes if not isinstance(each, Publication) or each.request is not request]
            self.changes = deque(kept)

    def _unpin(self, request: Request, start: int) -> None:
        dropped = request.held[start:]
        del request.held[start:]
        self._give_back(request, dropped)

    def _give_back(self, request: Request, slots: array[int]) -> None:
        """Remove the request's pins of these slots, which it holds no more."""
        if slots:
            self._blocks.unpin(slots, request.sequence)
            self._queues.changed()
