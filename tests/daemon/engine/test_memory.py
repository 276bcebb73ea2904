"""The memory of an epoch: how much an engine can make the daemon keep."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.config.model import DaemonConfig
from kvprefetch.daemon.engine.memory import EngineInfo, layout_for
from kvprefetch.daemon.engine.staging import MAX_SLOTS, slots_for
from tests.support.engine_side import ONE_GROUP, EngineSpec


def test_blocks_of_one_byte_make_no_more_slots_than_the_daemon_can_keep() -> None:
    """An engine says how large its blocks are; each slot costs the daemon memory of its own, and time at attach."""
    assert slots_for(1 << 40, [1]) == MAX_SLOTS
    assert slots_for(10_000, [1000, 2000]) == 3


@pytest.mark.parametrize(("wanted", "ring_bytes"), [("6MiB", 8 << 20), ("8MB", 8 << 20), ("64KiB", 64 << 10)])
def test_any_hint_ring_makes_one_of_a_power_of_two(wanted: str, ring_bytes: int) -> None:
    config = DaemonConfig.model_validate({"staging": "64MiB", "hint_ring": wanted})
    spec = EngineSpec(max_blocks=8, block_bytes=4096)
    layout, _ = layout_for(config, 1, EngineInfo("e", ONE_GROUP, spec.scheduler(), [spec.worker(0)]))
    assert layout.ring_bytes == ring_bytes
