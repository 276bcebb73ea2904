"""A rank's part of its GPU: the slab is mapped or there is none, host slots are pinned, and all of it is given back."""

from __future__ import annotations

import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprefetch.connector import device_cache as module
from kvprefetch.connector.device_cache import DeviceCache
from kvprefetch.connector.session import WorkerSession
from kvprefetch.shmring.errors import SegmentError
from kvprefetch.shmring.gpu import device as gpu
from kvprefetch.shmring.gpu.device import HANDLE_BYTES
from kvprefetch.shmring.segment import Segment
from kvprefetch.shmring.wire.attach import Attached, Mapped
from tests.support.host_device import UUID, HostDevice
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
SLOTS, SLOT_BYTES, DEVICE_SLOTS = 5, 6000, 3
EXPORTER = f"""
import ctypes, sys
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.device import GRAIN_BYTES
from tests.support import host_device
host_device.install()
memory = cuda.open_device(host_device.UUID).allocate(GRAIN_BYTES)
ctypes.memset(memory.address, 42, {DEVICE_SLOTS * SLOT_BYTES})
print(memory.handle().hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def device() -> Iterator[HostDevice]:
    device = HostDevice(64 << 20, UUID)
    yield device
    gc.collect()
    eventually(lambda: not any(device.live.values()))


LEASES: list[socket.socket] = []


@pytest.fixture(autouse=True)
def leases() -> Iterator[None]:
    """The daemon's ends are closed at the end of a test."""
    yield
    while LEASES:
        LEASES.pop().close()


def attached(**changes: Any) -> Attached:
    values = {"segment_bytes": SLOTS * SLOT_BYTES, "slot_count": SLOTS, "slot_bytes": SLOT_BYTES}
    return Attached(epoch=3, **{**values, **changes})


def session(device: HostDevice | None, message: Attached) -> tuple[WorkerSession, socket.socket | None]:
    """As mapped from descriptors, and the daemon's end of the lease."""
    segment = Segment.create(SLOTS * SLOT_BYTES)
    fds = [socket.dup(segment.fd)]
    mine = None
    if message.device_slots:
        mine, theirs = socket.socketpair()
        LEASES.append(mine)
        mine.settimeout(10)
        fds.append(theirs.detach())
    segment.close()
    return WorkerSession.map(message, fds, device), mine


def test_without_a_gpu_there_is_no_device_cache() -> None:
    made, _ = session(None, attached())
    assert made.device_cache is None
    assert made.mapped() == Mapped(epoch=3)


def test_a_slab_for_a_rank_without_a_gpu_is_declined_and_its_lease_let_go() -> None:
    made, lease = session(None, attached(device_slots=DEVICE_SLOTS, device_handle="00" * 64))
    assert made.mapped() == Mapped(epoch=3)
    assert lease is not None
    assert lease.recv(1) == b""


def test_host_slots_are_pinned_without_a_slab(device: HostDevice) -> None:
    made, _ = session(device, attached())
    cache = made.device_cache
    assert cache is not None
    assert made.mapped() == Mapped(epoch=3)
    eventually(lambda: cache.pinned == SLOTS)
    assert device.live["registered"] == 1
    del made
    assert cache.join(10)
    assert device.live["registered"] == 0


