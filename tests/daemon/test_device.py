"""The device tier of a real daemon with a GPU of host memory: near blocks are on it, and nobody depends on it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.daemon import Daemon
from kvprefetch.daemon.config import load
from kvprefetch.daemon.memory import EngineMemory
from kvprefetch.shmring import cuda, messages
from kvprefetch.shmring.protocol import PROTOCOL, FlagState
from tests.daemon.conftest import keeps_to_the_catalogue, starter
from tests.daemon.fake_engine import FakeEngine, wait_for
from tests.daemon.stores import stored
from tests.support.auditor import Auditor, ask_daemon, device_memories
from tests.support.device_daemon import with_device
from tests.support.host_device import UUID, UUIDS, HostDevices

BLOCK = 256 << 10
DEVICE_SLOTS = (4 << 20) // BLOCK
Key = tuple[int, int]
Start = Callable[..., Daemon]


def daemon_with(*extra: str, fail: str = "-", gate: str | Path = "-") -> Daemon:
    """With a GPU of 64 MiB, 4 MiB of it for staging; while the file `gate` exists, no copy to it is over."""
    options = ("--device-staging", "4MiB", "--device-margin", "0", "--log-level", "debug", *extra)
    return with_device(Daemon(memory="64MiB", staging="16MiB", extra=options), fail=fail, gate=gate)


@pytest.fixture
def start(auditor: Auditor) -> Iterator[Start]:
    yield from starter(daemon_with)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One for the tests that leave it as it was."""
    with daemon_with() as daemon:
        yield daemon
        assert daemon.sigterm(30) == 0
        keeps_to_the_catalogue(daemon)


@pytest.fixture(autouse=True)
def _device_memory_is_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "daemon" in request.fixturenames:
        pid = request.getfixturevalue("daemon").pid
        while FakeEngine.made:
            FakeEngine.made.pop().close()
        wait_for(lambda: device_memories(pid) == 0, what="the memory given back")


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    (gate := tmp_path / "gate").touch()
    return gate


def engine_at(daemon: Daemon, *, on: str = UUID, **options: Any) -> FakeEngine:
    return FakeEngine(daemon.socket, block_bytes=BLOCK, devices=HostDevices(64 << 20, on=on), **options)


