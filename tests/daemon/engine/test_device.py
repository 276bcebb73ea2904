"""The device cache of a real daemon with a fake GPU: blocks staged first are on it, and no request needs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from kvprefetch.daemon.config.model import DaemonConfig
from kvprefetch.daemon.engine.memory import EngineInfo, EngineMemory
from kvprefetch.daemon.engine.reservations import Reservations, Reserved
from kvprefetch.daemon.work.pools import Pools
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.wire.attach import Attached, Mapped, Reset, ResetDone
from kvprefetch.shmring.wire.codec import receive_message, send_message
from tests.daemon.conftest import keeps_to_the_catalogue
from tests.daemon.engine.near import (
    BLOCK,
    DEVICE_SLOTS,
    Key,
    Start,
    daemon_with,
    engine_at,
    near,
    numbers,
    on_device,
    save,
    take,
    values_of,
)
from tests.lab.daemon import Daemon
from tests.support.auditor import Auditor
from tests.support.engine_side import ONE_GROUP, EngineSpec
from tests.support.fake_engine import FakeEngine
from tests.support.fakecuda import UUID, Machine, held_by, machine, needs_fake
from tests.support.waiting import eventually

pytestmark = needs_fake
OUT_OF_MEMORY, DEVICE_LOST = 2, 999


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
        while FakeEngine.made:
            FakeEngine.made.pop().close()
        eventually(lambda: machine().left() == {}, what="everything given back")


@pytest.mark.store
def test_near_blocks_are_on_the_device_and_loaded_from_there(daemon: Daemon, auditor: Auditor) -> None:
    """On every rank; a second request finds the copies that the first one left."""
    engine = engine_at(daemon, ranks=2)
    values = values_of("near", 6)
    save(daemon, engine, values)
    for _ in range(2):
        key = engine.hint(list(values))
        assert engine.settled(key).count == 6
        eventually(lambda key=key: on_device(engine, key) == 6, what="promotion")
        assert take(engine, key, values) == 6
    auditor.assert_idle(daemon.pid, daemon.socket)
    counted = numbers(daemon)
    assert (counted["promoted_blocks"], counted["device_blocks"], counted["loaded_blocks"]) == (6, 12, 12)
    assert counted["device_slots"] == DEVICE_SLOTS // 2, "two ranks share the GPU"


@pytest.mark.store
def test_requests_that_are_staged_before_the_device_is_ready_are_promoted_when_it_is(
    start: Start, auditor: Auditor, gpus: Machine
) -> None:
    """As an engine's first requests are, which may wait for minutes; the first one has the room until it ends."""
    daemon = start("--call-timeout-ms", "60000")
    fault = gpus.plant("cuStreamCreate", pid=daemon.pid)
    engine = engine_at(daemon)
    first, second = values_of("first", DEVICE_SLOTS), values_of("second", DEVICE_SLOTS)
    save(daemon, engine, first)
    save(daemon, engine, second)
    keys = list[Key]()
    for values in (first, second):
        keys.append(engine.hint(list(values)))
        assert engine.settled(keys[-1]).count == DEVICE_SLOTS
    assert daemon.records("device.ready") == []
    fault.unlink()
    eventually(lambda: [on_device(engine, key) for key in keys] == [DEVICE_SLOTS, 0], what="promotion")
    assert take(engine, keys[0], first) == DEVICE_SLOTS
    eventually(lambda: on_device(engine, keys[1]) == DEVICE_SLOTS, what="promotion of the other")
    assert take(engine, keys[1], second) == DEVICE_SLOTS
    auditor.assert_idle(daemon.pid, daemon.socket)


@pytest.mark.store
def test_after_a_reset_no_old_copy_is_read(daemon: Daemon) -> None:
    engine = engine_at(daemon)
    (key, old), new = near(daemon, engine, "reset", 4), values_of("reset", 4, content="new weights")
    eventually(lambda: on_device(engine, key) == 4, what="promotion")
    assert take(engine, key, old) == 4
    send_message(engine.scheduler, Reset(reset_generation=1, weights="1" * 32))
    answer = receive_message(engine.scheduler)
    assert answer is not None
    assert answer[0] == ResetDone(reset_generation=1)
    engine.save(new, reset_generation=1)
    eventually(lambda: engine.credits.available() == int(numbers(daemon)["save_slots"]), what="the save")
    again = engine.hint(list(new))
    engine.settled(again)
    eventually(lambda: on_device(engine, again) == 4, what="promotion")
    assert take(engine, again, new) == 4


