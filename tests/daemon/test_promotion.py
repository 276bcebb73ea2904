"""Promotion: the urgent get the device slots, nobody reads a slot that is not its block's, and none is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvprefetch.daemon.planning.promotion import CopyOrder, Promotions
from kvprefetch.daemon.planning.requests import Key, Request

HOST = 100  # host slots come first
LOCAL = 2  # blocks that the engine has itself before those that are named here
BLOCKS = 6


def digest(name: int) -> bytes:
    return name.to_bytes(8, "big")


def request_of(number: int, names: Sequence[int], priority: int = 0) -> Request:
    hashes = b"".join(digest(name) for name in (*range(1_000_000, 1_000_000 + LOCAL), *names))
    return Request((number, 1), hashes, 8, LOCAL + len(names), LOCAL, priority, number)


@dataclass
class Tables:
    """Slot tables from block LOCAL on, and claims, as the engine sees them.

    `claim_next` is claimed between a move and the look after it.
    """

    entries: dict[Key, list[int]] = field(default_factory=dict)
    claims: dict[Key, list[int] | None] = field(default_factory=dict)
    claim_next: Key | None = None

    def move(self, key: Key, moves: Sequence[tuple[int, int]]) -> None:
        if self.claim_next == key:  # before the fence: it still reads the old entries
            self.claim(key)
        for block, slot in moves:
            assert block >= LOCAL
            self.entries[key][block - LOCAL] = slot

    def unclaimed(self, key: Key) -> bool:
        return self.claims[key] is None

    def claim(self, key: Key) -> None:
        self.claims[key] = list(self.entries[key])
        self.claim_next = None


class Device:
    """Promotions over the tables, with a device that copies when told."""

    def __init__(self, count: int, chunk: int = 4) -> None:
        self.tables = Tables()
        self.promotions = Promotions(HOST, count, self.tables, chunk_blocks=chunk)
        self.host: dict[int, int] = {}  # host slot -> name
        self.slots: dict[int, int] = {}  # device slot -> name
        self.orders: list[CopyOrder] = []
        self.live: dict[Key, Request] = {}

    def publish(self, request: Request, start: int, slots: Sequence[int], names: Sequence[int]) -> None:
        self.live[request.key] = request
        self.host.update(zip(slots, names, strict=True))
        entries = self.promotions.published(request, LOCAL + start, slots)
        self.tables.entries.setdefault(request.key, []).extend(entries)
        self.tables.claims.setdefault(request.key, None)

    def order(self) -> CopyOrder | None:
        order = self.promotions.next_order()
        if order is not None:
            self.orders.append(order)
        return order

    def copy(self, at: int = 0, *, ok: bool = True) -> None:
        order = self.orders.pop(at)
        for host, device in order.slots:
            self.slots[device] = self.host[host] if ok else -1
        self.promotions.copied(order.number, ok=ok)

    def promote(self) -> None:
        while self.order() is not None:
            self.copy()

    def drop(self, key: Key) -> None:
        del self.live[key], self.tables.entries[key], self.tables.claims[key]
        self.promotions.dropped(key)

    def on_device(self, request: Request) -> int:
        return sum(slot >= HOST for slot in self.tables.entries[request.key])


def test_a_published_request_is_copied_and_then_named() -> None:
    device = Device(4)
    request = request_of(1, [7, 8, 9])
    device.publish(request, 0, [5, 6, 7], [7, 8, 9])
    order = device.order()
    assert order is not None
    assert order.slots == [(5, HOST), (6, HOST + 1), (7, HOST + 2)]
    assert device.tables.entries[request.key] == [5, 6, 7]
    device.copy()
    assert device.tables.entries[request.key] == [HOST, HOST + 1, HOST + 2]
    assert device.order() is None
    device.drop(request.key)
    gauges = device.promotions.gauges()
    assert (gauges["device_slots_free"], gauges["device_slots_idle"]) == (1, 3)


def test_what_is_on_the_device_already_is_named_at_once() -> None:
    device = Device(4)
    first, second = request_of(1, [7, 8]), request_of(2, [7, 8, 9])
    device.publish(first, 0, [0, 1], [7, 8])
    device.promote()
    device.drop(first.key)
    device.publish(second, 0, [2, 3, 4], [7, 8, 9])
    assert device.tables.entries[second.key] == [HOST, HOST + 1, 4]


def test_room_goes_by_urgency_and_is_taken_from_the_least_urgent() -> None:
    device = Device(4, chunk=2)
    requests = [request_of(number, [10 * number + i for i in range(4)]) for number in (1, 2, 3)]
    for request in requests[1:]:
        device.publish(request, 0, list(range(4)), [10 * request.sequence + i for i in range(4)])
        device.promote()
    assert [device.on_device(request) for request in requests[1:]] == [4, 0]
    device.publish(requests[0], 0, [8, 9, 10, 11], [10, 11, 12, 13])
    device.promote()
    assert [device.on_device(request) for request in requests] == [4, 0, 0]
    requests[2].asked = True
    device.promotions.asked(requests[2].key)
    device.promote()
    assert [device.on_device(request) for request in requests] == [0, 0, 4]


def test_a_copy_that_comes_after_the_claim_is_kept_for_others() -> None:
    device = Device(2)
    request = request_of(1, [1, 2])
    device.publish(request, 0, [0, 1], [1, 2])
    assert device.order() is not None
    device.tables.claim(request.key)
    device.copy()
    assert device.tables.entries[request.key] == [0, 1]
    assert device.promotions.named(request.key) == 0
    gauges = device.promotions.gauges()
    assert (gauges["device_slots_free"], gauges["device_slots_idle"]) == (0, 2)


def test_a_claimed_request_keeps_what_it_may_have_read() -> None:
    device = Device(2)
    late, early = request_of(2, [1, 2]), request_of(1, [3, 4])
    device.publish(late, 0, [0, 1], [1, 2])
    device.promote()
    device.publish(early, 0, [2, 3], [3, 4])
    device.tables.claim_next = late.key
    device.promote()
    assert device.tables.claims[late.key] == [HOST, HOST + 1]
    assert device.on_device(early) == 0
    assert device.tables.entries[late.key] == [0, 1]
    device.drop(late.key)
    device.promote()
    assert device.on_device(early) == 2


def test_a_request_that_gave_its_claim_up_is_promoted_after_all() -> None:
    """An answer that the scheduler finds no room for is taken back; until then every pass claims anew."""
    device = Device(4, chunk=2)
    request = request_of(1, [1, 2, 3, 4])
    device.publish(request, 0, [0, 1, 2, 3], [1, 2, 3, 4])
    device.order()
    device.tables.claim(request.key)
    device.copy()
    assert device.order() is None
    device.promotions.tick()
    assert device.order() is None
    device.tables.claims[request.key] = None
    device.promotions.tick()
    device.promote()
    assert sorted(device.tables.entries[request.key]) == [HOST, HOST + 1, HOST + 2, HOST + 3]
    device.drop(request.key)
    device.promotions.tick()
    assert device.promotions.gauges()["device_slots_idle"] == 4


def test_what_was_sent_back_just_before_a_claim_is_named_again_when_that_is_given_up() -> None:
    device = Device(2)
    late, early = request_of(2, [1, 2]), request_of(1, [3, 4])
    device.publish(late, 0, [0, 1], [1, 2])
    device.promote()
    device.publish(early, 0, [2, 3], [3, 4])
    device.tables.claim_next = late.key
    device.promote()
    device.tables.claims[late.key] = None
    device.drop(early.key)
    device.promotions.tick()
    assert device.on_device(late) == 2


def test_a_copy_whose_requests_are_gone_is_void() -> None:
    """Nothing pinned its host slot any more while it was copied."""
    device = Device(2)
    first, second = request_of(1, [1]), request_of(2, [1])
    device.publish(first, 0, [0], [1])
    assert device.order() is not None
    device.drop(first.key)
    device.host[0] = 99
    device.copy()
    device.publish(second, 0, [1], [1])
    assert device.tables.entries[second.key] == [1]
    device.promote()
    assert device.slots[device.tables.entries[second.key][0]] == 1


def test_after_a_reset_old_copies_are_not_found_nor_made() -> None:
    device = Device(4)
    old, new = request_of(1, [1, 2]), request_of(2, [1, 2])
    device.publish(old, 0, [0], [1])
    device.promote()
    device.tables.claim(old.key)
    device.promotions.reset()
    device.publish(old, 1, [1], [2])
    device.tables.claims[old.key] = None
    device.promotions.asked(old.key)
    assert device.order() is None
    device.publish(new, 0, [2, 3], [1, 2])
    assert device.tables.entries[new.key] == [2, 3]


def test_a_device_that_fails_is_given_up_and_everyone_sent_back_to_the_host() -> None:
    device = Device(4, chunk=1)
    request = request_of(1, [1, 2, 3])
    device.publish(request, 0, [0, 1, 2], [1, 2, 3])
    device.order()
    device.copy()
    device.order()
    device.copy(ok=False)
    assert device.on_device(request) == 1
    device.promotions.close()
    assert device.tables.entries[request.key] == [0, 1, 2]
    device.publish(request_of(2, [1]), 0, [3], [1])
    assert not device.promotions.wanted
    device.drop(request.key)
    assert device.promotions.gauges()["device_slots_free"] == 4


def test_what_is_taken_back_and_published_again_is_named_where_it_lies_by_then() -> None:
    """In other host slots, while the copy of one block is under way and that of another is there."""
    device = Device(4, chunk=1)
    request = request_of(1, [5, 6])
    device.publish(request, 0, [0, 1], [5, 6])
    device.order()
    device.copy()
    device.order()
    device.promotions.dropped(request.key)
    device.tables.entries[request.key].clear()
    device.host[1] = -2
    device.copy()
    device.publish(request, 0, [2, 3], [5, 6])
    assert device.tables.entries[request.key] == [HOST, 3], "the copy that nobody waited for is void"
    device.promote()
    [_, again] = device.tables.entries[request.key]
    assert again >= HOST
    assert device.slots[again] == 6
    device.drop(request.key)
    gauges = device.promotions.gauges()
    assert (gauges["device_slots_free"], gauges["device_slots_idle"]) == (2, 2)


def test_a_digest_that_stands_twice_in_a_hint_is_copied_once() -> None:
    device = Device(4)
    request = request_of(1, [5, 5, 5])
    device.publish(request, 0, [0, 0, 0], [5, 5, 5])
    device.promote()
    assert device.tables.entries[request.key] == [HOST, 0, 0]
    device.drop(request.key)
    assert device.promotions.gauges()["device_slots_idle"] == 1


@pytest.mark.parametrize("waiting", [100, 1600])
def test_a_publication_costs_the_same_however_many_wait(waiting: int) -> None:
    """Counted in looks at flags: what the full device costs one more request does not grow with the queue."""
    device = Device(4)
    looks = 0
    unclaimed = device.tables.unclaimed

    def counted(key: Key) -> bool:
        nonlocal looks
        looks += 1
        return unclaimed(key)

    device.tables.unclaimed = counted  # type: ignore[method-assign]
    for number in range(1, waiting):
        device.publish(request_of(number, [number * 10 + i for i in range(4)]), 0, [0, 1, 2, 3], [0] * 4)
        device.promote()
    assert looks < 4 * waiting


class PromotionMachine(RuleBasedStateMachine):
    """Requests come, are claimed, un-claimed, taken back and dropped while copies are made, in any order; blocks are
    shared.
    """

    @initialize(count=st.integers(1, 6), chunk=st.integers(1, 4))
    def start(self, count: int, chunk: int) -> None:
        self.device, self.count = Device(count, chunk), count
        self.number = 0
        self.era = 0  # of weights: what a name stands for
        self.pinned: dict[int, tuple[int, set[Key]]] = {}  # name of this era -> host slot and who pins it
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
                if not holders:  # the host slot is another block's at once
                    del self.pinned[name]
                    self.device.host[slot] = -2
                    self.free.insert(0, slot)

    def content(self, key: Key, slot: int) -> int:
        return self.device.host[slot] if slot < HOST else self.device.slots.get(slot, -3)

    @rule(names=st.lists(st.integers(0, 5), min_size=1, max_size=BLOCKS, unique=True), priority=st.integers(-1, 1),
          shown=st.integers(1, BLOCKS))  # fmt: skip
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

    def some(self, data: st.DataObject) -> Key | None:
        return data.draw(st.sampled_from(sorted(self.device.live))) if self.device.live else None

    @rule(data=st.data(), count=st.integers(1, BLOCKS))
    def progress(self, data: st.DataObject, count: int) -> None:
        key = self.some(data)
        if key is not None and self.device.tables.claims[key] is None and self.names[key][0] // 100 == self.era:
            self.show(self.device.live[key], count)

    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        if (key := self.some(data)) is not None:
            self.device.live[key].asked = True
            self.device.promotions.asked(key)

    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        if (key := self.some(data)) is not None and self.device.tables.claims[key] is None:
            self.device.tables.claim(key)

    @rule(data=st.data())
    def claim_in_between(self, data: st.DataObject) -> None:
        if (key := self.some(data)) is not None and self.device.tables.claims[key] is None:
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
        """Its host slots are others' at once; it is published anew under the same key."""
        if (key := self.some(data)) is not None and self.device.tables.claims[key] is None:
            self.device.promotions.dropped(key)
            self.device.tables.entries[key] = []
            self.unpin(key)
            if self.names[key][0] // 100 == self.era:
                self.show(self.device.live[key], shown)

    @rule()
    def pump(self) -> None:
        if self.device.promotions.wanted:
            self.device.order()

    @precondition(lambda self: self.device.orders)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]))
    def copied(self, data: st.DataObject, ok: bool) -> None:
        self.device.copy(data.draw(st.integers(0, len(self.device.orders) - 1)), ok=ok)

    @rule(again=st.booleans())
    def promote(self, again: bool) -> None:
        """Everything that has room, there at once."""
        while self.device.orders:
            self.device.copy()
        if again and self.device.promotions.wanted:
            self.device.promote()

    @rule()
    def tick(self) -> None:
        self.device.promotions.tick()

    @rule(at=st.integers(0, 7))
    def reset(self, at: int) -> None:
        """New weights: the unclaimed are dropped, and every name stands for other bytes."""
        if at:
            return
        self.era += 1
        for key in [key for key in self.device.live if self.device.tables.claims[key] is None]:
            self.device.drop(key)
            self.unpin(key)
        self.device.promotions.reset()

    @invariant()
    def every_entry_and_every_claim_holds_its_block(self) -> None:
        for key, entries in self.device.tables.entries.items():
            names = self.names[key]
            assert [self.content(key, slot) for slot in entries] == names[: len(entries)]
            claim = self.device.tables.claims[key] or []
            assert [self.content(key, slot) for slot in claim] == names[: len(claim)]

    @invariant()
    def no_slot_is_lost_or_used_twice(self) -> None:
        gauges = self.device.promotions.gauges()
        copies = self.device.promotions._holders.values()
        held = {copy.slot for holder in copies for copy in holder.copies.values()}
        void = {slot for order in self.device.orders for _, slot in order.slots if slot not in held}
        total = gauges["device_slots_free"] + gauges["device_slots_idle"] + len(held) + len(void)
        assert total == self.count

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        for key in list(self.device.live):
            self.device.drop(key)
        while self.device.orders:
            self.device.copy()
        gauges = self.device.promotions.gauges()
        assert gauges["device_slots_free"] + gauges["device_slots_idle"] == self.count
        assert gauges["device_copies"] == 0


TestPromotionMachine = PromotionMachine.TestCase
TestPromotionMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
