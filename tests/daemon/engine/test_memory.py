"""The memory of an epoch: how much an engine can make the daemon keep."""

from __future__ import annotations

from kvprefetch.daemon.engine.staging import MAX_SLOTS, slots_for


def test_blocks_of_one_byte_make_no_more_slots_than_the_daemon_can_keep() -> None:
    """An engine says how large its blocks are; each slot costs the daemon memory of its own, and time at attach."""
    assert slots_for(1 << 40, [1]) == MAX_SLOTS
    assert slots_for(10_000, [1000, 2000]) == 3
