"""A part of the log in a few lines: how requests ended, what was saved and at what cost, and what went wrong. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ..config.sizes import size
from .causes import label
from .events import EVENTS, LEVELS
from .pretty import amount, line, number

_TOLD = ("daemon.", "config.", "mode.", "engine.")  # of these also what is no fault
_SHOWN = 8  # events


class Digest:
    """Adds up records of the log, the oldest first.

    Saved is what computing the loaded blocks would have taken, less what schedulers waited for requests' KV.
    """

    def __init__(self) -> None:
        self.since = ""
        self._outcomes, self._causes, self._events = Counter[str](), Counter[str](), Counter[str]()
        self._spared_ms = self._waited_ms = self._bytes = 0.0
        self._last: dict[str, Mapping[str, Any]] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        event = str(record["event"])
        self.since = self.since or str(record["ts"])
        if event == "request.done":
            waited_ms = amount(record, "exposed_ms")
            self._outcomes[str(record.get("outcome", "?"))] += 1
            self._spared_ms += amount(record, "spared_ms")
            self._waited_ms += waited_ms
            self._bytes += amount(record, "bytes")
            if cause := record.get("cause"):
                self._causes[str(cause)] += int(waited_ms)
        elif EVENTS.get(event) in ("warning", "error") or event.startswith(_TOLD):
            self._events[event] += 1 + int(amount(record, "suppressed"))
            self._last[event] = record

    @property
    def figures(self) -> dict[str, Any]:
        """What was saved, of how many requests, and what it cost."""
        return {
            "since": self.since,
            "requests": dict(self._outcomes),
            "saved_s": round((self._spared_ms - self._waited_ms) / 1e3, 3),
            "spared_s": round(self._spared_ms / 1e3, 3),
            "waited_s": round(self._waited_ms / 1e3, 3),
            "fetched_bytes": int(self._bytes),
            "causes_waited_ms": dict(self._causes),
            "events": dict(self._events),
        }

    def saved(self) -> str:
        spared_s, waited_s = self._spared_ms / 1e3, self._waited_ms / 1e3
        return (
            f"saved {number(spared_s - waited_s)} s in {sum(self._outcomes.values())} requests: to compute what they "
            f"loaded takes {number(spared_s)} s, and they waited {number(waited_s)} s; {size(self._bytes)} fetched"
        )

    def lines(self) -> list[str]:
        """Return what happened, in a few lines: the worst events first, without fields of 0."""
        ended = ", ".join(f"{outcome} {count}" for outcome, count in self._outcomes.most_common())
        slow = ", ".join(f"{label(cause)} {number(ms / 1e3)} s" for cause, ms in self._causes.most_common())
        found = [f"requests: {ended or 'none ended'}", self.saved()]
        found += [f"waited for: {slow}"] if slow else []
        worst = {event: LEVELS.index(EVENTS.get(event, "info")) for event, _ in self._events.most_common()}
        for event in sorted(worst, key=lambda event: -worst[event])[:_SHOWN]:
            shown = {name: value for name, value in self._last[event].items() if value != 0}
            found.append(f"{self._events[event]} × {line(shown)}")
        return found if self._events else [*found, "nothing went wrong, started or ended"]
