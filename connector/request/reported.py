"""Whether the ranks have reported all that may have become of their weights; only then a load may be synchronous.

vLLM takes back the step of a synchronous load that failed, but not the steps behind it that were scheduled before it
heard of that: their tokens rest on blocks that nobody filled, and they are counted as if the first step had brought its
own.  An asynchronous load that failed it takes back whole.  What makes a load fail is a change of weights that the
scheduler side does not know of.  So where steps overlap, loads are asynchronous from the start, and from each call that
may change weights, until a step that computes, or loads, has brought the ranks' reports.
"""

from __future__ import annotations

import functools
from typing import Any

from ..engine import compat
from ..engine.steps import StepTimes
from ..identity import updates


class Reported:
    """One engine's. `overlapping`: its steps overlap. `watched`: whether this process sees the calls to the workers."""

    def __init__(self, steps: StepTimes, *, overlapping: bool) -> None:
        self._steps, self._overlapping, self.watched = steps, overlapping, True
        self._step = self._called = 0  # the step whose reports say all, once there is one; calls before it

    def called(self) -> None:
        """The workers are about to be called: what they report with the steps so far says nothing of that."""
        self._step = 0

    def begins(self) -> None:
        """A step that computes, or loads, is scheduled next."""
        if not self._step or self._called != updates.calls:
            self._step, self._called = self._steps.begun + 1, updates.calls

    @property
    def all(self) -> bool:
        """Whether nothing is unreported."""
        if not self._overlapping:
            return True
        told = self.watched and 0 < self._step <= self._steps.passed
        return told and self._called == updates.calls


def install() -> bool:
    """Have this process's engine cores say when they call their workers; False where this vLLM does not let them."""
    core = compat.engine_core()
    original = getattr(core, "collective_rpc", None)
    if original is None or hasattr(original, "kvprefetch"):
        return original is not None

    @functools.wraps(original)
    def collective_rpc(self: Any, *args: Any, **options: Any) -> Any:
        for side in compat.scheduler_sides(self.scheduler.get_kv_connector()):
            side.reported.called()
        return original(self, *args, **options)

    collective_rpc.kvprefetch = True  # type: ignore[attr-defined]
    core.collective_rpc = collective_rpc  # type: ignore[union-attr]
    return True
