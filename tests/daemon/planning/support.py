"""A planner's surroundings: the engine's side of the flags, hints by name, orders carried out at once, and an audit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from kvprefetch.daemon.planning.blocks import BlockState
from kvprefetch.daemon.planning.planner import Key, Lane, Planner


class FlagsModel:
    """Plays the engine's side of the flags: what was published, and which flags the engine holds."""

    def __init__(self) -> None:
        self.count: dict[Key, int] = {}
        self.final: set[Key] = set()
        self.slots: dict[Key, dict[int, int]] = {}
        self.expired: set[Key] = set()
        self.claimed: set[Key] = set()
        self.refused: set[Key] = set()
        self.taken_back: list[Key] = []

    def publish(self, key: Key, start: int, slots: Sequence[int], count: int, final: bool) -> bool:
        if key in self.claimed:
            self.refused.add(key)
            return False
        assert key not in self.expired
        assert key not in self.final
        assert count >= self.count.get(key, 0)
        assert start + len(slots) == count, "exactly the slots of what is new"
        table = self.slots.setdefault(key, {})
        table.update(dict(enumerate(slots, start)))
        self.count[key] = count
        if final:
            self.final.add(key)
        return True

    def take_back(self, key: Key) -> bool:
        if key in self.claimed:
            return False
        assert key not in self.expired
        self.taken_back.append(key)
        self.final.discard(key)
        self.refused.discard(key)
        self.slots.pop(key, None)
        self.count.pop(key, None)
        return True

    def expire(self, key: Key) -> bool:
        if key in self.claimed:
            return False
        self.expired.add(key)
        return True


def digests(*names: str) -> bytes:
    return b"".join(name.encode().ljust(8, b".") for name in names)


def hint(planner: Planner, number: int, *names: str, local: int = 0, priority: int = 0) -> Key:
    key = (number, 1)
    planner.hint(key, digests(*names), 8, len(names), local, priority)
    return key


def hit(planner: Planner, number: int, *names: str, local: int = 0, priority: int = 0) -> Key:
    """A hint whose blocks the store has all."""
    key = hint(planner, number, *names, local=local, priority=priority)
    planner.looked_up(key, len(names))
    return key


def run(
    planner: Planner, *, fail: frozenset[str] = frozenset(), lanes: Sequence[Lane] = tuple(Lane)
) -> list[list[str]]:
    """Carry out every order there is; the digests of each, in order."""
    done: list[list[str]] = []
    for lane in lanes:
        while (order := planner.next_order(lane)) is not None:
            names = [digest.decode().rstrip(".") for digest in order.digests]
            planner.fetched(order.number, [name not in fail for name in names], 1)
            done.append(names)
    return done


def audit(planner: Planner) -> None:
    """Count anew, block by block, what the table of blocks keeps by runs: from what requests hold and calls write."""
    blocks = planner._blocks
    holders = defaultdict[int, list[int]](list)
    for request in planner.requests.values():
        assert len(request.held) == request.issued - request.local
        for block, slot in enumerate(request.held, request.local):
            holders[slot].append(request.sequence)
            run = blocks.at(slot)
            assert run.digests[run.slots.index(slot)] == request.digest(block)
        assert [slot for run in blocks.runs(request.held) for slot in run.slots] == list(request.held), "whole runs"
    in_call = {slot for order in (*planner._orders.values(), *planner._overdue.values()) for slot in order.slots}
    runs = {run for run in blocks._runs if run is not None}
    slots = [slot for run in runs for slot in run.slots]
    gone = set(range(blocks.slot_count)).difference(slots, blocks._free)
    assert Counter((*slots, *blocks._free, *gone)) == Counter(range(blocks.slot_count)), "each is free or of one run"
    assert gone <= blocks._lost, "or lost"
    index: dict[bytes, int] = {}
    for run in runs:
        assert run.slots
        assert len(run.digests) == len(run)
        for block, slot in enumerate(run.slots):
            assert blocks._runs[slot] is run
            assert (run.pins, run.holders) == (len(holders[slot]), sum(holders[slot]))
            assert run.in_call == (slot in in_call)
            if not run.detached:
                index[run.digests[block]] = slot
        if run.pins == 0 and not run.in_call:
            assert run.state is BlockState.STAGED
            assert not run.detached
    assert blocks._index == index
    assert set(blocks._idle) == {run for run in runs if run.pins == 0 and not run.in_call}
    used = [sum(len(run) for run in runs if run.lane is lane and (run.pins or run.in_call)) for lane in Lane]
    assert blocks.used == used
    assert blocks.gauges() == {
        "slots": blocks.slot_count,
        "slots_free": len(blocks._free),
        "slots_idle": sum(map(len, blocks._idle)),
        "slots_lost": len(gone),
        "blocks_pinned": sum(len(run) for run in runs if run.pins),
    }
    alone = Counter(numbers[0] for numbers in holders.values() if len(numbers) == 1)
    assert blocks.sole == alone
