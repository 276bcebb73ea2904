"""Programs of one service: started one after the other, each with its log in one folder, and ended together."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tests.lab import process

P = TypeVar("P", bound="Programs")


class StartError(RuntimeError):
    """A program is missing or did not start; the message ends with its log."""


class Programs:
    """Use as a context manager. A subclass starts its programs in `_start` and appends them to `_processes`."""

    name = "programs"
    start_timeout_s = 30.0
    term_s = 0.0
    """How long each program may take to end by itself."""

    def __init__(self) -> None:
        self._scratch: Path | None = None
        self._processes: list[process.Child] = []

    def __enter__(self: P) -> P:
        self._scratch = process.scratch(self.name)
        try:
            self._start(self._scratch)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all programs and remove their folder."""
        while self._processes:
            process.reap(self._processes.pop(), term_s=self.term_s)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _start(self, scratch: Path) -> None:
        raise NotImplementedError

    def _wait(self, child: process.Child, name: str, log: Path, ready: Callable[[], bool]) -> None:
        if not process.comes_up(child, ready, self.start_timeout_s):
            raise StartError(f"{name} did not start\n{process.tail(log)}")
