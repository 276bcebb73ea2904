"""The simulation's daemon: the real planner, driven as an engine's epoch drives it, with real turns on simulated links.

No other files but flags.py and groups.py know the planner's interface.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.simulate import groups as rules
from benchmarks.simulate.events import Event, Loop, ns
from benchmarks.simulate.flags import Flag, Flags
from benchmarks.simulate.link import Link, MediumModel
from benchmarks.simulate.workload import SimRequest, StoreContents
from kvprefetch.daemon.planning.planner import Planner
from kvprefetch.daemon.planning.requests import Broken, Key, Order, Publication
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.store.pace import Pace, Read
from kvprefetch.daemon.work.call_size import CallSize
from kvprefetch.daemon.work.rates import Meter
from kvprefetch.kv.groups import Groups
from kvprefetch.shmring.wire.records import FlagState

MAX_STUCK = 4  # calls past their deadline; with so many no other starts
TICK_NS = 100_000_000  # daemon/runtime/loop.py


@dataclass(frozen=True, slots=True)
class NodeModel:
    """The daemon and the store: staging, threads, delays, media, and when the store stands still."""

    staging_blocks: int
    chunk_blocks: int
    fetch_threads: int
    """Calls under way for blocks in the store's memory."""
    memory: MediumModel
    disk: MediumModel
    disk_threads: int = 1
    """The same for the lane of blocks on disks. 0: look-ups do not say where blocks lie."""
    look_up_s: float = 0.0005
    """One look-up, on the only thread for them."""
    knows_pace: bool = False
    """The daemon has fetched over this link before."""
    turns: bool = True
    """Reads from memory begin one after the other, as the daemon's do over TCP."""
    message_s: float = 0.00005
    """From a push into the hint ring until the daemon has handled it."""
    rpc_timeout_s: float = 2.0
    """A look-up of a frozen store ends after this and counts as a miss."""
    call_deadline_s: float = 0.0
    """After this the requests of a fetch go on without it, and another call takes its place. 0: never."""
    freezes_s: tuple[tuple[float, float], ...] = ()
    """(start, length) of each time the store does nothing."""


@dataclass(slots=True)
class NodeCounters:
    """Counts of blocks and calls; each fetched block ends up loaded, wasted, or staged unloaded."""

    hints: int = 0
    fetched: int = 0
    failed: int = 0
    loaded_first: int = 0
    """Fetched blocks at their first load."""
    wasted: int = 0
    """Fetched blocks whose slot was reused before any load."""
    calls: int = 0
    overdue: int = 0
    """Calls that missed their deadline."""
    dropped: int = 0
    """Calls that never began: the engine stopped the fetch before."""
    look_up_timeouts: int = 0
    taken_back: int = 0
    """Times that a request lost its staged blocks and waited for them again."""


