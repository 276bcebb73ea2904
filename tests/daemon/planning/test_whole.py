"""Requests of an engine with several KV groups: the longest prefix there is, published whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvprefetch.daemon.planning.planner import Planner
from kvprefetch.daemon.planning.requests import Broken, Key, Order, Publication, Request, TakenBack
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.kv.prompts import GIVE_UP_SLICES, SLICE, Choice, Prompt

SIZE = 8
SHAPES = [
    Groups((Group(Kind.WINDOW, 2, 5), Group(Kind.FULL, 2)), 2),
    Groups((Group(Kind.FULL, 2), Group(Kind.WINDOW, 4, 7), Group(Kind.STATE, 4)), 2),
    Groups((Group(Kind.CHUNK, 2, 8), Group(Kind.FULL, 4)), 1),
]


def digest(prompt: int, number: int) -> bytes:
    """Prompts share their first three digests."""
    return hashlib.sha256(f"{prompt if number >= 3 else ''} {number}".encode()).digest()[:SIZE]


def name(groups: Groups, prompt: int, group: int, block: int) -> bytes:
    ratio = groups.groups[group].block_tokens // groups.hash_tokens
    return digest(prompt, (block + 1) * ratio - 1) + bytes([group])


def hashes(groups: Groups, prompt: int, units: int) -> bytes:
    return b"".join(digest(prompt, i) for i in range(units * groups.unit_tokens // groups.hash_tokens))


def needed(groups: Groups, prompt: int, local: int, units: int) -> list[bytes]:
    """The names of a prefix, one by one, in the slot table's order."""
    unit = groups.unit_tokens
    items = enumerate(groups.items(local * unit, units * unit))
    return [name(groups, prompt, group, block) for group, blocks in items for block in blocks]


def longest(groups: Groups, prompt: int, local: int, units: int, there: set[bytes], room: int) -> int:
    for n in range(units, local, -1):
        wanted = needed(groups, prompt, local, n)
        if len(wanted) <= room and there.issuperset(wanted):
            return n
    return local


class Asked:
    """A prompt that asks, a few names at a time, a store that has the names `stored`, of which `disk` lie on disks."""

    def __init__(self, groups: Groups, local: int, units: int, room: int = 10_000, prompt: int = 1) -> None:
        self.stored, self.staged, self.disk = set[bytes](), set[bytes](), set[bytes]()
        self.names: list[bytes] = []
        blocks = range(local, units)
        self.prompt = Prompt(
            groups, hashes(groups, prompt, units), blocks, room=room, staged=lambda n: n in self.staged
        )

    def choose(self, most: int = 3) -> Choice:
        while names := self.prompt.next(most):
            assert len(names) <= most
            assert names == self.prompt.next(most), "asking changes nothing"
            self.names += names
            present = bytes(name in self.stored for name in names)
            self.prompt.found(present, bytes(name in self.disk for name in names))
        return self.prompt.choose()


