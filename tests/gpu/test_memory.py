"""Device memory between processes and users: bytes, cycles, and what a SIGKILL of either side leaves."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvprefetch.connector.copy.device_cache import DeviceCache
from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.cuda import Device, Stream
from kvprefetch.shmring.gpu.driver import GRAIN_BYTES, pieces
from tests.gpu.peer import ON_GPU, Peer, holds, read, write
from tests.support.waiting import eventually

SIZE = 2 * GRAIN_BYTES
# More of them on a GPU, where each is faster.
KILLS = int(os.environ.get("KVPREFETCH_GPU_KILLS", "10" if ON_GPU else "5"))
CYCLES = 1000 if ON_GPU else 50
AT_A_TIME = 5
NOBODY = 65534

Start = Callable[..., Peer]


def assert_free_again(device: Device, before: int, timeout_s: float = 30.0) -> None:
    """Device memory is where it was, but for less than one slab of SIZE."""
    eventually(lambda: before - device.free_bytes() < SIZE // 2, timeout_s, "the memory given back", pause_s=0.1)


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    made = device.stream()
    yield made
    made.close()


@pytest.fixture
def exporter(peer: Start) -> Peer:
    """Another process, whose context is there: it takes some of the device's memory."""
    made = peer()
    made.ask("nothing")
    return made


@pytest.fixture
def slab(exporter: Peer) -> Iterator[int]:
    """The descriptor of SIZE bytes of another process, with pattern 1."""
    found = exporter.ask("allocate", bytes=SIZE, seed=1)
    yield found
    os.close(found)


def test_what_one_process_writes_the_other_reads(device: Device, stream: Stream, exporter: Peer, slab: int) -> None:
    memory = device.open(slab, SIZE)
    assert holds(stream, memory, 1)
    write(stream, memory, 2)
    assert exporter.ask("holds", id=0, seed=2)
    exporter.ask("write", id=0, seed=3)
    assert holds(stream, memory, 3)
    memory.close()
    memory.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("theirs", [True, False])
def test_another_user_maps_what_it_was_handed(device: Device, stream: Stream, peer: Start, theirs: bool) -> None:
    """As the daemon's user and an engine's do; either may have allocated it."""
    other = peer(uid=NOBODY)
    if theirs:
        slab = other.ask("allocate", bytes=SIZE, seed=1)
        memory = device.open(slab, SIZE)
        assert holds(stream, memory, 1)
    else:
        memory = device.allocate(SIZE)
        write(stream, memory, 2)
        slab = memory.export()
        other.ask("open", slab, bytes=SIZE)
        assert other.ask("holds", id=0, seed=2)
    os.close(slab)
    memory.close()


def test_new_memory_has_nothing_of_its_last_user(device: Device, stream: Stream, peer: Start) -> None:
    """It holds what somebody left there, unless it is cleared."""
    before = peer()
    os.close(before.ask("allocate", bytes=SIZE, seed=1))
    before.kill()
    for _ in range(3):
        memory = device.allocate(SIZE)
        assert not read(stream, memory).any()
        memory.close()


def test_memory_lives_until_the_last_process_gives_it_up(device: Device, stream: Stream, exporter: Peer) -> None:
    """Whichever ends first; a descriptor that nobody closes keeps it, too."""
    before = device.free_bytes()
    slab = exporter.ask("allocate", bytes=SIZE, seed=1)
    memory = device.open(slab, SIZE)
    exporter.ask("close", id=0)
    assert holds(stream, memory, 1)
    memory.close()
    assert before - device.free_bytes() >= SIZE // 2
    again = device.open(slab, SIZE)
    assert holds(stream, again, 1)
    again.close()
    os.close(slab)
    assert_free_again(device, before)


def test_epochs_of_a_worker_leave_nothing(device: Device, exporter: Peer, slab: int) -> None:
    """With pages pinned, as the connector does it."""
    slot_bytes, slots = SIZE // 8, 8
    host = mmap.mmap(-1, slots * slot_bytes)
    rows = np.frombuffer(host, np.uint8).reshape(slots, slot_bytes)
    attached: Any = SimpleNamespace(device_slots=slots, slot_bytes=slot_bytes)
    before = descriptors = 0
    for n in range(CYCLES + 10):
        cache = DeviceCache(device, rows, attached, os.dup(slab))
        assert cache.slots == slots
        if n % 2:
            eventually(lambda cache=cache: cache.pinned >= slots, 30, "pinned slots", pause_s=0.0005)
        cache.end()
        assert cache.join(30)
        if n == 9:
            before, descriptors = device.free_bytes(), len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert_free_again(device, before)
    assert exporter.ask("holds", id=0, seed=1)