@pytest.mark.store
def test_a_device_that_fails_while_it_copies_is_left_alone(start: Start, auditor: Auditor, gpus: Machine) -> None:
    """One line says why; everything is loaded from the host, and nothing of the device is kept."""
    daemon = start()
    gpus.plant("cuMemcpyAsync", DEVICE_LOST, pid=daemon.pid)
    engine = engine_at(daemon)
    key, values = near(daemon, engine, "host", 4)
    error = "memcpyAsync: CUDARuntimeError: cudaErrorUnknown: code 999 of the driver"
    assert [line["error"] for line in eventually(lambda: daemon.records("device.off"))] == [error]
    assert take(engine, key, values) == 0
    assert engine.load(list(values)) == list(values.values())
    auditor.assert_idle(daemon.pid, daemon.socket)
    assert numbers(daemon)["promoted_blocks"] == 0
    engine.close()
    eventually(lambda: machine().left() == {}, what=lambda: machine().left())


@pytest.mark.store
def test_host_memory_that_cannot_be_pinned_is_copied_all_the_same(start: Start, gpus: Machine) -> None:
    daemon = start()
    gpus.plant("cuMemHostRegister_v2", OUT_OF_MEMORY, pid=daemon.pid)
    engine = engine_at(daemon)
    key, values = near(daemon, engine, "unpinned", 4)
    eventually(lambda: on_device(engine, key) == 4, what="promotion")
    assert take(engine, key, values) == 4
    assert len(daemon.records("device.unpinned")) == 1


@pytest.mark.store
def test_a_device_is_opened_for_an_engine_that_has_one_and_no_other(start: Start, gpus: Machine) -> None:
    daemon = start()
    gpus.plant("cuInit", DEVICE_LOST, pid=daemon.pid)
    values = values_of("cpu", 2)
    engine = FakeEngine(daemon.socket, block_bytes=BLOCK)
    save(daemon, engine, values)
    assert engine.load(list(values)) == list(values.values())
    engine.close()
    assert daemon.records("device.off") == []
    engine = engine_at(daemon)
    assert engine.load(list(values)) == list(values.values())
    assert [line["error"] for line in daemon.records("device.off")] == ["cuInit: CUDA_ERROR_UNKNOWN: code=999"]
    assert numbers(daemon)["device_slots"] == 0


@pytest.mark.parametrize(
    ("fail", "options", "words"),
    [
        ("cuDevicePrimaryCtxRetain", {}, "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemGetInfo_v2", {}, "cuMemGetInfo_v2: CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemCreate", {}, "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemSetAccess", {}, "cuMemSetAccess: CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemsetD8_v2", {}, "memset: CUDARuntimeError: cudaErrorOutOfMemory: code 2 of the driver"),
        ("cuMemExportToShareableHandle", {}, "cuMemExportToShareableHandle: CUDA_ERROR_OUT_OF_MEMORY"),
        ("", {"device_staging": "1MiB"}, "room=0 block=256KiB device_staging=1MiB device_margin=0"),
        ("", {"device_margin": "255MiB"}, "room=0 block=256KiB device_staging=4MiB device_margin=255MiB"),
        ("", {"device_staging": 0}, ""),
    ],
)
def test_where_there_can_be_no_device_slots_there_are_host_slots_and_a_reason(
    gpus: Machine, monkeypatch: pytest.MonkeyPatch, fail: str, options: dict[str, object], words: str
) -> None:
    monkeypatch.setattr(cuda, "_devices", {})  # the first engine on this GPU
    if fail:
        gpus.plant(fail, OUT_OF_MEMORY)
    memory = prepared({"staging": "16MiB", "device_staging": "4MiB", "device_margin": 0, **options}, UUID)
    assert (memory.device, memory.layout.device_slots) == (None, 0)
    assert words in memory.device_error
    assert bool(words) == bool(memory.device_error)
    memory.close()
    gpus.mend()
    eventually(lambda: gpus.left() == {}, what="the memory given back")