@given(st.sampled_from(SHAPES), st.integers(0, 3), st.integers(1, 8), st.integers(0, 24), st.data())
def test_the_longest_prefix_that_is_there_and_fits_is_chosen_again_and_again(
    groups: Groups, local: int, more: int, room: int, data: st.DataObject
) -> None:
    units = local + more
    asked = Asked(groups, local, units, room)
    every = sorted(needed_by_any(groups, 1, local, units))
    asked.stored = set(data.draw(st.lists(st.sampled_from(every), unique=True, min_size=len(every) * 2 // 3)))
    asked.staged = set(data.draw(st.lists(st.sampled_from(every), unique=True)))
    asked.disk = asked.stored & set(data.draw(st.lists(st.sampled_from(every), unique=True)))
    there, most = asked.stored | asked.staged, data.draw(st.integers(1, 9))
    while True:
        choice = asked.choose(most)
        best = longest(groups, 1, local, units, there, room)
        assert choice.blocks == best
        names = needed(groups, 1, local, best)
        assert choice.names[: choice.entries * asked.prompt.name_bytes] == b"".join(names)
        assert [bool(each) for each in choice.on_disk] == [each in asked.disk and each in asked.names for each in names]
        assert choice.missing == b"" or choice.missing in set(needed(groups, 1, local, best + 1)) - there
        assert len(names) <= asked.prompt.most_blocks or not names
        if best == local:
            break
        start = data.draw(st.integers(0, len(names) - 1))
        lost = set(names[start : data.draw(st.integers(start + 1, len(names)))])
        there, asked.staged, asked.stored = there - lost, asked.staged - lost, asked.stored - lost
        asked.prompt.lost(range(start, start + len(lost)))
    assert len(set(asked.names)) == len(asked.names) or asked.staged, "no name is asked for twice"


@given(st.sampled_from(SHAPES), st.integers(0, 3), st.integers(1, 8), st.data())
def test_of_a_longer_local_prefix_only_what_the_load_needs_counts_as_loaded(
    groups: Groups, local: int, more: int, data: st.DataObject
) -> None:
    units = local + more
    asked = Asked(groups, local, units)
    asked.stored = needed_by_any(groups, 1, local, units)
    assert asked.choose().blocks == units
    start = data.draw(st.integers(local, units - 1))
    names, loaded = needed(groups, 1, local, units), asked.prompt.loaded(range(start, units))
    assert [names[i] for some in loaded for i in some] == needed(groups, 1, start, units)


class Machine:
    """A planner with whole requests, as an epoch drives it, a store, and an engine that checks what it claims."""

    def __init__(self, groups: Groups, slots: int, chunk: int) -> None:
        self.groups = groups
        self.planner = Planner(slots, self, chunk_blocks=chunk)
        self.content: dict[int, bytes] = {}
        self.stored: set[bytes] = set()
        self.prompts: dict[Key, tuple[int, int]] = {}
        self.disk: dict[Key, Sequence[bool]] = {}  # which of a prompt's blocks lie on disk
        self.flags: dict[Key, tuple[int, list[int]]] = {}  # published
        self.claimed: dict[Key, tuple[list[int], list[bytes]]] = {}
        self.orders: list[Order] = []
        self.late: list[Order] = []

    # the port to the flags
    def take_back(self, key: Key) -> bool:
        if key in self.claimed:
            return False
        self.flags.pop(key, None)
        return True

    def expire(self, key: Key) -> bool:
        return self.take_back(key)

    @property
    def room(self) -> int:
        return self.planner.blocks.disk_slots - self.planner.blocks.lost

    def carry_out(self) -> None:
        while (change := self.planner.next_change()) is not None:
            if isinstance(change, Publication):
                self.publish(change)
            elif isinstance(change, Broken):
                assert self.planner.requests.get(change.request.key) is change.request
                self.choose(change.request)
            else:
                assert isinstance(change, TakenBack)
        self.planner.check()

    def publish(self, change: Publication) -> None:
        request, start, slots, count, final = change
        prompt, local = self.prompts[request.key]
        assert final
        assert start == 0
        if request.key in self.claimed:
            self.planner.refused(request)
            return
        names = needed(self.groups, prompt, local, count)
        assert len(slots) == len(names)
        self.flags[request.key] = count, list(slots)

    def choose(self, request: Request) -> None:
        disk = self.disk[request.key]
        while names := request.prompt.next(5):
            bits = bytes(each in self.stored for each in names)
            request.prompt.found(bits, bytes(disk[each[0] % len(disk)] for each in names))
        self.planner.choose(request)

    def hint(self, number: int, prompt: int, local: int, units: int, disk: Sequence[bool]) -> None:
        key = (number, 1)
        digests, holds = hashes(self.groups, prompt, units), self.planner.blocks.holds
        asks = Prompt(self.groups, digests, range(local, units), room=self.room, staged=holds)
        self.prompts[key], self.disk[key] = (prompt, local), disk
        self.choose(self.planner.hint(key, asks, 0))

    def order(self, lane: Lane) -> None:
        if self.planner.wants(lane) and (order := self.planner.next_order(lane)) is not None:
            for slot in order.slots:
                self.content[slot] = b"being written"
            self.orders.append(order)

    def end_order(self, order: Order, fails: Sequence[bool], now: int) -> None:
        results = [not fails[i % len(fails)] for i in range(len(order.slots))]
        for slot, each, good in zip(order.slots, order.digests, results, strict=True):
            self.content[slot] = each if good else b"failed"
        self.planner.fetched(order.number, results, now)

    def claim(self, key: Key) -> None:
        count, slots = self.flags[key]
        prompt, local = self.prompts[key]
        if count > local:
            self.claimed[key] = slots, needed(self.groups, prompt, local, count)
            self.verify(key)

    def verify(self, key: Key) -> None:
        slots, names = self.claimed[key]
        assert [self.content[slot] for slot in slots] == names

    def finish(self, key: Key) -> None:
        if key in self.claimed:
            self.verify(key)
            del self.claimed[key]
        self.planner.finish(key)
        self.flags.pop(key, None)
        del self.prompts[key]


ACTS = ["hint"] * 4 + ["order"] * 5 + ["end"] * 5 + ["claim", "finish", "finish", "ask", "renew", "overdue", "late"]
ACTS += ["tick", "give up", "forget", "reset", "unclaim"]


@given(st.sampled_from(SHAPES), st.integers(1, 40), st.integers(1, 6), st.data())
def test_whatever_happens_a_flag_shows_a_whole_prefix_in_slots_that_hold_it_or_nothing(
    groups: Groups, slots: int, chunk: int, data: st.DataObject
) -> None:
    draw = data.draw
    machine, number = Machine(groups, slots, chunk), 0
    for prompt in range(3):
        machine.stored.update(needed_by_any(groups, prompt))
    for now, act in enumerate(draw(st.lists(st.sampled_from(ACTS), min_size=10, max_size=60)), 1):
        keys = sorted(machine.prompts)
        if act == "hint":
            number += 1
            local = draw(st.integers(0, 2))
            machine.hint(number, draw(st.integers(0, 2)), local, local + draw(st.integers(1, 6)),
                         draw(st.lists(st.booleans(), min_size=1, max_size=5)))  # fmt: skip
        elif act == "order":
            machine.order(draw(st.sampled_from(list(Lane))))
        elif act in ("end", "overdue") and machine.orders:
            order = machine.orders.pop(draw(st.integers(0, len(machine.orders) - 1)))
            if act == "overdue":
                machine.late.append(order)
                machine.planner.overdue(order.number, now)
            else:
                machine.end_order(order, draw(st.sampled_from([[False]] * 3 + [[True], [False, False, True]])), now)
        elif act == "late" and machine.late:
            machine.end_order(machine.late.pop(), [False], now)
        elif act == "claim" and machine.flags.keys() - machine.claimed.keys():
            machine.claim(draw(st.sampled_from(sorted(machine.flags.keys() - machine.claimed.keys()))))
        elif act == "unclaim" and machine.claimed:
            del machine.claimed[draw(st.sampled_from(sorted(machine.claimed)))]
        elif act == "finish" and keys:
            machine.finish(draw(st.sampled_from(keys)))
        elif act == "ask" and keys:
            machine.planner.ask(draw(st.sampled_from(keys)))
        elif act == "renew" and keys:
            request = machine.planner.requests[draw(st.sampled_from(keys))]
            machine.planner.lost(request, draw(st.integers(0, max(1, request.blocks))))
        elif act == "forget" and machine.stored:
            machine.stored -= set(draw(st.lists(st.sampled_from(sorted(machine.stored)), max_size=4)))
        elif act == "give up":
            machine.planner.give_up(draw(st.sampled_from(list(Lane))))
        elif act == "tick":
            machine.planner.tick()
        elif act == "reset":
            for request in machine.planner.reset():
                del machine.prompts[request.key]
        machine.carry_out()
        for key in machine.claimed:
            machine.verify(key)
    run_dry(machine)
    unclaimed = [each for each in machine.planner.requests.values() if each.key not in machine.claimed]
    assert all(request.final for request in unclaimed), "each has an answer"
    for key in sorted(machine.prompts):
        machine.finish(key)
    machine.carry_out()
    assert machine.planner.gauges()["blocks_pinned"] == 0


def needed_by_any(groups: Groups, prompt: int, local: int = 0, units: int = 9) -> set[bytes]:
    return {each for n in range(local, units) for each in needed(groups, prompt, local, n + 1)}


def run_dry(machine: Machine) -> None:
    """Every call comes back, good, until there is nothing to do; claims do not stand in the way of room for ever."""
    for order in machine.late:
        machine.end_order(order, [False], 1)
    for key in sorted(machine.claimed):
        machine.finish(key)
    for _ in range(300):
        machine.planner.tick()
        machine.carry_out()
        for lane in Lane:
            machine.order(lane)
            machine.carry_out()
        for order in machine.orders:
            machine.end_order(order, [False], 1)
            machine.carry_out()
        if not machine.orders:
            # Whoever has an answer takes it and ends, so that the others find room.
            done = [key for key in sorted(machine.flags) if machine.planner.requests[key].final]
            if done and not all(request.final for request in machine.planner.requests.values()):
                machine.finish(done[0])
        machine.orders.clear()


def staged(machine: Machine, number: int, units: int, prompt: int = 1, local: int = 0) -> None:
    """Hint, and fetch all."""
    machine.hint(number, prompt, local, units, [False])
    machine.carry_out()
    while machine.planner.wants(Lane.MEMORY):
        machine.order(Lane.MEMORY)
        if not machine.orders:
            break
        machine.end_order(machine.orders.pop(), [False], 1)
        machine.carry_out()


def test_where_a_lane_can_fetch_nothing_more_the_longest_prefix_in_staging_is_taken() -> None:
    machine = Machine(SHAPES[0], 40, 40)
    machine.stored = needed_by_any(SHAPES[0], 1)
    staged(machine, 1, 4)
    assert machine.flags[1, 1][0] == 4
    machine.hint(2, 1, 0, 8, [False])
    machine.carry_out()
    assert (2, 1) not in machine.flags
    machine.planner.give_up(Lane.MEMORY)
    machine.carry_out()
    assert machine.flags[2, 1][0] == 4


def test_what_is_void_since_a_reset_and_then_loses_its_room_shows_nothing() -> None:
    machine = Machine(SHAPES[0], 8, 8)
    machine.stored = needed_by_any(SHAPES[0], 1) | needed_by_any(SHAPES[0], 2)
    staged(machine, 1, 4, local=1)
    machine.claim((1, 1))
    assert machine.planner.reset() == []
    machine.claimed.clear()
    machine.hint(2, 2, 0, 4, [False])
    machine.carry_out()
    machine.planner.ask((2, 1))
    machine.order(Lane.MEMORY)
    machine.carry_out()
    assert machine.flags[1, 1] == (1, [])


def test_digests_are_those_of_the_blocks_ends() -> None:
    """By hand: two hash blocks of 2 tokens in a window's block of 4. Of the state the last one is enough."""
    asked, full = Asked(SHAPES[1], 0, 2), [digest(1, i) + b"\0" for i in range(4)]
    asked.stored = {*full, digest(1, 1) + b"\1", digest(1, 3) + b"\1", digest(1, 3) + b"\2"}
    choice = asked.choose(9)
    assert asked.names == [*full, digest(1, 1) + b"\1", digest(1, 3) + b"\1", digest(1, 3) + b"\2"]
    assert choice.names == b"".join(asked.names)
    assert (choice.blocks, choice.entries, asked.prompt.name_bytes) == (2, 7, SIZE + 1)


def test_a_prompt_that_is_not_there_asks_for_its_first_slice_alone() -> None:
    asked = Asked(SHAPES[0], 0, 8)
    assert asked.choose(3).blocks == 0
    assert asked.names == [digest(1, i) + b"\1" for i in range(3)], "of full attention"


def test_where_only_full_attention_is_there_each_block_is_asked_for_once() -> None:
    """As behind prompts that ended elsewhere: more and more of the shorter prefixes at a time."""
    groups = Groups((Group(Kind.FULL, 2), Group(Kind.STATE, 2)), 2)
    asked = Asked(groups, 0, 300)
    asked.stored = {name(groups, 1, 0, block) for block in range(300)} | {name(groups, 1, 1, 9)}
    questions = 0
    while names := asked.prompt.next(1000):
        questions += names[0][-1] == 1
        asked.names += names
        asked.prompt.found(bytes(each in asked.stored for each in names), b"")
    assert asked.prompt.choose().blocks == 10
    assert len(set(asked.names)) == len(asked.names) <= 600
    assert questions == 5, "1, 4, 16, 64 prefixes, and the rest"


def test_while_the_store_is_away_what_is_staged_counts_as_far_as_a_few_looks_reach() -> None:
    asked = Asked(SHAPES[0], 0, 8)
    asked.staged = set(needed(SHAPES[0], 1, 0, 5))
    asked.prompt.give_up()
    assert asked.prompt.choose().blocks == 5
    units = (GIVE_UP_SLICES + 2) * SLICE
    groups = Groups((Group(Kind.FULL, 2), Group(Kind.STATE, 2)), 2)
    asked = Asked(groups, 0, units, room=2 * units)
    asked.staged = {name(groups, 1, 0, block) for block in range(units)} | {name(groups, 1, 1, 0)}
    asked.prompt.give_up()
    assert asked.prompt.choose().blocks == 0
