"""Measure the engine's steps from outside: their duration, and the cost of a prefill token. Pure.

A step lasts from its start, or from the end of the step before if that came later, to its end; this also holds for
overlapping steps (async scheduling, pipeline stages).  The cost of a token is fitted by least squares through the time
of a step without prefill: short prefills have a fixed cost that says little about tokens, and weigh little.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

# Assumed until a prefill was measured: 10,000 tokens per second.
UNMEASURED_PREFILL_NS = 100_000.0
# Weight of the newest step in the moving averages of durations.
_NEWEST = 0.1
# The fit forgets: half of it is younger than about this many prefill tokens in one go, squared.
_MEMORY_TOKENS2 = 8192.0**2
# No engine has so many steps in flight: ends are not reported, and the steps noted here are void.
_MAX_IN_FLIGHT = 64


class _Step(NamedTuple):
    began_ns: int
    prefill_tokens: int
    executed: bool
    typical: bool


class StepTimes:
    """One engine's steps. `step_ns` is the average duration of a step that executed something, 0 before the first."""

    def __init__(self) -> None:
        self.step_ns = 0.0
        self._decode_ns = 0.0
        self.flying: deque[_Step | None] = deque()  # None: not measured
        self._ended_ns = 0
        self._xy = self._xx = 0.0

    def began(self, now_ns: int, prefill_tokens: int, *, executed: bool, typical: bool = True) -> None:
        """A step was scheduled. `typical`: it does nothing else that takes time, such as a load."""
        if len(self.flying) >= _MAX_IN_FLIGHT:
            self.flying.clear()
        self.flying.append(_Step(now_ns, prefill_tokens, executed, typical))

    def pass_over(self) -> bool:
        """End the oldest step in flight, if neither it nor the one behind it is measured."""
        flying = self.flying
        if not flying or flying[0] is not None or (len(flying) > 1 and flying[1] is not None):
            return False
        flying.popleft()
        return True

    def ended(self, now_ns: int) -> None:
        """The output of the oldest step in flight is there."""
        if not self.flying:
            return
        step = self.flying.popleft()
        ended_ns, self._ended_ns = self._ended_ns, now_ns
        if step is None or not step.executed or not step.typical:
            return
        duration = float(now_ns - max(step.began_ns, ended_ns))
        self.step_ns = _average(self.step_ns, duration)
        if step.prefill_tokens == 0:
            self._decode_ns = _average(self._decode_ns, duration)
            return
        tokens = float(step.prefill_tokens)
        keep = 0.5 ** (tokens * tokens / _MEMORY_TOKENS2)
        self._xy = keep * self._xy + tokens * max(0.0, duration - self._decode_ns)
        self._xx = keep * self._xx + tokens * tokens

    def prefill_ns(self, tokens: int) -> float:
        """Time that computing so many more tokens takes, with batches as they have been lately."""
        return tokens * (self._xy / self._xx if self._xx else UNMEASURED_PREFILL_NS)


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _NEWEST * (new - old)
