"""A planner's surroundings: the engine's side of the flags, hints by name, orders carried out at once, and an audit."""

from __future__ import annotations

from collections.abc import Sequence

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
