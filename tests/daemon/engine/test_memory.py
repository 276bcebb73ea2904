"""The memory of an epoch: refused where taking it would leave the machine without."""

from __future__ import annotations

import pytest

from kvprefetch.daemon.config.model import load
from kvprefetch.daemon.engine import memory
from kvprefetch.daemon.engine.memory import EngineInfo, EngineMemory
from kvprefetch.daemon.engine.staging import MAX_SLOTS, slots_for
from kvprefetch.shmring.errors import SegmentError
from tests.support.engine_side import BLOCK_TOKENS, EngineSpec


def test_staging_that_the_machine_has_not_left_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would hand it out and then kill somebody, the engine perhaps."""
    spec = EngineSpec(max_blocks=8)
    engine = EngineInfo("e", BLOCK_TOKENS, spec.scheduler(), [spec.worker()])
    config = load({"staging": "64MiB", "hint_ring": "1MiB"})
    monkeypatch.setattr(memory, "available_bytes", lambda: 64 << 20, raising=False)
    with pytest.raises(SegmentError, match=r"^staging: not enough memory .*: staging=64MiB .* available=64MiB$"):
        EngineMemory.create(config, 7, engine)
    monkeypatch.setattr(memory, "available_bytes", lambda: 70 << 20, raising=False)
    EngineMemory.create(config, 7, engine).close()


def test_blocks_of_one_byte_make_no_more_slots_than_the_daemon_can_keep() -> None:
    """An engine says how large its blocks are; each slot costs the daemon memory of its own, and time at attach."""
    assert slots_for(1 << 40, [1]) == MAX_SLOTS
    assert slots_for(10_000, [1000, 2000]) == 3
