"""The blocks that each request holds in staging, and how many of them its flag publishes. Pure."""

from __future__ import annotations

from collections import deque

from .blocks import Blocks
from .queues import Queues
from .requests import Publication, Request, TakenBack
from .runs import BlockState, Run


class Holdings:
    """Pins, publishes and unpins blocks for requests. `changes`: publications and requests taken back, in order."""

    def __init__(self, blocks: Blocks, queues: Queues) -> None:
        self._blocks, self._queues = blocks, queues
        self.changes: deque[Publication | TakenBack] = deque()
        self.served: set[int] = set()  # numbers of requests that hold slots and want no more

    def pin_known(self, request: Request, stop: int) -> None:
        """Pin the request's next blocks, up to the first that is neither in staging nor on its way."""
        hashes, size = request.hashes, request.hash_bytes
        while request.issued < stop and (run := self._blocks.find(hashes, size, request.issued, stop)) is not None:
            self.hold(request, run)

    def hold(self, request: Request, run: Run) -> None:
        """Pin the request's next run."""
        self._blocks.pin(run, request.sequence)
        request.held.extend(run.slots)
        request.issued += len(run)

    def advance(self, request: Request, now_ns: int = 0) -> None:
        """Publish the blocks that became contiguous; final once no more will come. `now_ns`: 0 if no bytes arrived."""
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
                request.failure = run.failure
                self.shorten(request, ready)
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
        self.changes.append(Publication(request, start, held[start - local : ready - local], ready, final))
        if final:
            self.end(request)

    def end(self, request: Request) -> None:
        """Fetch and publish nothing more for it."""
        request.final = True
        if request.held:
            self.served.add(request.sequence)

    def shorten(self, request: Request, limit: int) -> None:
        """Give up the blocks from `limit` on."""
        request.limit = limit
        self._unpin(request, limit - request.local)
        request.issued = min(request.issued, limit)

    def take_back(self, request: Request) -> None:
        """Give up all blocks for now; the request finds those that still lie in staging when its turn comes."""
        self._withdraw(request)
        self.changes.append(TakenBack(request.key))
        # Nobody looked up the blocks that it found in staging: their runs know the lane.
        lanes = b"".join(bytes([run.lane]) * len(run) for run in self._blocks.runs(request.held))
        request.on_disk = lanes + request.on_disk[len(lanes) :]
        request.ready = request.issued = request.local
        request.final = False
        request.taken_back += 1
        self.served.discard(request.sequence)
        self._unpin(request, 0)

    def drop(self, request: Request) -> None:
        """Give up all blocks for good."""
        self._withdraw(request)
        self.served.discard(request.sequence)
        request.final, request.waits = True, None
        self._unpin(request, 0)

    def void(self, request: Request) -> None:
        """Keep the blocks that it holds, but fetch and publish nothing more for it."""
        request.limit = request.local
        self.end(request)

    def _withdraw(self, request: Request) -> None:
        """Drop the publications of this request that nobody carried out yet."""
        if self.changes:
            kept = [each for each in self.changes if isinstance(each, TakenBack) or each.request is not request]
            self.changes = deque(kept)

    def _unpin(self, request: Request, start: int) -> None:
        dropped = request.held[start:]
        del request.held[start:]
        if dropped:
            self._blocks.unpin(dropped, request.sequence)
            self._queues.changed()
