"""A planner's surroundings: the engine's side of the flags, hints by name, and orders carried out at once."""

from __future__ import annotations

from collections.abc import Sequence

from kvprefetch.daemon.planner import Fetched, Key, Lane, Planner


class FlagsModel:
    """Plays the engine's side of the flags: what was published, and which flags the engine holds."""

    def __init__(self) -> None:
        self.count: dict[Key, int] = {}
        self.final: set[Key] = set()
        self.slots: dict[Key, dict[int, int]] = {}
        self.expired: set[Key] = set()
        self.claimed: set[Key] = set()

    def publish(self, key: Key, start: int, slots: Sequence[int], count: int, final: bool) -> bool:
        if key in self.claimed:
            return False
        assert key not in self.expired
        assert key not in self.final
        assert count >= self.count.get(key, 0)
        table = self.slots.setdefault(key, {})
        table.update(dict(enumerate(slots, start)))
        self.count[key] = count
        if final:
            self.final.add(key)
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


def run(
    planner: Planner, *, fail: frozenset[str] = frozenset(), lanes: Sequence[Lane] = tuple(Lane)
) -> list[list[str]]:
    """Carry out every order there is; the digests of each, in order."""
    done: list[list[str]] = []
    for lane in lanes:
        while (order := planner.next_order(lane)[0]) is not None:
            names = [block.digest.decode().rstrip(".") for block in order.blocks]
            planner.fetched(order.number, [Fetched(name not in fail) for name in names], 1)
            done.append(names)
    return done
