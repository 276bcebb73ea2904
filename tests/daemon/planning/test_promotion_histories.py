"""Promotion under random events: each entry names a slot with its block, and no device slot is lost."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvprefetch.daemon.planning.requests import Key, Request
from tests.daemon.planning.promoting import HOST, Device, request_of

BLOCKS = 6
NAMES = st.lists(st.integers(0, 5), min_size=1, max_size=BLOCKS, unique=True)


class PromotionMachine(RuleBasedStateMachine):
    """Requests share blocks; each is claimed, unclaimed, taken back and dropped in any order, beside the copies."""

    @initialize(count=st.integers(1, 6), chunk=st.integers(1, 4))
    def start(self, count: int, chunk: int) -> None:
        self.device, self.count = Device(count, chunk), count
        self.number = 0
        self.era = 0  # of weights: a name stands for other bytes in each
        self.pinned: dict[int, tuple[int, set[Key]]] = {}  # name of this era -> host slot, and the requests that pin it
        self.names: dict[Key, list[int]] = {}
        self.free = list(range(HOST))

    def pin(self, name: int, key: Key) -> int:
        slot, holders = self.pinned.setdefault(name, (self.free.pop() if name not in self.pinned else -1, set()))
        holders.add(key)
        return slot

    def unpin(self, key: Key) -> None:
        for name, (slot, holders) in list(self.pinned.items()):
            if key in holders:
                holders.discard(key)
                if not holders:  # another block gets the host slot at once
                    del self.pinned[name]
                    self.device.host[slot] = -2
                    self.free.insert(0, slot)

    def content(self, slot: int) -> int:
        return self.device.host[slot] if slot < HOST else self.device.slots.get(slot, -3)

    @rule(names=NAMES, priority=st.integers(-1, 1), shown=st.integers(1, BLOCKS))
    def hint(self, names: list[int], priority: int, shown: int) -> None:
        self.number += 1
        request = request_of(self.number, names, priority)
        self.names[request.key] = [self.era * 100 + name for name in names]
        self.device.live[request.key] = request
        self.device.tables.entries[request.key] = []
        self.device.tables.claims[request.key] = None
        self.show(request, shown)

    def show(self, request: Request, count: int) -> None:
        names = self.names[request.key]
        start = len(self.device.tables.entries[request.key])
        more = names[start : start + count]
        self.device.publish(request, start, [self.pin(name, request.key) for name in more], more)

    def some(self, data: st.DataObject, *, unclaimed: bool = False) -> Key | None:
        """Draw a live request, if there is one; None also where it is claimed and must not be."""
        key = data.draw(st.sampled_from(sorted(self.device.live))) if self.device.live else None
        return None if unclaimed and key is not None and self.device.tables.claims[key] is not None else key

    @rule(data=st.data(), count=st.integers(1, BLOCKS))
    def progress(self, data: st.DataObject, count: int) -> None:
        if (key := self.some(data, unclaimed=True)) is not None and self.names[key][0] // 100 == self.era:
            self.show(self.device.live[key], count)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        if (key := self.some(data)) is not None:
            self.device.live[key].asked = True
            self.device.promotions.asked(key)

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        if (key := self.some(data, unclaimed=True)) is not None:
            self.device.tables.claim(key)

    @rule(data=st.data())
    def claim_in_between(self, data: st.DataObject) -> None:
        if (key := self.some(data, unclaimed=True)) is not None:
            self.device.tables.claim_next = key

    @rule(data=st.data())
    def unclaim(self, data: st.DataObject) -> None:
        if (key := self.some(data)) is not None:
            self.device.tables.claims[key] = None

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if (key := self.some(data)) is not None:
            self.device.drop(key)
            self.unpin(key)
            if self.device.tables.claim_next == key:
                self.device.tables.claim_next = None

    @rule(data=st.data(), shown=st.integers(0, BLOCKS))
    def take_back(self, data: st.DataObject, shown: int) -> None:
        """Other blocks get its host slots at once; the planner publishes it anew under the same key."""
        if (key := self.some(data, unclaimed=True)) is not None:
            self.device.promotions.dropped(key)
            self.device.tables.entries[key] = []
            self.unpin(key)
            if self.names[key][0] // 100 == self.era:
                self.show(self.device.live[key], shown)

    @rule()
    def pump(self) -> None:
        self.device.order()

    @precondition(lambda self: self.device.orders)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def copied(self, data: st.DataObject, ok: bool) -> None:
        self.device.copy(data.draw(st.integers(0, len(self.device.orders) - 1)), ok=ok)

    @rule(again=st.booleans())
    def promote(self, again: bool) -> None:
        """End all copies, and perhaps make all that have room."""
        while self.device.orders:
            self.device.copy()
        if again:
            self.device.promote()

    @rule()
    def tick(self) -> None:
        self.device.tick()

    @rule(at=st.integers(0, 7))
    def reset(self, at: int) -> None:
        """New weights: unclaimed requests end, and every name stands for other bytes. One draw in eight."""
        if at == 0:
            self.era += 1
            for key in [key for key in self.device.live if self.device.tables.claims[key] is None]:
                self.device.drop(key)
                self.unpin(key)
            self.device.promotions.reset()

    @invariant()
    def every_entry_and_every_claim_holds_its_block(self) -> None:
        for key, entries in self.device.tables.entries.items():
            names = self.names[key]
            for slots in (entries, self.device.tables.claims[key] or []):
                assert [self.content(slot) for slot in slots] == names[: len(slots)]

    @invariant()
    def no_slot_is_lost_or_used_twice(self) -> None:
        self.device.promotions.check()

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        for key in list(self.device.live):
            self.device.drop(key)
        while self.device.orders:
            self.device.copy()
        assert sum(self.device.free_and_idle()) == self.count
        assert self.device.promotions.gauges()["device_copies"] == 0


TestPromotionMachine = PromotionMachine.TestCase
TestPromotionMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