def test_slots_are_pinned_piece_by_piece(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only whole pieces that are registered count, and an end in the middle gives back what was pinned until then."""
    monkeypatch.setattr(gpu, "PIECE_BYTES", 1)
    rows = np.frombuffer(memoryview(Segment.create(64 * 2048).buffer), np.uint8).reshape(64, 2048)
    seen: list[int] = []
    register = device.register

    def slowly(address: int, size_bytes: int) -> None:
        assert made.wait(10)
        seen.append(cache[0].pinned)
        register(address, size_bytes)
        if len(seen) == 5:
            cache[0].end()

    cache: list[DeviceCache] = []
    made = threading.Event()
    monkeypatch.setattr(device, "register", slowly)
    cache.append(DeviceCache(device, rows, attached(slot_bytes=2048), None))
    made.set()
    assert cache[0].join(10)
    assert seen == [0, 2, 4, 6, 8]
    assert cache[0].pinned == 10
    assert device.live["registered"] == 0


def test_pages_that_cannot_be_pinned_are_left_with_one_warning(
    device: HostDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.fail.add("register")
    with caplog.at_level(logging.WARNING):
        made, _ = session(device, attached())
        eventually(lambda: bool(caplog.records))
    assert "cannot pin staging: pinned_slots=0 slots=5: register" in caplog.text
    assert made.device_cache is not None
    assert made.device_cache.pinned == 0


def test_another_processs_slab_is_mapped_and_the_lease_ends_after_it(device: HostDevice) -> None:
    pipe = subprocess.PIPE
    exporter = subprocess.Popen([sys.executable, "-c", EXPORTER], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    assert exporter.stdout is not None
    handle = exporter.stdout.readline().strip()
    made, lease = session(device, attached(device_slots=DEVICE_SLOTS, device_handle=handle))
    assert made.mapped() == Mapped(epoch=3, device=True)
    assert made.device_cache is not None
    assert (made.device_cache.slots, made.device_cache.rows.shape) == (DEVICE_SLOTS, (DEVICE_SLOTS, SLOT_BYTES))
    assert (made.device_cache.rows == 42).all()
    assert device.live["opened"] == 1
    assert lease is not None
    lease.settimeout(0.05)
    with pytest.raises(TimeoutError):
        lease.recv(1)
    lease.settimeout(10)
    made.device_cache.__dict__.pop("rows")
    del made
    assert lease.recv(1) == b""
    assert device.live["opened"] == 0
    exporter.communicate()


def test_a_hundred_attachments_leave_nothing(device: HostDevice) -> None:
    """Also those that end while their slots are being pinned."""
    pipe = subprocess.PIPE
    exporter = subprocess.Popen([sys.executable, "-c", EXPORTER], stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    assert exporter.stdout is not None
    handle = exporter.stdout.readline().strip()
    before = len(os.listdir("/proc/self/fd"))
    for n in range(100):
        made, lease = session(device, attached(device_slots=DEVICE_SLOTS, device_handle=handle))
        cache = made.device_cache
        assert cache is not None
        if n % 2:
            eventually(lambda cache=cache: cache.pinned == SLOTS)  # type: ignore[misc]
        del made
        assert lease is not None
        assert lease.recv(1) == b""
        assert cache.join(10)
        lease.close()
    del cache  # it holds the last segment's mapping
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any(device.live.values())
    exporter.communicate()


def test_a_slab_of_the_engine_is_freed_only_when_the_daemon_let_go(device: HostDevice) -> None:
    made, lease = session(device, attached(device_slots=DEVICE_SLOTS))
    answer = made.mapped()
    assert answer.device
    assert len(answer.device_handle) == 2 * HANDLE_BYTES
    cache = made.device_cache
    assert cache is not None
    del made
    assert not cache.join(0.1)
    assert device.live["allocated"] == 1
    assert lease is not None
    lease.close()
    assert cache.join(10)
    assert device.live["allocated"] == 0


@pytest.mark.parametrize(("fail", "handle"), [("open", "00" * 64), ("allocate", ""), ("handle", "")])
def test_a_slab_that_cannot_be_had_leaves_the_host_slots(
    device: HostDevice, caplog: pytest.LogCaptureFixture, fail: str, handle: str
) -> None:
    device.fail.add(fail)
    with caplog.at_level(logging.WARNING):
        made, lease = session(device, attached(device_slots=DEVICE_SLOTS, device_handle=handle))
    assert "no staging in device memory" in caplog.text
    assert made.mapped() == Mapped(epoch=3)
    assert made.device_cache is not None
    assert (made.device_cache.slots, made.device_cache.address) == (0, 0)
    assert lease is not None
    assert lease.recv(1) == b""


AT_EXIT = f"""
import atexit, time
atexit.register(time.sleep, 0.3)  # runs after what is registered later, and leaves the cache's thread the time to wake
from kvprefetch.connector.session import WorkerSession
from kvprefetch.shmring.wire.attach import Attached
from kvprefetch.shmring.segment import Segment
from tests.support.host_device import UUID, HostDevice
device = HostDevice(64 << 20, UUID)
device.unregister = lambda address: print("unregister", flush=True)
message = Attached(epoch=3, segment_bytes={SLOTS * SLOT_BYTES}, slot_count={SLOTS}, slot_bytes={SLOT_BYTES})
segment = Segment.create({SLOTS * SLOT_BYTES})
session = WorkerSession.map(message, [segment.fd], device)
while session.device_cache.pinned < {SLOTS}:
    time.sleep(0.001)
print("exit", flush=True)
"""


def test_a_process_that_ends_begins_no_calls_into_the_driver() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout, done.stderr) == (0, "exit\n", "")


@pytest.fixture
def gate(device: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As long as it is there, what `device.hang` names does not return."""
    monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
    device.gate = tmp_path / "gate"
    device.gate.touch()
    yield device.gate
    device.gate.unlink(missing_ok=True)


@pytest.mark.parametrize("hang", ["allocate", "handle"])
def test_a_gpu_that_does_not_answer_leaves_the_host_slots_and_nothing_is_kept_of_it(
    device: HostDevice, gate: Path, caplog: pytest.LogCaptureFixture, hang: str
) -> None:
    """Also the next attachment does not wait for it, and one after it came back has a slab."""
    device.hang = {hang}
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        made, lease = session(device, attached(device_slots=DEVICE_SLOTS))
    assert time.monotonic() - began < 5
    assert made.mapped() == Mapped(epoch=3)
    assert "no staging in device memory: the GPU does not answer" in caplog.text
    assert lease is not None
    lease.settimeout(0.05)
    with pytest.raises(TimeoutError):
        lease.recv(1)
    with caplog.at_level(logging.WARNING):
        again, _ = session(device, attached(device_slots=DEVICE_SLOTS))
    assert again.mapped() == Mapped(epoch=3)
    eventually(lambda: "cannot pin staging: pinned_slots=0 slots=5: the GPU does not answer" in caplog.text)
    gate.unlink()
    lease.settimeout(10)
    assert lease.recv(1) == b""
    assert device.live["allocated"] == 0
    eventually(lambda: made.device_cache is not None and made.device_cache.pinned == SLOTS)
    last, lease = session(device, attached(device_slots=DEVICE_SLOTS))
    assert last.mapped().device
    assert lease is not None
    lease.close()


def test_a_gpu_that_does_not_answer_while_slots_are_pinned_is_named_once_and_keeps_what_it_may_touch(
    device: HostDevice, gate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device.hang = {"register"}
    made, lease = session(device, attached(device_slots=DEVICE_SLOTS))
    cache = made.device_cache
    assert cache is not None
    assert made.mapped().device
    with caplog.at_level(logging.WARNING):
        deadline = time.monotonic() + 10
        while not caplog.records:
            assert time.monotonic() < deadline
            made.tick(0)
        made.tick(0)
    assert [record.getMessage() for record in caplog.records] == [caplog.records[0].getMessage()]
    assert "the GPU does not answer" in caplog.text
    assert "device_slots=3 pinned_slots=0 slots=5" in caplog.text
    del made
    assert lease is not None
    lease.close()
    assert not cache.join(0.2)
    assert device.live["allocated"] == 1
    gate.unlink()
    assert cache.join(10)


@pytest.mark.parametrize("hang", ["unregister", "close"])
def test_a_slab_counts_as_mapped_as_long_as_the_gpu_did_not_say_otherwise(
    device: HostDevice, gate: Path, hang: str
) -> None:
    device.hang = {hang}
    made, lease = session(device, attached(device_slots=DEVICE_SLOTS))
    cache = made.device_cache
    assert cache is not None
    eventually(lambda: cache.pinned == SLOTS)
    assert lease is not None
    lease.shutdown(socket.SHUT_WR)  # the daemon let go
    del made
    lease.settimeout(0.2)
    with pytest.raises(TimeoutError):
        lease.recv(1)
    gate.unlink()
    assert cache.join(10)


def test_a_lease_that_is_missing_is_an_error() -> None:
    segment = Segment.create(SLOTS * SLOT_BYTES)
    fds = [socket.dup(segment.fd)]
    segment.close()
    with pytest.raises(SegmentError, match="descriptors are missing"):
        WorkerSession.map(attached(device_slots=1), fds)