def values_of(name: str, count: int, content: str = "") -> dict[bytes, bytes]:
    digests = [hashlib.sha256(f"{name}-{i}".encode()).digest() for i in range(count)]
    contents = [hashlib.sha256(digest + content.encode()).digest() for digest in digests]
    return {digest: each * (BLOCK // 32) for digest, each in zip(digests, contents, strict=True)}


def save(daemon: Daemon, engine: FakeEngine, values: dict[bytes, bytes]) -> None:
    before = sum(line["stored_blocks"] for line in daemon.records("save.done"))
    engine.save(values)
    stored(daemon, before + len(values))


def slots_of(engine: FakeEngine, key: Key) -> list[int]:
    return engine.table.read_slots(key[0], 0, engine.flag(key).count)


def on_device(engine: FakeEngine, key: Key) -> int:
    return sum(slot >= engine.layout.slot_count for slot in slots_of(engine, key))


def take(engine: FakeEngine, key: Key, values: dict[bytes, bytes]) -> int:
    """Claim, read from where the table says, release; how many blocks came from the device."""
    assert engine.move(key, FlagState.CLAIMED)
    slots = slots_of(engine, key)
    for rank in range(engine.ranks):
        assert [engine.read(slot, rank) for slot in slots] == list(values.values())
    assert engine.move(key, FlagState.RELEASED)
    engine.done(key, loaded=len(slots))
    return sum(slot >= engine.layout.slot_count for slot in slots)


def numbers(daemon: Daemon) -> dict[str, int | str]:
    return ask_daemon(daemon.socket).engines[0]


def check_near(daemon: Daemon, auditor: Auditor, owner: str) -> None:
    engine = engine_at(daemon, ranks=2)
    values = values_of("near", 6)
    save(daemon, engine, values)
    for _ in range(2):
        key = engine.hint(list(values))
        assert engine.settled(key).count == 6
        wait_for(lambda key=key: on_device(engine, key) == 6, what="promotion")
        assert take(engine, key, values) == 6
    auditor.assert_idle(daemon.pid, daemon.socket)
    counted = numbers(daemon)
    assert (counted["promoted_blocks"], counted["device_blocks"], counted["loaded_blocks"]) == (6, 12, 12)
    assert counted["device_slots"] == DEVICE_SLOTS // 2, "two ranks share the GPU"
    assert daemon.records("device.ready")[-1]["owner"] == owner


def test_near_blocks_are_on_the_device_and_loaded_from_there(daemon: Daemon, auditor: Auditor) -> None:
    """On every rank; a second request finds the copies that the first one left."""
    check_near(daemon, auditor, "daemon")


def test_the_engine_may_own_the_memory(start: Start, auditor: Auditor) -> None:
    daemon = start("--device-owner", "engine")
    check_near(daemon, auditor, "engine")
    FakeEngine.made[-1].close()
    wait_for(lambda: device_memories(daemon.pid) == 0, what="the memory unmapped")


def test_room_for_two_requests_goes_to_the_two_most_urgent(daemon: Daemon, auditor: Auditor) -> None:
    engine = engine_at(daemon)
    size = DEVICE_SLOTS // 2
    values = [values_of(f"queue-{i}", size) for i in range(6)]
    for each in values:
        save(daemon, engine, each)
    keys = [engine.hint(list(each), name=f"request-{i}") for i, each in enumerate(values)]
    for key in keys:
        assert engine.settled(key).count == size

    def placed(*expected: int) -> None:
        wait_for(lambda: [on_device(engine, key) for key in keys] == [size * (i in expected) for i in range(6)],
                 what=f"{expected} on the device")  # fmt: skip

    placed(0, 1)
    engine.ask(keys[5])
    placed(0, 5)
    assert engine.move(keys[0], FlagState.CLAIMED)
    held = slots_of(engine, keys[0])
    for key in keys[1:5]:
        engine.ask(key)
    placed(0, 1)  # the claimed one keeps its slots; of those asked for, the earliest has the others
    assert [engine.read(slot) for slot in held] == list(values[0].values())
    assert engine.move(keys[0], FlagState.RELEASED)
    engine.done(keys[0], loaded=size)
    loaded = [take(engine, key, each) for key, each in list(zip(keys, values, strict=True))[1:]]
    assert loaded[0] == size
    auditor.assert_idle(daemon.pid, daemon.socket)


def test_after_a_reset_no_old_copy_is_read(daemon: Daemon) -> None:
    engine = engine_at(daemon)
    old, new = values_of("reset", 4), values_of("reset", 4, content="new weights")
    save(daemon, engine, old)
    key = engine.hint(list(old))
    engine.settled(key)
    wait_for(lambda: on_device(engine, key) == 4, what="promotion")
    assert take(engine, key, old) == 4
    messages.send_message(engine.scheduler, messages.Reset(reset_generation=1, timeout_ms=10_000))
    answer = messages.receive_message(engine.scheduler)
    assert answer is not None
    assert answer[0] == messages.ResetDone(reset_generation=1, ok=True)
    engine.save(new, reset_generation=1)
    wait_for(lambda: engine.credits.available() == int(numbers(daemon)["save_slots"]), what="the save")
    again = engine.hint(list(new))
    engine.settled(again)
    wait_for(lambda: on_device(engine, again) == 4, what="promotion")
    assert take(engine, again, new) == 4


def test_a_device_that_fails_while_it_copies_is_left_alone(start: Start, auditor: Auditor) -> None:
    """One line says why; everything is loaded from the host, and nothing of the device is kept."""
    daemon = start(fail="copy")
    engine = engine_at(daemon)
    values = values_of("host", 4)
    save(daemon, engine, values)
    key = engine.hint(list(values))
    engine.settled(key)
    assert [line["error"] for line in wait_for(lambda: daemon.records("device.off"))] == ["copy: told to fail"]
    assert take(engine, key, values) == 0
    assert engine.load(list(values)) == list(values.values())
    auditor.assert_idle(daemon.pid, daemon.socket)
    assert numbers(daemon)["promoted_blocks"] == 0
    engine.close()
    wait_for(lambda: device_memories(daemon.pid) == 0, what="the memory given back")


HUNG = ("--call-timeout-ms", "1000")


def hang(daemon: Daemon, engine: FakeEngine, *each: dict[bytes, bytes]) -> list[Key]:
    """Requests that nobody claimed, each with a copy of its own; the first one's is past its deadline now."""
    for values in each:
        save(daemon, engine, values)
    keys: list[Key] = []
    copies = 0
    for values in each:
        keys.append(engine.hint(list(values)))
        assert engine.settled(keys[-1]).count == len(values)
        copies += len(values)
        wait_for(lambda copies=copies: numbers(daemon)["device_copies"] == copies, what="the copy's start")
    overdue = daemon.wait_record("call.overdue")
    assert overdue is not None
    assert (overdue["call"], overdue["blocks"]) == ("copy", len(each[0]))
    off = daemon.wait_record("device.off")
    assert off is not None
    assert off["error"] == "a copy did not come back in time"
    return keys


def test_a_copy_that_hangs_holds_nobody_up_and_takes_nothing_but_its_slots(
    start: Start, auditor: Auditor, gate: Path
) -> None:
    """Nobody is told its slots, also once it is over; by then other blocks lie in the host slots that it reads."""
    daemon = start(*HUNG, gate=gate)
    engine = engine_at(daemon, engine_id="hung")
    held, values = values_of("held", 2), values_of("hung", 4)
    waiting, key = hang(daemon, engine, held, values)
    reads = slots_of(engine, key)
    assert take(engine, key, values) == 0
    reused: set[int] = set()
    for turn in range(6):  # more blocks than the host has slots
        others = values_of(f"other-{turn}", 10)
        save(daemon, engine, others)
        other = engine.hint(list(others))
        engine.settled(other)
        reused.update(slots_of(engine, other))
        assert take(engine, other, others) == 0
    assert reused >= set(reads)
    assert numbers(daemon)["device_copies"] == 6
    elsewhere = engine_at(daemon, engine_id="elsewhere", on=UUIDS[1])
    assert daemon.wait_record("device.ready", count=2) is not None
    near = elsewhere.hint(list(values))
    elsewhere.settled(near)
    wait_for(lambda: on_device(elsewhere, near) == 4, what="promotion to the other GPU")
    assert take(elsewhere, near, values) == 4
    elsewhere.close()
    wait_for(lambda: len(ask_daemon(daemon.socket).engines) == 1, what="the other engine's end")
    gate.unlink()
    wait_for(lambda: numbers(daemon)["device_slots_free"] == DEVICE_SLOTS, what="the slots")
    assert take(engine, waiting, held) == 0
    assert engine.load(list(values)) == list(values.values())
    auditor.assert_idle(daemon.pid, daemon.socket)
    assert len(daemon.records("device.off")) == 1
    engine.close()
    wait_for(lambda: device_memories(daemon.pid) == 0, what="the memory given back")


def test_what_a_copy_that_hangs_reads_and_writes_outlives_its_engine(start: Start, gate: Path) -> None:
    daemon = start(*HUNG, gate=gate)
    engine = engine_at(daemon)
    hang(daemon, engine, values_of("hung", 4))
    engine.close()
    wait_for(lambda: not ask_daemon(daemon.socket).engines, what="the end of the epoch")
    with pytest.raises(AssertionError, match="freed"):
        wait_for(lambda: device_memories(daemon.pid) == 0 or daemon.records("engine.detached"), 2.0, "freed")
    gate.unlink()
    assert daemon.wait_record("engine.detached") is not None
    wait_for(lambda: device_memories(daemon.pid) == 0, what="the memory given back")


def test_a_stop_neither_waits_for_a_copy_that_hangs_nor_loses_what_the_disk_has_not(
    start: Start, gate: Path, tmp_path: Path
) -> None:
    daemon = start(*HUNG, "--disk", f"{tmp_path / 'disk'}:256MiB", gate=gate)
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


def test_host_memory_that_cannot_be_pinned_is_copied_all_the_same(start: Start) -> None:
    daemon = start(fail="register")
    engine = engine_at(daemon)
    values = values_of("unpinned", 4)
    save(daemon, engine, values)
    key = engine.hint(list(values))
    engine.settled(key)
    wait_for(lambda: on_device(engine, key) == 4, what="promotion")
    assert take(engine, key, values) == 4
    assert len(daemon.records("device.unpinned")) == 1


def test_a_device_is_opened_for_an_engine_that_has_one_and_no_other(start: Start) -> None:
    daemon = start(fail="open_device")
    values = values_of("cpu", 2)
    engine = FakeEngine(daemon.socket, block_bytes=BLOCK)
    save(daemon, engine, values)
    assert engine.load(list(values)) == list(values.values())
    engine.close()
    assert daemon.records("device.off") == []
    engine = engine_at(daemon)
    assert engine.load(list(values)) == list(values.values())
    assert [line["error"] for line in daemon.records("device.off")] == ["open_device: told to fail"]
    assert numbers(daemon)["device_slots"] == 0


def hello(role: str, rank: int, device: str) -> messages.Hello:
    worker = messages.WorkerShape(block_bytes=[BLOCK], key_prefix=["k@"], put_factor=1, put_turn=0, device=device)
    shape = messages.SchedulerShape(max_blocks=8, max_hint_bytes=512, loads=True, saves=True)
    return messages.Hello(
        protocol=PROTOCOL, version="t", engine_id="e", incarnation="0" * 32, role=role, rank=rank, world_size=1,
        groups=1, block_tokens=32, worker=worker if role == "worker" else None,
        scheduler=shape if role == "scheduler" else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fail", "options", "words"),
    [
        ("open_device", {}, "open_device: told to fail"),
        ("free_bytes", {}, "free_bytes: told to fail"),
        ("allocate", {}, "allocate: told to fail"),
        ("handle", {}, "handle: told to fail"),
        ("", {"device_staging": "1MiB"}, "room_bytes=0 block_bytes=262144 device_staging=1048576 device_margin=0"),
        ("", {"device_margin": "63MiB"}, "room_bytes=0 block_bytes=262144 device_staging=4194304 device_margin=66"),
        ("", {"device_staging": 0}, ""),
    ],
)
def test_where_there_can_be_no_device_slots_there_are_host_slots_and_a_reason(
    monkeypatch: pytest.MonkeyPatch, fail: str, options: dict[str, object], words: str
) -> None:
    devices = HostDevices(64 << 20)
    devices.device.fail.add(fail)
    monkeypatch.setattr(cuda, "devices", devices)
    config = load({"staging": "16MiB", "device_staging": "4MiB", "device_margin": 0, **options})
    memory = EngineMemory.create(config, 7, hello("scheduler", 0, ""), [hello("worker", 0, UUID)])
    assert (memory.device, memory.layout.device_slots) == (None, 0)
    assert words in memory.device_error
    assert bool(words) == bool(memory.device_error)
    memory.close()
    wait_for(lambda: not any(devices.device.live.values()), what="the memory given back")


def test_a_worker_without_a_gpu_keeps_all_ranks_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "devices", HostDevices(64 << 20))
    workers = [hello("worker", rank, device) for rank, device in enumerate((UUID, ""))]
    memory = EngineMemory.create(load({"device_margin": 0}), 7, hello("scheduler", 0, ""), workers)
    assert memory.device is None
    assert memory.device_error == "not every worker has a GPU that staging can use: rank=1"
    memory.close()


class Blind(FakeEngine):
    """Its workers cannot open the slab."""

    def mapped(self, attached: messages.Attached, leases: list[int]) -> messages.Mapped:
        self.leases += leases
        return messages.Mapped(epoch=attached.epoch)


def test_where_a_worker_has_no_device_slots_no_table_names_one(daemon: Daemon) -> None:
    engine = Blind(daemon.socket, block_bytes=BLOCK, devices=HostDevices(64 << 20))
    values = values_of("blind", 4)
    save(daemon, engine, values)
    assert engine.load(list(values)) == list(values.values())
    assert engine.load(list(values)) == list(values.values())
    assert [line["error"] for line in daemon.records("device.off")][-1:] == ["a worker has no device slots: rank=0"]
    assert numbers(daemon)["promoted_blocks"] == 0


def test_a_slab_is_freed_only_when_its_importer_let_go(daemon: Daemon) -> None:
    """Freeing memory that another process has mapped is undefined."""
    engine = engine_at(daemon)
    before = len(daemon.records("engine.detached"))
    assert device_memories(daemon.pid) == 1
    for sock in engine.sockets:  # the epoch is over, but a worker may still copy
        sock.close()
    wait_for(lambda: len(daemon.records("engine.detached")) > before, what="the end of the epoch")
    with pytest.raises(AssertionError, match="freed"):
        wait_for(lambda: device_memories(daemon.pid) == 0, 1.0, "freed")
    engine.close()
    wait_for(lambda: device_memories(daemon.pid) == 0, what="the memory given back")


def test_attaching_again_and_again_leaves_no_device_memory_behind(daemon: Daemon, auditor: Auditor) -> None:
    values = values_of("again", 2)
    for turn in range(20):
        engine = engine_at(daemon)
        if turn == 0:
            save(daemon, engine, values)
        assert engine.load(list(values)) == list(values.values())
        engine.close()
    wait_for(lambda: device_memories(daemon.pid) == 0, what="the memory given back")
    auditor.assert_idle(daemon.pid, daemon.socket)
