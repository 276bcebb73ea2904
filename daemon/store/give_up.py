"""Distinguishes a transfer that has ended from one that Mooncake gave up and that may still be under way.

Mooncake waits 60 s of CLOCK_REALTIME for a get or put, answers -800 and does not cancel the transfer: it goes on
reading or writing the call's memory for as long as its connection lives.  A transfer that fails sooner has ended, for
Mooncake waits until every part of it is done or failed (transfer_task.cpp, `check_task_status`).  CLOCK_REALTIME may be
set while a call runs, so either clock counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

GIVE_UP_NS = 55_000_000_000  # less than Mooncake's 60 s: a slot quarantined in vain is cheap, a wrong byte is not
UNDER_WAY = -99_999  # our own code for a transfer that may still be under way

# Mooncake's batch_get_into or batch_put_from; with several buffers, lists of addresses and sizes.
Move = Callable[[list[str], list[Any], list[Any]], list[int]]


def clocks_ns() -> tuple[int, int]:
    return time.monotonic_ns(), time.time_ns()


def move(call: Move, keys: Sequence[str], addresses: Sequence[Any], sizes: Sequence[Any]) -> list[int]:
    """Make a batch call; return each key's code, UNDER_WAY for a failure in a call that Mooncake may have given up."""
    began = clocks_ns()
    codes = call(list(keys), list(addresses), list(sizes))
    lasted_ns = max(now - then for now, then in zip(clocks_ns(), began, strict=True))
    return codes if lasted_ns < GIVE_UP_NS else [code if code >= 0 else UNDER_WAY for code in codes]
