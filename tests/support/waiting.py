"""Waits of tests and of the lab: poll until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def poll(condition: Callable[[], T], timeout_s: float, *, pause_s: float = 0.02) -> T:
    """Call `condition` until it returns something true or time is up; return what it returned last."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(pause_s)
    return value


def eventually(
    condition: Callable[[], T | None],
    timeout_s: float = 10.0,
    what: str | Callable[[], object] = "the condition",
    *,
    pause_s: float = 0.002,
) -> T:
    """Poll until `condition` returns something true, and return that; fail with `what` when time is up."""
    if value := poll(condition, timeout_s, pause_s=pause_s):
        return value
    raise AssertionError(f"{what if isinstance(what, str) else what()} did not come within {timeout_s} s")
