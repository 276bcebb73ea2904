"""Resets of one engine: the stored keys of older weights are gone only when the daemon confirms it."""

from __future__ import annotations

from .link import Link
from .session import SchedulerSession

RETRY_NS = 5_000_000_000
TIMEOUT_MS = 5000  # where neither the configuration nor a disk medium asks for another


class Resets:
    """`generation`: of the last reset. `timeout_ms`: as configured; None for the time that the daemon's store needs."""

    def __init__(self, link: Link[SchedulerSession], timeout_ms: int | None) -> None:
        self.generation = 0
        self._link, self._timeout_ms = link, timeout_ms
        self._asked_ns = 0

    def begin(self, now_ns: int) -> None:
        """Another reset is owed from now on. The caller asks for it."""
        self.generation += 1
        self._asked_ns = now_ns

    def ask(self) -> bool:
        """Ask the daemon for the last reset, and wait. Return whether it confirmed it."""
        return self._link.request_reset(self.generation, self._limit_ms())

    def ask_again(self, session: SchedulerSession | None, now_ns: int) -> None:
        """Ask again now and then, where there is a session, without waiting."""
        if session is not None and now_ns - self._asked_ns > RETRY_NS:
            self._asked_ns = now_ns
            self._link.send_reset(self.generation, self._limit_ms())

    def _limit_ms(self) -> int:
        """As configured, else long enough for the daemon's store to confirm a reset."""
        least_ms = session.removal_ms if (session := self._link.session) is not None else 0
        return self._timeout_ms or max(TIMEOUT_MS, least_ms)
