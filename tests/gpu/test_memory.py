"""Device memory between processes: bytes, cycles, and what a SIGKILL of either side leaves."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvprefetch.connector.device_cache import DeviceCache
from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.device import GRAIN_BYTES, Device, pieces
from tests.gpu.peer import Peer, holds, write
from tests.support.waiting import eventually

pytestmark = pytest.mark.gpu

SIZE = 16 * GRAIN_BYTES
KILLS = int(os.environ.get("KVPREFETCH_GPU_KILLS", "100"))
AT_A_TIME = 10

Start = Callable[[], Peer]


def assert_free_again(device: Device, before: int, timeout_s: float = 30.0) -> None:
    """Device memory is where it was, but for less than one slab of SIZE."""
    eventually(lambda: before - device.free_bytes() < SIZE // 2, timeout_s, "the memory given back", pause_s=0.1)


def test_what_one_process_writes_the_other_reads(device: Device, peer: Start) -> None:
    exporter, stream = peer(), device.stream()
    handle = exporter.ask("allocate", bytes=SIZE, seed=1)
    memory = device.open(bytes.fromhex(handle), SIZE)
    assert holds(stream, memory, 1)
    write(stream, memory, 2)
    assert exporter.ask("holds", id=0, seed=2)
    exporter.ask("write", id=0, seed=3)
    assert holds(stream, memory, 3)
    memory.close()
    memory.close()
    exporter.ask("close", id=0)
    stream.close()


def test_a_thousand_attachments_leave_nothing(device: Device, peer: Start) -> None:
    memory = device.allocate(SIZE)
    stream = device.stream()
    write(stream, memory, 5)
    importer = peer()
    handle = memory.handle().hex()
    importer.ask("cycles", handle=handle, bytes=SIZE, count=10)
    before = device.free_bytes()
    importer.ask("cycles", handle=handle, bytes=SIZE, count=1000)
    assert_free_again(device, before)
    assert holds(stream, memory, 5)
    memory.close()
    stream.close()


def test_a_thousand_epochs_of_a_worker_leave_nothing(device: Device, peer: Start) -> None:
    """With pages pinned and the lease let go each time, as the connector does it."""
    slot_bytes, slots = 1 << 20, 8
    exporter = peer()
    handle = exporter.ask("allocate", bytes=SIZE, seed=1)
    host = mmap.mmap(-1, slots * slot_bytes)
    rows = np.frombuffer(host, np.uint8).reshape(slots, slot_bytes)
    attached: Any = SimpleNamespace(device_slots=slots, slot_bytes=slot_bytes, device_handle=handle)
    before = 0
    for n in range(1010):
        lease, theirs = socket.socketpair()
        lease.settimeout(30)
        cache = DeviceCache(device, rows, attached, theirs)
        assert cache.slots == slots
        if n % 2:
            eventually(lambda cache=cache: cache.pinned >= slots, 30, "pinned slots", pause_s=0.0005)
        cache.end()
        assert lease.recv(1) == b""
        assert cache.join(30)
        lease.close()
        if n == 9:
            before = device.free_bytes()
    assert_free_again(device, before)
    assert exporter.ask("holds", id=0, seed=1)


def test_a_hundred_slabs_made_and_unmade_leave_nothing(device: Device, peer: Start) -> None:
    importer = peer()
    importer.ask("cycles", handle="", bytes=SIZE, count=0)
    before = device.free_bytes()
    for seed in range(100):
        memory = device.allocate(SIZE)
        stream = device.stream()
        write(stream, memory, seed)
        importer.ask("open", handle=memory.handle().hex(), bytes=SIZE)
        assert importer.ask("holds", id=seed, seed=seed)
        importer.ask("close", id=seed)
        stream.close()
        memory.close()
    assert_free_again(device, before)


@pytest.mark.parametrize("batch", range(max(1, KILLS // AT_A_TIME)))
def test_a_killed_importer_takes_nothing_with_it(device: Device, peer: Start, batch: int) -> None:
    """The exporter's bytes stay, it can free them, and nothing of the importer's stays."""
    before = device.free_bytes()
    memory = device.allocate(SIZE)
    stream = device.stream()
    write(stream, memory, batch)
    importers = [peer() for _ in range(AT_A_TIME)]
    for importer in importers:
        importer.send("open", handle=memory.handle().hex(), bytes=SIZE)
    for importer in importers:
        importer.answer()
        importer.send("holds", id=0, seed=batch)
    assert importers[0].answer()
    for importer in importers:
        importer.kill()
    assert holds(stream, memory, batch)
    stream.close()
    memory.close()
    assert_free_again(device, before)


@pytest.mark.parametrize("batch", range(max(1, KILLS // AT_A_TIME)))
def test_a_killed_exporter_leaves_the_importer_its_bytes(device: Device, peer: Start, batch: int) -> None:
    """This decides who may own the slab (docs/adr/0057): the importer copies on, unmaps, and all memory is back."""
    importer = peer()
    importer.ask("cycles", handle="", bytes=SIZE, count=0)
    before = device.free_bytes()
    exporters = [peer() for _ in range(AT_A_TIME)]
    for seed, exporter in enumerate(exporters):
        exporter.send("allocate", bytes=SIZE, seed=seed)
    for seed, exporter in enumerate(exporters):
        importer.ask("open", handle=exporter.answer(), bytes=SIZE)
        assert importer.ask("holds", id=seed, seed=seed)
    for exporter in exporters:
        exporter.kill()
    held = [importer.ask("holds", id=seed, seed=seed) for seed in range(AT_A_TIME)]
    for seed in range(AT_A_TIME):
        importer.ask("write", id=seed, seed=100 + seed)
        assert importer.ask("holds", id=seed, seed=100 + seed)
        importer.ask("close", id=seed)
    assert all(held)
    assert_free_again(device, before)


def test_the_handle_of_a_dead_exporter_cannot_be_opened(device: Device, peer: Start) -> None:
    exporter = peer()
    handle = exporter.ask("allocate", bytes=SIZE, seed=1)
    exporter.kill()
    with pytest.raises(DeviceError, match="ipcOpenMemHandle"):
        device.open(bytes.fromhex(handle), SIZE)


def test_refusals_are_one_line_and_harm_nothing(device: Device) -> None:
    memory = device.allocate(GRAIN_BYTES)
    small = device.allocate(4096)
    refused = (
        lambda: device.allocate(1 << 50),
        lambda: device.open(memory.handle(), GRAIN_BYTES),
        lambda: device.open(bytes(64), GRAIN_BYTES),
        small.handle,
        lambda: device.unregister(1 << 40),
        lambda: device.kernel("nonsense", "nothing"),
    )
    for call in refused:
        with pytest.raises(DeviceError) as caught:
            call()
        assert "\n" not in str(caught.value)
    stream = device.stream()
    write(stream, memory, 1)
    assert holds(stream, memory, 1)
    for one in (stream, small, memory):
        one.close()


def test_registered_memory_is_copied_across_pieces_slot_by_slot(device: Device) -> None:
    """A shared mapping, as staging is one; slots that are no multiple of a page; and it can be given back."""
    slot_bytes, slots = 274 * 4096 + 2048, 61
    size = -(-slots * slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = os.memfd_create("kvprefetch-test")
    os.ftruncate(fd, size)
    host = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    os.close(fd)
    host[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    parts = pieces(slots * slot_bytes, slot_bytes)
    assert len(parts) > 1
    for offset, length in parts:
        device.register(host.ctypes.data + offset, length)
    with pytest.raises(DeviceError, match="hostRegister"):
        device.register(host.ctypes.data, parts[0][1])
    memory, stream = device.allocate(slots * slot_bytes), device.stream()
    back = np.zeros(slots * slot_bytes, np.uint8)
    for slot in range(slots):
        stream.copy(memory.address + slot * slot_bytes, host.ctypes.data + slot * slot_bytes, slot_bytes)
    stream.copy(back.ctypes.data, memory.address, len(back))
    stream.record().wait()
    assert (back == host[: len(back)]).all()
    stream.close()
    memory.close()
    for offset, _ in parts:
        device.unregister(host.ctypes.data + offset)


def test_torch_numbers_devices_by_the_same_uuids() -> None:
    torch = pytest.importorskip("torch")
    for index in range(torch.cuda.device_count()):
        theirs = str(torch.cuda.get_device_properties(index).uuid)
        # cupy cuts the bytes behind a zero.
        ours = cuda.uuid_of("cuda", index)
        known = len(bytes.fromhex(ours.replace("-", "")).rstrip(b"\0"))
        assert bytes.fromhex(theirs.replace("-", ""))[:known] == bytes.fromhex(ours.replace("-", ""))[:known]
