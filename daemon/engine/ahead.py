"""The announcements of one engine: prompts to stage before a request asks for them.

Pure.  Each prompt of an announcement becomes a request of the planner, less urgent than any hint, and takes a hint's
way through look-ups and fetches.  It ends once its blocks are staged, and then no request holds them: the next hint
finds them.  A hinted request may take their room at any time, a later announcement only after the `deadline`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...shmring.wire.admin import Report, Warm, Warmed
from ..planning.requests import Announced, Failure, Key, Request
from .memory import EngineInfo

FLAG = -1  # of every announced request: no engine reads one
AT_WORK = 16  # prompts at a time
MAX_WAITING = 4  # announcements, each of another connection
PATIENCE_NS = 30_000_000_000  # for a turn: then an announcement is answered as it stands


class Wanted(NamedTuple):
    """A prompt to hint under this key: so many blocks, and their digests, joined."""

    key: Key
    blocks: int
    hashes: bytes
    announced: Announced


class Answer(NamedTuple):
    """The answer to announcement `number`, and its blocks by result."""

    number: int
    name: str
    message: Warmed | Report
    counts: Counter[str]


def about(engine: EngineInfo, epoch: int) -> Warmed:
    """Return an answer about the engine, without counts."""
    return Warmed(
        engine=engine.engine_id,
        epoch=epoch,
        block_tokens=engine.groups.unit_tokens,
        hash_tokens=engine.groups.hash_tokens,
        whole_prompts=not engine.groups.partial,
        hash_algorithm=engine.scheduler.hash_algorithm,
        hash_start=engine.scheduler.hash_start,
        hash_probe=engine.scheduler.hash_probe,
    )


@dataclass(eq=False)
class _Announcement:
    """One announcement. `found`: of each prompt, the leading blocks that there are."""

    number: int
    name: str
    prompts: Sequence[Sequence[str]]
    announced: Announced
    found: list[int]
    counts: Counter[str] = field(default_factory=Counter)
    begun: int = 0
    left: int = 0  # prompts at work

    @property
    def patience_ns(self) -> int:
        return min(self.announced.since_ns + PATIENCE_NS, self.announced.until_ns)


class Ahead:
    """The announcements of one engine, by a number that the caller gives."""

    def __init__(self, about: Warmed) -> None:
        self._about, self._digests = about, about.block_tokens // about.hash_tokens
        self._announcements: deque[_Announcement] = deque()
        self._at_work: dict[Key, tuple[_Announcement, int]] = {}  # and the prompt's place in it
        self._refusals: deque[Answer] = deque()
        self._keys = 0

    def add(self, number: int, warm: Warm, now_ns: int) -> None:
        """Take an announcement, which may wait for those of other connections."""
        announced = Announced(now_ns, now_ns + warm.deadline_ms * 1_000_000)
        new = _Announcement(number, warm.name, warm.chains, announced, [0] * len(warm.chains))
        if len(self._announcements) > MAX_WAITING:
            self._refuse(new, f"too many announcements wait for this engine: waiting={MAX_WAITING}")
        else:
            self._announcements.append(new)

    def next_wanted(self) -> Wanted | None:
        """Return the next prompt to hint; None while enough are at work."""
        for each in self._announcements:
            while each.begun < len(each.prompts) and len(self._at_work) < AT_WORK:
                number, each.begun = each.begun, each.begun + 1
                if blocks := len(each.prompts[number]) // self._digests:
                    self._keys, each.left = self._keys + 1, each.left + 1
                    self._at_work[FLAG, self._keys] = each, number
                    hashes = bytes.fromhex("".join(each.prompts[number][: blocks * self._digests]))
                    return Wanted((FLAG, self._keys), blocks, hashes, each.announced)
        return None

    def looked_up(self, request: Request, blocks: int, *, unavailable: bool) -> None:
        """The store has so many leading blocks of it; `unavailable`: it did not say."""
        if (at := self._at_work.get(request.key)) is None:
            return
        announcement, number = at
        if unavailable:
            self._drop(announcement, "the store does not answer")
            return
        announcement.found[number] = blocks
        announcement.counts["absent"] += len(announcement.prompts[number]) // self._digests - blocks

    def ended(self, request: Request) -> None:
        """Its blocks are staged, as far as they came."""
        if (at := self._at_work.pop(request.key, None)) is None:
            return
        announcement, number = at
        ready = request.prompt.in_blocks(request.ready)
        fetched = min(ready, request.prompt.in_blocks(request.fetched_blocks))
        left = "no_room" if request.failure in (None, Failure("no_room")) else "failed"
        announcement.counts.update(
            {"staged": ready - fetched, "fetched": fetched, left: announcement.found[number] - ready}
        )
        announcement.left -= 1

    def late(self, now_ns: int) -> list[Key]:
        """Return the requests that wait in vain for a turn, to be stopped; their announcements begin no more."""
        late = [each for each in self._announcements if now_ns >= each.patience_ns]
        for each in late:
            rest, each.begun = each.prompts[each.begun :], len(each.prompts)
            each.counts["no_room"] += sum(len(prompt) // self._digests for prompt in rest)
        return [key for key, (each, _) in self._at_work.items() if each in late]

    def stop(self, why: str) -> None:
        """Refuse all of it: the engine goes, or its blocks are void."""
        while self._announcements:
            self._drop(self._announcements[0], why)

    def next_answer(self) -> Answer | None:
        """Return a refusal, or the answer to an announcement all of whose prompts have ended."""
        if self._refusals:
            return self._refusals.popleft()
        done = next((each for each in self._announcements if each.begun == len(each.prompts) and not each.left), None)
        if done is None:
            return None
        self._announcements.remove(done)
        message = self._about.model_copy(update={"found": done.found, **done.counts})
        return Answer(done.number, done.name, message, done.counts)

    def _drop(self, announcement: _Announcement, why: str) -> None:
        self._announcements.remove(announcement)
        self._at_work = {key: at for key, at in self._at_work.items() if at[0] is not announcement}
        self._refuse(announcement, why)

    def _refuse(self, announcement: _Announcement, text: str) -> None:
        answer = Answer(announcement.number, announcement.name, Report(ok=False, text=text), Counter())
        self._refusals.append(answer)
