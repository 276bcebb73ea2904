"""Who was refused lately and why: a refusal is logged once, and listed until its process stops trying or attaches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

KEEP_NS = 60_000_000_000  # after the last try; an engine tries every five or ten seconds
MOST = 64  # kept; the one that tried last is the last to go
LISTED, MAX_TEXT = 8, 400  # in one status, which must fit a control message


class Refusals:
    """Of engines, and of processes that did not get so far as to name one (""). Call it on the main loop only."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        # When the last try was, and what to list, by user, and engine or process; the newest try last.
        self._kept: dict[tuple[int, str | int], tuple[int, dict[str, str | int]]] = {}

    def add(self, uid: int, pid: int, engine: str, error: str, *, ours: bool = False) -> bool:
        """Enter a refusal. Return whether it is news: the first one, or another reason than the last one.

        `ours`: neither the engine nor the configuration is the reason, so any engine would be refused.
        """
        key = uid, engine or pid
        line: dict[str, str | int] = {"engine": engine[:MAX_TEXT], "uid": uid, "pid": pid, "error": error[:MAX_TEXT]}
        line |= {"ours": 1} if ours else {}
        _, before = self._kept.pop(key, (0, {}))
        news = before.get("error") != line["error"]
        line["tries"] = 1 if news else int(before["tries"]) + 1
        self._kept[key] = self._clock_ns(), line
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
        self._kept = {key: each for key, each in self._kept.items() if now_ns - each[0] < KEEP_NS}

    def listed(self, uid: int | None) -> list[dict[str, str | int]]:
        """Return those of a user's processes (None: of all users) that were refused last."""
        mine = [line for (user, _), (_, line) in self._kept.items() if uid in (None, user)]
        return mine[: -LISTED - 1 : -1]