def test_slabs_made_and_unmade_leave_nothing(device: Device, stream: Stream, peer: Start) -> None:
    importer = peer()
    importer.ask("nothing")
    before = device.free_bytes()
    for seed in range(CYCLES // 10):
        memory = device.allocate(SIZE)
        write(stream, memory, seed)
        slab = memory.export()
        importer.ask("open", slab, bytes=SIZE)
        os.close(slab)
        if seed % 2:
            memory.close()
        assert importer.ask("holds", id=seed, seed=seed)
        importer.ask("close", id=seed)
        memory.close()
    assert_free_again(device, before)


@pytest.mark.parametrize("batch", range(max(1, KILLS // AT_A_TIME)))
def test_a_killed_importer_takes_nothing_with_it(device: Device, stream: Stream, peer: Start, batch: int) -> None:
    """The exporter's bytes stay, it can free them, and nothing of the importer's stays."""
    before = device.free_bytes()
    memory = device.allocate(SIZE)
    write(stream, memory, batch)
    slab = memory.export()
    importers = [peer() for _ in range(AT_A_TIME)]
    for importer in importers:
        importer.send("open", slab, bytes=SIZE)
    for importer in importers:
        importer.answer()
        importer.send("holds", id=0, seed=batch)
    assert importers[0].answer()
    for importer in importers:
        importer.kill()
    assert holds(stream, memory, batch)
    os.close(slab)
    memory.close()
    assert_free_again(device, before)


@pytest.mark.parametrize("batch", range(max(1, KILLS // AT_A_TIME)))
def test_a_killed_exporter_leaves_the_importer_its_bytes(device: Device, peer: Start, batch: int) -> None:
    """The importer copies on and unmaps, also what it opens only then; and all memory is back."""
    importer = peer()
    importer.ask("nothing")
    before = device.free_bytes()
    exporters = [peer() for _ in range(AT_A_TIME)]
    for seed, exporter in enumerate(exporters):
        exporter.send("allocate", bytes=SIZE, seed=seed + 1)
    slabs = [exporter.answer() for exporter in exporters]
    for seed, slab in enumerate(slabs[:-1]):
        importer.ask("open", slab, bytes=SIZE)
        assert importer.ask("holds", id=seed, seed=seed + 1)
    for exporter in exporters:
        exporter.kill()
    importer.ask("open", slabs[-1], bytes=SIZE)
    for slab in slabs:
        os.close(slab)
    for seed in range(AT_A_TIME):
        assert importer.ask("holds", id=seed, seed=seed + 1)
        importer.ask("write", id=seed, seed=100 + seed)
        assert importer.ask("holds", id=seed, seed=100 + seed)
        importer.ask("close", id=seed)
    assert_free_again(device, before)


def test_refusals_are_one_line_and_harm_nothing(device: Device, stream: Stream) -> None:
    memory = device.allocate(GRAIN_BYTES)
    no_memory = os.open("/dev/null", os.O_RDWR)
    refused = (
        lambda: device.allocate(1 << 50),
        lambda: device.open(no_memory, GRAIN_BYTES),
        lambda: device.open(-1, GRAIN_BYTES),
        lambda: device.unregister(1 << 40),
        lambda: device.kernel("nonsense", "nothing"),
    )
    for call in refused:
        with pytest.raises(DeviceError) as caught:
            call()
        assert "\n" not in str(caught.value)
    os.close(no_memory)
    write(stream, memory, 1)
    assert holds(stream, memory, 1)
    memory.close()


def test_registered_memory_is_copied_across_pieces_slot_by_slot(device: Device, stream: Stream) -> None:
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
    with contextlib.ExitStack() as undo:
        for offset, length in parts:
            device.register(host.ctypes.data + offset, length)
            undo.callback(device.unregister, host.ctypes.data + offset)
        with pytest.raises(DeviceError, match="hostRegister"):
            device.register(host.ctypes.data, parts[0][1])
        memory = device.allocate(slots * slot_bytes)
        undo.callback(memory.close)
        undo.callback(stream.wait)
        back = np.zeros(slots * slot_bytes, np.uint8)
        for slot in range(slots):
            stream.copy(memory.address + slot * slot_bytes, host.ctypes.data + slot * slot_bytes, slot_bytes)
        stream.copy(back.ctypes.data, memory.address, len(back))
        stream.wait()
        assert (back == host[: len(back)]).all()


@pytest.mark.gpu
def test_torch_numbers_devices_by_the_same_uuids() -> None:
    for index in range(torch.cuda.device_count()):
        assert cuda.uuid_of(index) == str(torch.cuda.get_device_properties(index).uuid)
