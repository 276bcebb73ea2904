"""Copies of a worker that end later, as those of a busy GPU do: in the place of the ones that a CPU does at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


class _Fence:
    def __init__(self, work: Callable[[], None], ends: float) -> None:
        self._work, self._ends, self._done = work, ends, False

    def query(self) -> bool:
        """Whether the copies are done; beside the steps, they are done while nobody looks."""
        if time.monotonic() >= self._ends:
            self.finish()
        return self._done

    def finish(self) -> None:
        if not self._done:
            self._done = True
            self._work()


class Streams:
    """As PlainCopies: asynchronous loads are done `seconds` later, saves when the next step begins."""

    seconds = 0.0

    def __init__(self, copies: Any) -> None:
        self._copies = copies
        self._beside, self._behind = list[_Fence](), list[_Fence]()

    def mark(self) -> None:
        self._copies.mark()

    def run(self, copies: Any, *, save: bool = False, beside: bool = False, overlap: bool = False) -> Any:
        if not (save or beside):
            return self._copies.run(copies, overlap=overlap)
        fence = _Fence(lambda: self._copies.run(copies, save=save, beside=beside), time.monotonic() + self.seconds)
        (self._behind if save else self._beside).append(fence)
        return fence

    def step_begins(self) -> None:
        """Its forward is behind the saves of steps before."""
        for fence in self._behind:
            fence.finish()
        self._behind.clear()

    def synchronize(self) -> None:
        """Wait for all copies, as for a whole device."""
        self.step_begins()
        for fence in self._beside:
            fence.finish()
        self._beside.clear()
