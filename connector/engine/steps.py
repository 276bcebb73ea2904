"""Measure the engine's steps from outside: their duration, and the cost of a prefill token. Pure.

A step lasts from its start, or from the end of the step before if that came later, to its end; this also holds for
overlapping steps (async scheduling, pipeline stages).  The cost of a token is fitted by least squares through the time
of a step without prefill: short prefills have a fixed cost that says little about tokens, and weigh little.

A step that also loads is longer by the load.  Where everything is loaded, there is no other: such steps count until a
prefill without a load was measured.  Too high a cost makes a request wait too long for what does not come, once: then
it computes a prefill.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

REPORT_STEPS = 64  # between reports of the statistics, while there are requests
# Noise can hide a few tokens: a fit counts once it weighs as much as a prefill of so many in one go.
_LEAST_TOKENS = 32
# Weight of the newest step in the moving average of durations.
_NEWEST = 0.1
# The fit forgets: half of it is younger than about this many prefill tokens in one go, squared.
_MEMORY_TOKENS2 = 8192.0**2
# No engine has so many steps in flight. If it seems so, ends are not reported, and the steps noted here are void.
MAX_IN_FLIGHT = 64


class _PrefillCost:
    """A fit through the origin of the time that prefill tokens added to steps; it forgets older steps."""

    def __init__(self) -> None:
        self._xy = self._xx = 0.0
        self.token_ns = 0.0  # per token; 0 when not measured

    def add(self, tokens: int, added_ns: float) -> None:
        x = float(tokens)
        keep = 0.5 ** (x * x / _MEMORY_TOKENS2)
        self._xy = keep * self._xy + x * max(0.0, added_ns)
        self._xx = keep * self._xx + x * x
        self.token_ns = self._xy / self._xx if self._xx >= _LEAST_TOKENS**2 else 0.0


class _Step(NamedTuple):
    number: int
    began_ns: int
    prefill_tokens: int
    executed: bool
    typical: bool


class StepTimes:
    """One engine's steps. `decode_ns` is the average duration of a step that only decodes, 0 before the first.

    The caller counts a step that need not be measured in `begun` itself. Of the next `skip` ends it calls `ended` for
    none, and counts `skip` down instead: a call less in nearly every step.  `ended_ns`: the last end, which the caller
    enters then, too.
    """

    def __init__(self) -> None:
        self.begun = self.skip = 0
        self.decode_ns = 0.0
        self._passed = 0  # if all of `skip` were called
        self._last = 0
        self._reported = 0  # the step of the last report
        self._flying: deque[_Step] = deque()  # those that are measured
        self.ended_ns = 0
        self._prefill, self._prefill_and_load = _PrefillCost(), _PrefillCost()

    @property
    def passed(self) -> int:
        """Steps that have ended."""
        return self._passed - self.skip

    def began(self, now_ns: int, prefill_tokens: int, *, executed: bool, typical: bool = True) -> None:
        """A step was scheduled. `typical`: it does nothing else that takes time, such as a load."""
        self._passed, self.skip = self._passed - self.skip, 0
        if not self._passed <= self.begun <= self._passed + MAX_IN_FLIGHT:
            self._flying.clear()
            self._passed = self.begun
        self.begun += 1
        self._flying.append(_Step(self.begun, now_ns, prefill_tokens, executed, typical))
        self.skip_to(self._last)

    def ended(self, now_ns: int) -> None:
        """The output of the oldest step in flight is there."""
        self._passed, self.skip = self._passed - self.skip, 0
        if self._passed >= self.begun:
            return
        self._passed += 1
        ended_ns, self.ended_ns = self.ended_ns, now_ns
        step = self._flying.popleft() if self._flying and self._flying[0].number == self._passed else None
        if step is None or not step.executed:
            return
        duration = float(now_ns - max(step.began_ns, ended_ns))
        if step.prefill_tokens:
            cost = self._prefill if step.typical else self._prefill_and_load
            cost.add(step.prefill_tokens, duration - self.decode_ns)
        elif step.typical:
            old = self.decode_ns
            self.decode_ns = duration if old == 0.0 else old + _NEWEST * (duration - old)

    def report_due(self, now_ns: int, *, busy: bool) -> bool:
        """The output of the oldest step in flight is there, and `skip` is 0.

        Return whether the statistics are to be reported: now and then while the engine is `busy`.
        """
        self.ended(now_ns)
        if busy and self.passed < self._reported + REPORT_STEPS:
            self.skip_to(self._reported + REPORT_STEPS)
            return False
        self._reported = self.passed
        return True

    def under_way(self) -> tuple[int, float]:
        """When the oldest step in flight began, and how long it should take; (0, 0) where there is none that executes.

        What is not measured yet counts as no time.
        """
        number = self.passed + 1
        if self.begun < number or not self.decode_ns:
            return 0, 0.0
        step = next((each for each in self._flying if each.number == number), None)
        if step is None:  # it only decodes
            return self.ended_ns, self.decode_ns
        if not step.executed:
            return 0, 0.0
        prefill_ns = self.prefill_ns(step.prefill_tokens) if step.prefill_tokens else 0.0
        return max(self.ended_ns, step.began_ns), self.decode_ns + (prefill_ns if prefill_ns < math.inf else 0.0)

    def skip_to(self, last: int) -> None:
        """`ended` is to be called for the end of step number `last`, and before it for each end that is measured."""
        passed, self._last = self._passed - self.skip, last
        due = last
        if self._flying:  # a measured step begins with the end of the one before it, if that is still in flight
            due = min(due, max(passed + 1, self._flying[0].number - 1))
        self.skip = max(0, due - passed - 1)
        self._passed = passed + self.skip

    def prefill_ns(self, tokens: int) -> float:
        """Time that computing so many more tokens takes, with batches as they have been lately; inf when not known."""
        token_ns = self._prefill.token_ns or self._prefill_and_load.token_ns
        return tokens * token_ns if token_ns else math.inf
