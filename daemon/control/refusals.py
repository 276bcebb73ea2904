"""Who was refused lately and why: a refusal is logged once, and listed until its process stops trying or attaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

KEEP_NS = 60_000_000_000  # after the last try; an engine tries every five or ten seconds
MOST = 64  # kept; the one that tried last is the last to go
LISTED, MAX_TEXT = 8, 400  # in one status, which must fit a control message


@dataclass
class Refusal:
    """An engine, or a process that did not get so far as to name one (`engine` is "")."""

    engine: str
    uid: int
    pid: int
    error: str
    tries: int = 1
    last_ns: int = 0


class Refusals:
    """Call it on the main loop only."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._kept: dict[tuple[int, str | int], Refusal] = {}  # by user, and engine or process; the newest try last

    def add(self, uid: int, pid: int, engine: str, error: str) -> bool:
        """Enter a refusal. Return whether it is news: the first one, or another reason than the last one."""
        now_ns, key = self._clock_ns(), (uid, engine or pid)
        before = self._kept.pop(key, None)
        news = before is None or before.error != error
        tries = 1 if before is None or news else before.tries + 1
        self._kept[key] = Refusal(engine, uid, pid, error, tries, now_ns)
        for old in list(self._kept)[:-MOST]:
            del self._kept[old]
        return news

    def attached(self, uid: int, engine: str, pids: Iterable[int]) -> None:
        """Forget an engine, and its processes: it is served now."""
        self._kept.pop((uid, engine), None)
        for pid in pids:
            self._kept.pop((uid, pid), None)

    def tick(self) -> None:
        """Forget those that do not try any more."""
        now_ns = self._clock_ns()
        self._kept = {key: each for key, each in self._kept.items() if now_ns - each.last_ns < KEEP_NS}

    def listed(self, uid: int | None) -> list[dict[str, str | int]]:
        """Return those of a user's processes (None: of all users) that were refused last."""
        mine = [each for each in self._kept.values() if uid in (None, each.uid)]
        return [
            {
                "engine": each.engine[:MAX_TEXT],
                "uid": each.uid,
                "pid": each.pid,
                "error": each.error[:MAX_TEXT],
                "tries": each.tries,
            }
            for each in mine[: -LISTED - 1 : -1]
        ]