class Node:
    """One daemon that serves one engine. It calls `changed(key)` whenever that hint's flag moved."""

    def __init__(
        self,
        loop: Loop,
        model: NodeModel,
        contents: StoreContents,
        block_bytes: int,
        changed: Callable[[Key], None],
        groups: Groups,
    ) -> None:
        self._loop, self._model, self._contents, self._block_bytes = loop, model, contents, block_bytes
        self._memory, self._disk = Link(loop, model.memory), Link(loop, model.disk)
        self._pace = Pace()
        self._sizes, self._meters = [CallSize() for _ in Lane], [Meter() for _ in Lane]
        self._flags = Flags(changed)
        self._planner = Planner(model.staging_blocks, self._flags, chunk_blocks=model.chunk_blocks)
        self._groups = groups
        self._prompts = rules.Prompts(self._planner, groups)
        self._message_ns, self._look_up_ns = ns(model.message_s), ns(model.look_up_s)
        self._requests: dict[Key, SimRequest] = {}
        self._look_ups: deque[Key] = deque()
        self._looking_up = False
        self._frozen_until_ns = 0
        self._in_flight = {Lane.MEMORY: 0, Lane.DISK: 0}
        self._ticking = False
        self._stuck: set[int] = set()
        self._reads: dict[int, Read] = {}  # of orders whose calls take turns
        self._dropped: set[int] = set()  # orders whose calls never begin
        self._generation = 0
        self._direct: deque[Callable[[], None]] = deque()
        self._unloaded: set[int] = set()  # slots with a block that was fetched and not loaded since
        self.counters = NodeCounters()
        if model.knows_pace:
            second = round(model.memory.bytes_per_s)
            self._sizes[Lane.MEMORY].fetched(second, ns(1), (second, ns(1)))
        for start_s, length_s in model.freezes_s:
            loop.at(ns(start_s), partial(self._freeze, ns(start_s + length_s)))

    # --- what the engine does ---------------------------------------------------------------------------------------

    def hint(self, request: SimRequest, local_blocks: int) -> Key:
        """Push a hint; the daemon sees it a moment later."""
        self._generation += 1
        key = (0, self._generation)
        self._flags.of[key] = Flag()
        self._loop.after(self._message_ns, partial(self._hinted, key, request, local_blocks))
        return key

    def ask(self, key: Key) -> None:
        self._loop.after(self._message_ns, partial(self._asked, key))

    @property
    def whole(self) -> bool:
        """Whether a prefix is of use only with all of its blocks, as with several KV groups."""
        return not self._groups.partial

    def stop(self, key: Key) -> None:
        self._loop.after(self._message_ns, partial(self._stopped, key))

    def flag(self, key: Key) -> Flag:
        return self._flags.of[key]

    def claim(self, key: Key) -> None:
        self._flags.of[key].state = FlagState.CLAIMED

    def unclaim(self, key: Key) -> None:
        self._flags.of[key].state = FlagState.READY

    def loaded(self, key: Key, start: int, stop: int) -> None:
        """The engine has copied blocks [start, stop) of this hint."""
        flag = self._flags.of[key]
        flag.loaded = range(start, stop)
        entries = self._prompts.loaded(key, flag.loaded)
        for slot in (flag.slots[entry] for some in entries for entry in some):
            if slot in self._unloaded:
                self._unloaded.remove(slot)
                self.counters.loaded_first += 1

    def finish(self, key: Key, report: Callable[[int], None] | None = None) -> None:
        """Give the hint up, loaded or not; `report` gets the time of its last byte (0: no fetch was for it)."""
        flag = self._flags.of[key]
        flag.state = FlagState.RELEASED if flag.state is FlagState.CLAIMED else FlagState.CANCELLED
        self._loop.after(self._message_ns, partial(self._finished, key, report))

    def look_up(self, done: Callable[[bool], None]) -> None:
        """Ask the store without the daemon; calls `done(False)` if it does not answer in time."""
        stall_ns = max(0, self._frozen_until_ns - self._loop.now_ns)
        timeout_ns = ns(self._model.rpc_timeout_s)
        answered = stall_ns <= timeout_ns
        self._loop.after(stall_ns + self._look_up_ns if answered else timeout_ns, partial(done, answered))

    def load_directly(self, request: SimRequest, start: int, stop: int, done: Callable[[int], None]) -> None:
        """Load blocks [start, stop) without the daemon; `done` gets the number of leading blocks that came.

        One load runs at a time, as on the single load thread of vLLM's own connector. Of several KV groups all come or
        none counts.
        """
        names, count, whole = rules.names(self._groups, request, start, stop), stop - start, self.whole
        ended = (lambda good: done(count if good else 0)) if whole else done
        self._direct.append(partial(self._load_directly, names, ended, whole=whole))
        if len(self._direct) == 1:
            self._direct[0]()

    def _load_directly(self, digests: Sequence[bytes], done: Callable[[int], None], *, whole: bool) -> None:
        lost = (at for at, digest in enumerate(digests) if self._contents.lost(digest))
        good = next((0 if whole else at for at in lost), len(digests))

        def complete() -> None:
            self._direct.popleft()
            if self._direct:
                self._direct[0]()
            self.counters.fetched += len(digests)
            self.counters.loaded_first += good
            self.counters.wasted += len(digests) - good
            done(good)

        self._transfer([self._contents.on_disk(digest) for digest in digests], complete)

    # --- what the daemon does ---------------------------------------------------------------------------------------

    def _hinted(self, key: Key, request: SimRequest, local_blocks: int) -> None:
        if self._flags.of[key].state is not FlagState.HINTED:
            return
        self.counters.hints += 1
        request.seen_ns = self._loop.now_ns
        self._requests[key] = request
        self._prompts.hint(key, request, local_blocks)
        self._look_ups.append(key)
        self._next_look_up()

    def _next_look_up(self) -> None:
        if self._looking_up or not self._look_ups:
            return
        self._looking_up = True
        key = self._look_ups.popleft()
        stall_ns = max(0, self._frozen_until_ns - self._loop.now_ns)
        timeout_ns = ns(self._model.rpc_timeout_s)
        if stall_ns > timeout_ns:
            self.counters.look_up_timeouts += 1
            self._loop.after(timeout_ns, partial(self._looked_up, key, False))
        else:
            self._loop.after(stall_ns + self._look_up_ns, partial(self._looked_up, key, True))

    def _looked_up(self, key: Key, answered: bool) -> None:
        self._looking_up = False
        request = self._requests.get(key)
        if request is not None:
            request.looked_up_ns = self._loop.now_ns
            self._planner.block_ns = [each.ns_per_byte * self._block_bytes for each in self._sizes]
            if key in self._planner.requests:
                lies_on_disk = self._contents.on_disk if self._model.disk_threads else None
                self._flags.of[key].found = self._prompts.looked_up(key, request if answered else None, lies_on_disk)
        self._next_look_up()
        self._pump()

    def _stopped(self, key: Key) -> None:
        for number in self._planner.stop(key):
            if (asked := self._reads.get(number)) is None or asked.begun:
                break
            self._dropped.add(number)
            self.counters.dropped += 1
            self._planner.drop(number)
        self._pump()

    def _asked(self, key: Key) -> None:
        self._planner.ask(key)
        self._pump()

    def _finished(self, key: Key, report: Callable[[int], None] | None) -> None:
        loaded = self._flags.of[key].loaded
        request = self._planner.finish(key, *self._prompts.loaded(key, loaded))
        self._prompts.end(key)
        self.counters.taken_back += request.taken_back if request is not None else 0
        if report is not None:
            report(request.last_byte_ns if request is not None else 0)
        self._requests.pop(key, None)
        del self._flags.of[key]
        self._pump()

    def _pump(self) -> None:
        """Start as many fetches as there are threads, and tick as long as requests are left."""
        self._publish()
        for lane, threads in ((Lane.MEMORY, self._model.fetch_threads), (Lane.DISK, self._model.disk_threads)):
            while self._in_flight[lane] < threads and len(self._stuck) < MAX_STUCK and self._planner.wants(lane):
                most = self._sizes[lane].blocks(self._block_bytes) if lane is Lane.MEMORY else None
                order = self._planner.next_order(lane, most)
                self._publish()
                if order is None:
                    break
                self._fetch(order)
        if not self._ticking and self._planner.requests:
            self._ticking = True
            self._loop.after(TICK_NS, self._tick)

    def _publish(self) -> None:
        while (change := self._planner.next_change()) is not None:
            if isinstance(change, Publication) and not self._flags.publish(change):
                self._planner.refused(change.request)
            elif isinstance(change, Broken):
                key = change.request.key
                if self._planner.requests.get(key) is change.request:
                    self._flags.of[key].found = self._prompts.choose(key)

    def _tick(self) -> None:
        self._ticking = False
        self._planner.tick()
        self._pump()

    def _fetch(self, order: Order) -> None:
        self.counters.calls += 1
        self._in_flight[order.lane] += 1
        began_ns = self._loop.now_ns
        self._meters[order.lane].began(began_ns)
        disk = [self._contents.on_disk(digest) for digest in order.digests]
        for slot in order.slots:
            if slot in self._unloaded:
                self._unloaded.remove(slot)
                self.counters.wasted += 1
        deadline = None
        if self._model.call_deadline_s:
            deadline = self._loop.after(ns(self._model.call_deadline_s), partial(self._overdue, order))
        fetched = partial(self._fetched, order, deadline, began_ns)
        if self._model.turns and (size := disk.count(False) * self._block_bytes):
            self._reads[order.number] = self._pace.ask("memory", size, self._loop.now_ns)
            self._read(order.number, disk, fetched)
        else:
            self._transfer(disk, fetched)

    def _read(self, number: int, disk: Sequence[bool], done: Callable[[], None]) -> None:
        """Run one store call when it is its turn, and see its end at once; a dropped one ends at its next look."""
        asked, came = self._reads[number], number not in self._dropped

        def ended() -> None:
            asked.looked_ns = self._loop.now_ns
            self._pace.ended(asked, self._loop.now_ns, came=came)
            del self._reads[number]
            done()

        if not came:
            ended()
        elif self._pace.turn(asked, self._loop.now_ns):
            self._transfer(disk, ended)
        else:
            self._loop.at(asked.look_ns, partial(self._read, number, disk, done))

    def _overdue(self, order: Order) -> None:
        self.counters.overdue += 1
        self._stuck.add(order.number)
        self._in_flight[order.lane] -= 1
        self._meters[order.lane].ended(self._loop.now_ns)
        self._planner.overdue(order.number, self._loop.now_ns)
        self._pump()

    def _transfer(self, disk: Sequence[bool], done: Callable[[], None]) -> None:
        """Run one store call; `disk` says which blocks lie on disk. It takes as long as its slower part."""
        parts = [(self._disk, sum(disk)), (self._memory, len(disk) - sum(disk))]
        left = sum(count > 0 for _, count in parts)

        def part_done() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                done()

        for link, count in parts:
            if count:
                link.transfer(count * self._block_bytes, part_done)

    def _fetched(self, order: Order, deadline: Event | None, began_ns: int) -> None:
        now, overdue = self._loop.now_ns, order.number in self._stuck
        self._stuck.discard(order.number)
        if not overdue:
            self._in_flight[order.lane] -= 1
        if deadline is not None:
            deadline.cancel()
        came = order.number not in self._dropped
        self._dropped.discard(order.number)
        results = [came and not self._contents.lost(digest) for digest in order.digests]
        for slot, ok in zip(order.slots, results, strict=True):
            if ok:
                self.counters.fetched += 1
                if overdue:
                    self.counters.wasted += 1
                else:
                    self._unloaded.add(slot)
            elif came:
                self.counters.failed += 1
        size, meter = sum(results) * self._block_bytes, self._meters[order.lane]
        if not overdue:
            meter.ended(now)
        meter.add(size)
        if came:
            self._sizes[order.lane].fetched(size, now - began_ns, meter.total(now))
        self._planner.fetched(order.number, results, now)
        self._pump()

    def _freeze(self, until_ns: int) -> None:
        self._frozen_until_ns = max(self._frozen_until_ns, until_ns)
        for link in (self._memory, self._disk):
            link.freeze(True)
        self._loop.at(until_ns, self._thaw)

    def _thaw(self) -> None:
        if self._loop.now_ns >= self._frozen_until_ns:
            for link in (self._memory, self._disk):
                link.freeze(False)

    # --- counts -----------------------------------------------------------------------------------------------------

    @property
    def staged_unloaded(self) -> int:
        """Blocks in staging that were fetched and never loaded."""
        return len(self._unloaded)

    def gauges(self) -> dict[str, int]:
        return self._planner.gauges()
