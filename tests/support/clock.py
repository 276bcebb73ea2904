"""A clock that moves only when a test moves it."""

from __future__ import annotations


class Clock:
    """Stands in for a clock in nanoseconds (called, or by `now_ns`) and for one in seconds (`now_s`)."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000

    def __call__(self) -> int:
        return self.ns

    def now_ns(self) -> int:
        return self.ns

    def now_s(self) -> float:
        return self.ns / 1e9

    def advance_ms(self, ms: float) -> None:
        self.ns += int(ms * 1e6)

    def pause(self) -> None:
        """A waiter would sleep here."""
