"""One engine's announcements on a planner, without a daemon: what tests of them share."""

from __future__ import annotations

from itertools import count
from typing import Any

from kvprefetch.daemon.engine.ahead import Ahead, Wanted
from kvprefetch.daemon.planning.requests import Request
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.telemetry.trace import Met
from kvprefetch.kv.prompts import Prompt
from kvprefetch.shmring.wire.admin import Announce, AnnounceStep, Caller
from tests.daemon.planning.support import ONE_GROUP, FlagsModel, Planner, block, digests, hint, shown

MS = 1_000_000


def announced(number: int, name: str, **fields: Any) -> Announce:
    caller, size = Caller(uid=0, groups=[]), len(digests("a"))
    return Announce(
        caller=caller, number=number, name=name, engine="e", epoch=1, hashes=len(name), hash_bytes=size, **fields
    )


def joined(name: str) -> bytes:
    return b"".join(map(digests, name))


class Setup:
    """`held` is what the store has, `on_disk` what it has only there. It answers at once, unless `silent`."""

    def __init__(self, slots: int = 8, *, held: str = "", on_disk: str = "", chunk: int = 8) -> None:
        self.flags = FlagsModel()
        self.planner = Planner(slots, self.flags, chunk_blocks=chunk)
        self.now = 0
        self.held, self.on_disk = set(map(block, held + on_disk)), set(map(block, on_disk))
        self.silent = False
        self.asked: list[str] = []
        self.waiting: list[Request] = []
        self.ahead = Ahead(ONE_GROUP, slots)
        self.told: list[tuple[str, AnnounceStep]] = []  # by the prompt
        self.names: dict[int, str] = {}
        self.numbers = count(1)

    def carry_on(self) -> None:
        """Plan, look up, end and answer what there is, as an epoch does after every event."""
        while True:
            while (wanted := self.ahead.next_wanted(self.now)) is not None:
                self.waiting.append(self.hint(wanted))
            if self.waiting and not self.silent:
                self.look_up(self.waiting.pop(0))
                continue
            if not self.flags.ended:
                break
            request = self.flags.ended.pop(0)
            self.planner.finish(request.key)
            self.ahead.ended(request)
        while self.ahead.outcomes:
            number, outcome = self.ahead.outcomes.popleft()
            assert outcome.number == number
            self.told.append((self.names[number], outcome))

    def hint(self, wanted: Wanted) -> Request:
        prompt = Prompt(ONE_GROUP, wanted.hashes, range(wanted.blocks), room=0, staged=self.planner.blocks.holds)
        return self.planner.hint(wanted.key, prompt, wanted.priority, wanted.due_ns, wanted.announced)

    def look_up(self, request: Request) -> None:
        while names := request.prompt.next(100):
            self.asked.append("".join(map(shown, names)))
            request.prompt.found(
                bytes(name in self.held for name in names), bytes(name in self.on_disk for name in names)
            )
        choice = self.planner.choose(request)
        self.ahead.looked_up(request, choice.blocks, unavailable=False)

    def announce(self, *prompts: str, **fields: int) -> None:
        for name in prompts:
            number = next(self.numbers)
            self.names[number] = name
            self.ahead.add(number, announced(number, name, **fields), joined(name), self.now)
        self.carry_on()

    def arrive(self, name: str) -> Met | None:
        met = self.ahead.arrived(joined(name), len(digests("a")))
        self.carry_on()
        return met

    def fetch(self, *, fail: str = "") -> list[str]:
        """Carry out every fetch that is due while nothing else is; the blocks of each."""
        done = []
        for lane in Lane:
            while (order := self.planner.next_order(lane, ahead=True)) is not None:
                assert self.planner.next_order(lane, ahead=True) is None, "one at a time"
                names = [shown(name) for name in order.digests]
                self.planner.fetched(order.number, [name not in fail for name in names], 1)
                done.append("".join(names))
                self.carry_on()
            self.carry_on()
        return done

    def tick(self) -> None:
        for key in self.ahead.expired(self.now):
            self.planner.stop(key)
        self.carry_on()

    def last(self) -> tuple[str, dict[str, int]]:
        """Return the newest outcome and the blocks that are not none."""
        _, outcome = self.told[-1]
        names = ("staged", "fetched", "absent", "no_room", "failed")
        return outcome.outcome, {name: found for name in names if (found := getattr(outcome, name))}

    def outcomes(self, name: str) -> list[str]:
        return [outcome.outcome for prompt, outcome in self.told if prompt == name]

    def staged(self, text: str, key: int = 99) -> bool:
        """Whether a hint now finds all of these without a fetch."""
        request = self.planner.requests[hint(self.planner, key, *text)]
        found = request.issued
        self.planner.finish(request.key)
        return found == len(text)