def prepared(options: dict[str, object], *devices: str) -> EngineMemory:
    """Return the memory of an epoch with its ranks on these devices."""
    pools = Pools(1)
    spec = EngineSpec(max_blocks=8, block_bytes=BLOCK, ranks=len(devices))
    workers = [spec.worker(rank).model_copy(update={"device": device}) for rank, device in enumerate(devices)]
    store: Any = SimpleNamespace(register=lambda *_: None, unregister=lambda *_: None, is_open=True)
    reservations = Reservations(pools, store, structlog.get_logger())
    reservations.want(7, DaemonConfig.model_validate(options), EngineInfo("e", ONE_GROUP, spec.scheduler(), workers))

    def next_done() -> Reserved | None:
        pools.run_finished()
        return reservations.next_done()

    done = eventually(next_done, what="the memory")
    pools.close()
    assert isinstance(done.memory, EngineMemory)
    return done.memory


def test_host_memory_that_the_driver_does_not_unpin_stays_mapped_until_it_does(gpus: Machine) -> None:
    """Other memory at the same address could not be pinned."""
    memory = prepared({"staging": "16MiB", "device_staging": "4MiB", "device_margin": 0}, UUID)
    assert memory.device is not None
    assert [memory.device.pin(*piece) for piece in memory.device.pieces()] == [""]
    gpus.plant("cuMemHostUnregister", OUT_OF_MEMORY)
    assert not memory.close()
    assert memory.staging.held == "the GPU's driver does not unpin it"
    assert memory.held_bytes == 16 << 20
    gpus.mend()
    assert memory.close()
    assert memory.held_bytes == 0
    eventually(lambda: gpus.left() == {}, what="the memory given back")


def test_staging_is_on_the_numa_node_of_the_gpu(gpus: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the GPU's PCI id; node 0 is on every machine."""
    (tmp_path / gpus.gpus[0].pci).mkdir()
    (tmp_path / gpus.gpus[0].pci / "numa_node").write_text("0\n")
    monkeypatch.setattr(cuda, "PCI", tmp_path)
    memory = prepared({"staging": "16MiB", "device_staging": "4MiB", "device_margin": 0}, UUID)
    assert memory.device is not None
    assert memory.device.nodes == [0]
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    (line,) = (each for each in lines if int(each.split()[0], 16) == memory.staging.segments[0].address)
    assert " prefer:0 " in line or not memory.staging.segments[0].prefer(0), "unless mbind is refused here"
    memory.close()
    eventually(lambda: gpus.left() == {}, what="the memory given back")


def test_a_worker_without_a_gpu_keeps_all_ranks_in_host_memory() -> None:
    memory = prepared({"device_margin": 0}, UUID, "")
    assert memory.device is None
    assert memory.device_error == "not every worker has a GPU that staging can use: rank=1"
    memory.close()


class Blind(FakeEngine):
    """Its workers cannot open the slab."""

    def mapped(self, attached: Attached, slabs: list[int]) -> Mapped:
        for slab in slabs:
            os.close(slab)
        return Mapped(epoch=attached.epoch)


@pytest.mark.store
def test_where_a_worker_has_no_device_slots_no_table_names_one(daemon: Daemon) -> None:
    engine = Blind(daemon.socket, block_bytes=BLOCK, device=UUID)
    values = values_of("blind", 4)
    save(daemon, engine, values)
    assert engine.load(list(values)) == list(values.values())
    assert engine.load(list(values)) == list(values.values())
    assert [line["error"] for line in daemon.records("device.off")][-1:] == ["a worker has no device slots: rank=0"]
    assert numbers(daemon)["promoted_blocks"] == 0


@pytest.mark.store
def test_a_slab_stays_with_a_worker_that_outlives_its_epoch(daemon: Daemon) -> None:
    """It may still copy; the daemon keeps nothing of it."""
    engine = engine_at(daemon)
    key, values = near(daemon, engine, "outlives", 2)
    eventually(lambda: on_device(engine, key) == 2, what="promotion")
    slots = engine.slots(key)
    before = len(daemon.records("engine.detached"))
    for sock in engine.sockets:  # the epoch is over
        sock.close()
    eventually(lambda: len(daemon.records("engine.detached")) > before, what="the end of the epoch")
    eventually(lambda: held_by(daemon.pid) == 0, what="its memory is free")
    assert [engine.read(slot) for slot in slots] == list(values.values())
    assert machine().memories() == 1
    engine.close()
    eventually(lambda: machine().left() == {}, what=lambda: machine().left())
