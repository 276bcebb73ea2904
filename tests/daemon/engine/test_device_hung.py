"""A GPU that does not answer: a real daemon serves its engines from host memory, and no request waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.engine.near import (
    BLOCK,
    DEVICE_SLOTS,
    Key,
    Start,
    engine_at,
    near,
    numbers,
    on_device,
    save,
    take,
    values_of,
)
from tests.lab.daemon import Daemon
from tests.support.auditor import Auditor, ask_daemon
from tests.support.fake_engine import FakeEngine
from tests.support.fakecuda import UUID, UUIDS, Machine, needs_fake
from tests.support.waiting import eventually

pytestmark = [pytest.mark.store, needs_fake]
Hung = Callable[..., tuple[Daemon, Path]]


@pytest.fixture
def hung(start: Start, gpus: Machine) -> Hung:
    """hung(call, *options): a daemon in which this call to the first GPU returns once the file is removed."""

    def run(call: str, *options: str) -> tuple[Daemon, Path]:
        daemon = start(*options)
        return daemon, gpus.plant(call, device=0, pid=daemon.pid)

    return run


HUNG = ("--call-timeout-ms", "1000")


def hang(daemon: Daemon, engine: FakeEngine, *each: dict[bytes, bytes]) -> list[Key]:
    """Return unclaimed requests, each with a copy of its own; the first copy is past its deadline."""
    for values in each:
        save(daemon, engine, values)
    keys: list[Key] = []
    copies = 0
    for values in each:
        keys.append(engine.hint(list(values)))
        assert engine.settled(keys[-1]).count == len(values)
        copies += len(values)
        eventually(lambda copies=copies: numbers(daemon)["device_copies"] == copies, what="the copy's start")
    overdue = daemon.wait_record("call.overdue")
    assert overdue is not None
    assert (overdue["call"], overdue["blocks"]) == ("copy", len(each[0]))
    off = daemon.wait_record("device.off")
    assert off is not None
    assert off["error"] == "a copy did not come back in time"
    return keys


def test_a_copy_that_hangs_holds_nobody_up_and_takes_nothing_but_its_slots(
    hung: Hung, gpus: Machine, auditor: Auditor
) -> None:
    """No table names its slots, even once it is over; by then other blocks lie in the host slots that it reads."""
    daemon, gate = hung("copies", *HUNG)
    engine = engine_at(daemon, engine_id="hung")
    held, values = values_of("held", 2), values_of("hung", 4)
    waiting, key = hang(daemon, engine, held, values)
    reads = engine.slots(key)
    assert take(engine, key, values) == 0
    reused: set[int] = set()
    for turn in range(6):  # more blocks than the host has slots
        others = values_of(f"other-{turn}", 10)
        save(daemon, engine, others)
        other = engine.hint(list(others))
        engine.settled(other)
        reused.update(engine.slots(other))
        assert take(engine, other, others) == 0
    assert reused >= set(reads)
    assert numbers(daemon)["device_copies"] == 6
    elsewhere = engine_at(daemon, engine_id="elsewhere", on=UUIDS[1])
    assert daemon.wait_record("device.ready", count=2) is not None
    there = elsewhere.hint(list(values))
    elsewhere.settled(there)
    eventually(lambda: on_device(elsewhere, there) == 4, what="promotion to the other GPU")
    assert take(elsewhere, there, values) == 4
    elsewhere.close()
    eventually(lambda: len(ask_daemon(daemon.socket).engines) == 1, what="the other engine's end")
    gate.unlink()
    eventually(lambda: numbers(daemon)["device_slots_free"] == DEVICE_SLOTS, what="the slots")
    assert take(engine, waiting, held) == 0
    assert engine.load(list(values)) == list(values.values())
    auditor.assert_idle(daemon.pid, daemon.socket)
    assert len(daemon.records("device.off")) == 1
    engine.close()
    eventually(lambda: gpus.memories() == 0, what="the memory given back")


def test_what_a_copy_that_hangs_reads_and_writes_outlives_its_engine(hung: Hung, gpus: Machine) -> None:
    daemon, gate = hung("copies", *HUNG)
    engine = engine_at(daemon)
    hang(daemon, engine, values_of("hung", 4))
    engine.close()
    eventually(lambda: not ask_daemon(daemon.socket).engines, what="the end of the epoch")
    with pytest.raises(AssertionError, match="freed"):
        eventually(lambda: gpus.memories() == 0 or daemon.records("engine.detached"), 2.0, "freed")
    gate.unlink()
    assert daemon.wait_record("engine.detached") is not None
    eventually(lambda: gpus.memories() == 0, what="the memory given back")


def test_a_stop_neither_waits_for_a_copy_that_hangs_nor_loses_what_the_disk_has_not(hung: Hung, tmp_path: Path) -> None:
    daemon, gate = hung("copies", *HUNG, "--disk", f"{tmp_path / 'disk'}:256MiB")
    engine = engine_at(daemon)
    values = values_of("hung", 4)
    hang(daemon, engine, values)
    started = time.monotonic()
    assert daemon.sigterm(40) == 0
    assert time.monotonic() - started < 25
    assert daemon.records("store.unflushed") == []
    engine.close()
    gate.unlink()
    daemon.start()
    engine = engine_at(daemon)
    assert engine.load(list(values)) == list(values.values()), "found on the disk"


def is_served(daemon: Daemon, engine: FakeEngine, name: str) -> None:
    """From host memory."""
    key, values = near(daemon, engine, name, 4)
    assert take(engine, key, values) == 0


def off(daemon: Daemon, *, count: int = 1) -> str:
    """Why an engine has no device slots."""
    line = daemon.wait_record("device.off", count=count)
    assert line is not None
    return str(line["error"])


def test_an_engine_attaches_without_a_gpu_that_gives_no_memory_in_time(
    hung: Hung, gpus: Machine, auditor: Auditor
) -> None:
    """Nobody else waits; for the next on this GPU it is not asked; afterwards all is as if nothing had been."""
    daemon, gate = hung("cuMemCreate")
    before = FakeEngine(daemon.socket, engine_id="before", block_bytes=BLOCK, prefix="before")
    engine = engine_at(daemon, engine_id="hung", attach=False)
    attaching = threading.Thread(target=engine.attach)
    attaching.start()
    assert daemon.wait_record("peer.hello", count=4) is not None
    is_served(daemon, before, "before")
    FakeEngine(daemon.socket, engine_id="beside", block_bytes=BLOCK).close()
    assert daemon.records("device.off") == [], "both before the deadline of the other"
    attaching.join(10)
    assert off(daemon).startswith(f"the GPU does not answer: uuid={UUID} call_timeout_ms=4000")
    is_served(daemon, engine, "hung")
    again = engine_at(daemon, engine_id="again")
    assert off(daemon, count=2).startswith(f"the GPU does not answer: uuid={UUID} call_age_s=")
    again.close()
    engine.close()
    eventually(lambda: len(ask_daemon(daemon.socket).engines) == 1, what="the end of the others")
    gate.unlink()

    def back() -> bool:
        engine = engine_at(daemon, engine_id="hung")
        there = engine.layout.device_slots > 0
        engine.close()
        return there

    eventually(back, what="the GPU")
    eventually(lambda: gpus.memories() == 0, what="the memory given back")
    auditor.assert_idle(daemon.pid, daemon.socket)


@pytest.mark.parametrize("call", ["cuStreamCreate", "cuMemHostRegister_v2"])
def test_an_engine_is_served_without_a_gpu_that_stops_answering_once_it_is_attached(
    hung: Hung, gpus: Machine, auditor: Auditor, call: str
) -> None:
    """What comes of it too late is given back when the engine has left, and not before."""
    daemon, gate = hung(call, *HUNG)
    engine = engine_at(daemon)
    is_served(daemon, engine, "at once")
    assert off(daemon).startswith("the GPU does not answer: it was asked to ")
    is_served(daemon, engine, "later")
    engine.close()
    held = daemon.wait_record("engine.held")
    assert held is not None
    assert held["in_flight"] >= 2, "the call that hangs, and the one behind it that gives back"
    assert daemon.records("engine.detached") == []
    gate.unlink()
    assert daemon.wait_record("engine.detached") is not None
    eventually(lambda: gpus.memories() == 0, what="the memory given back")
    assert len(daemon.records("device.off")) == 1
    assert len(daemon.records("engine.held")) == 1
    auditor.assert_idle(daemon.pid, daemon.socket)


def test_a_gpu_that_does_not_answer_at_the_end_keeps_the_engines_memory_and_says_so(hung: Hung) -> None:
    daemon, gate = hung("cuMemHostUnregister", *HUNG)
    engine = engine_at(daemon)
    key, values = near(daemon, engine, "pinned", 4)
    eventually(lambda: on_device(engine, key) == 4, what="promotion")
    engine.close()
    held = daemon.wait_record("engine.held")
    assert held is not None
    assert held["in_flight"] == 1
    other = engine_at(daemon, engine_id="other", on=UUIDS[1])
    is_at = other.hint(list(values))
    eventually(lambda: on_device(other, is_at) == 4, what="promotion to the other GPU")
    gate.unlink()
    assert daemon.wait_record("engine.detached") is not None
