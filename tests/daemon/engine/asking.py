"""What tests of look-ups share: look-ups before a planner without room, on a clock of the test."""

from __future__ import annotations

from collections.abc import Sequence

from kvprefetch.daemon.engine.leases import Leases
from kvprefetch.daemon.engine.lookups import Batch, GoneBlocks, LookedUp, LookUps, Lost
from kvprefetch.daemon.engine.sessions import Sessions
from kvprefetch.daemon.engine.transfers import Found
from kvprefetch.daemon.planning.bad_values import BadValues
from kvprefetch.daemon.planning.requests import Key, Request
from tests.daemon.planning.support import ONE_GROUP, FlagsModel, Planner, block
from tests.daemon.planning.support import digests as digests_of

SECOND = 1_000_000_000


class Setup:
    """Look-ups before a planner without room, so that hits wait; `stored` is what the store has."""

    def __init__(self, shards: int = 1) -> None:
        self.up = True
        self.sent: list[Batch] = []
        self.sizes: list[int] = []
        self.answers: dict[Key, tuple[int, bool]] = {}
        self.renewals: dict[Key, int] = {}
        self.stored: set[bytes] = set()
        self.planner = Planner(1, FlagsModel(), chunk_blocks=1)
        self.bad_values = BadValues()
        leases = Leases(10 * SECOND, self.planner.requests, Sessions(ONE_GROUP))
        self.look_ups = LookUps(self.planner.requests, self.bad_values, leases, timeout_ns=4 * SECOND, shards=shards)

    def apply(self, answers: Sequence[LookedUp | Lost | GoneBlocks]) -> None:
        for answer in answers:
            if isinstance(answer, GoneBlocks):
                continue
            key = answer.request.key
            if isinstance(answer, Lost):
                self.renewals[key] = answer.block
                self.planner.absent(answer.request, answer.block)
            else:
                assert key not in self.answers, "a request is answered once"
                self.answers[key] = (self.planner.choose(answer.request).blocks, answer.unavailable)

    def ask(self, now: int = 0) -> None:
        """Send what is to be asked, as an epoch does after every event."""
        if not self.up:
            self.apply(self.look_ups.give_up(now))
        elif (batch := self.look_ups.next_batch(now)) is not None:
            self.sent.append(batch)
            self.sizes += map(len, batch.digests)

    def tick(self, now: int) -> None:
        self.apply(self.look_ups.tick(now))
        self.ask(now)

    def answered(self, batch: Batch, found: Sequence[Found] | None, now: int) -> None:
        self.apply(self.look_ups.answered(batch, found, now))
        self.ask(now)

    def add(self, request: Request, now: int = 0) -> None:
        if (answer := self.look_ups.add(request, now, answering=self.up)) is not None:
            self.apply([answer])

    def hint(self, number: int, *names: str, priority: int = 0, now: int = 0) -> Key:
        request = self.planner.hinted((number, 1), digests_of(*names), priority=priority)
        self.add(request, now)
        return request.key

    def store(self, *names: str) -> None:
        self.stored.update(map(block, names))

    def renewed(self) -> list[Key]:
        """The requests for which the last batch renews leases."""
        assert not self.sent[-1].questions
        return [part.request.key for part in self.sent[-1].parts if part.request is not None]

    def answer(self, now: int = 0) -> None:
        batch, runs = self.sent[-1], list[Found]()
        for digests in batch.digests:
            present = bytes(digest in self.stored for digest in digests)
            runs.append(Found(present, bytes(len(present))))
        self.answered(batch, runs, now)
