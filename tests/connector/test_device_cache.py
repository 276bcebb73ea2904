"""A rank's part of its GPU: the slab is mapped or there is none, host slots are pinned, and all of it is given back."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.connector.attach.epoch import WorkerEpoch
from kvprefetch.connector.copy import device_cache as module
from kvprefetch.shmring.errors import SegmentError
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.cuda import Device
from kvprefetch.shmring.segment import Segment
from kvprefetch.shmring.wire.attach import Attached, Mapped
from tests.support.fakecuda import UUID, Machine, descriptors_of, machine, needs_fake
from tests.support.waiting import eventually

pytestmark = needs_fake
ROOT = Path(__file__).resolve().parents[2]
SLOTS, SLOT_BYTES, DEVICE_SLOTS = 5, 6000, 3
OUT_OF_MEMORY = 2


@pytest.fixture
def gpus() -> Iterator[Machine]:
    """The machine, with faults that end with the test; nothing on it is kept."""
    yield machine()
    machine().mend()
    gc.collect()
    eventually(lambda: not threads(), what="the threads' end")
    eventually(lambda: machine().left() == {}, what=lambda: machine().left())


@pytest.fixture
def device(gpus: Machine) -> Device:
    return cuda.open_device(UUID)


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "kvprefetch-pin"]


@pytest.fixture
def slab(device: Device) -> Iterator[Callable[[], int]]:
    """slab(): a descriptor of memory full of 42s, as the daemon has it."""
    memory = device.allocate(DEVICE_SLOTS * SLOT_BYTES)
    ctypes.memset(memory.address, 42, DEVICE_SLOTS * SLOT_BYTES)
    yield memory.export
    memory.close()


def attached(**changes: Any) -> Attached:
    values = {"segment_bytes": SLOTS * SLOT_BYTES, "slot_count": SLOTS, "slot_bytes": SLOT_BYTES}
    return Attached(epoch=3, **{**values, **changes})


def epoch(device: Device | None, *slab: int) -> WorkerEpoch:
    """As mapped from descriptors."""
    segment = Segment.create(SLOTS * SLOT_BYTES)
    fds = [os.dup(segment.fd), *slab]
    segment.close()
    return WorkerEpoch.map(attached(device_slots=DEVICE_SLOTS * len(slab)), fds, device)


def test_a_slab_for_a_rank_without_a_gpu_is_declined_and_let_go(slab: Callable[[], int]) -> None:
    before = len(descriptors_of(os.getpid()))
    assert epoch(None, slab()).mapped() == Mapped(epoch=3)
    assert len(descriptors_of(os.getpid())) == before


def test_pages_that_cannot_be_pinned_are_left_with_one_warning(
    device: Device, gpus: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.plant("cuMemHostRegister_v2", OUT_OF_MEMORY)
    with caplog.at_level(logging.WARNING):
        made = epoch(device)
        eventually(lambda: bool(caplog.records))
    assert "cannot pin staging: pinned_slots=0 slots=5: hostRegister: CUDARuntimeError" in caplog.text
    assert made.device_cache is not None
    assert made.device_cache.pinned == 0


@pytest.mark.parametrize(
    "fail", ["cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
)
def test_a_slab_that_cannot_be_mapped_leaves_the_host_slots(
    device: Device, gpus: Machine, slab: Callable[[], int], caplog: pytest.LogCaptureFixture, fail: str
) -> None:
    descriptor = slab()
    before = len(descriptors_of(os.getpid()))
    gpus.plant(fail, OUT_OF_MEMORY)
    with caplog.at_level(logging.WARNING):
        made = epoch(device, descriptor)
    assert f"no staging in device memory: {fail}: CUDA_ERROR_OUT_OF_MEMORY" in caplog.text
    assert made.mapped() == Mapped(epoch=3)
    cache = made.device_cache
    assert cache is not None
    assert (cache.slots, cache.address) == (0, 0)
    eventually(lambda: cache.pinned == SLOTS)
    del made
    assert cache.join(10)
    assert len(descriptors_of(os.getpid())) == before - 1


AT_EXIT = f"""
import atexit, time
atexit.register(time.sleep, 0.3)  # runs after what is registered later, and leaves the cache's thread the time to wake
from kvprefetch.connector.attach.epoch import WorkerEpoch
from kvprefetch.shmring.wire.attach import Attached
from kvprefetch.shmring.segment import Segment
from kvprefetch.shmring.gpu import cuda
from tests.support import fakecuda
fakecuda.load()
device = cuda.open_device(fakecuda.UUID)
device.unregister = lambda address: print("unregister", flush=True)
message = Attached(epoch=3, segment_bytes={SLOTS * SLOT_BYTES}, slot_count={SLOTS}, slot_bytes={SLOT_BYTES})
segment = Segment.create({SLOTS * SLOT_BYTES})
epoch = WorkerEpoch.map(message, [segment.fd], device)
while epoch.device_cache.pinned < {SLOTS}:
    time.sleep(0.001)
print("exit", flush=True)
"""


def test_a_process_that_ends_begins_no_calls_into_the_driver(gpus: Machine) -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stdout, done.stderr) == (0, "exit\n", "")


@pytest.fixture
def hang(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """hang(call): as long as the returned file is there, this call does not return."""
    monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
    return gpus.plant


def test_a_gpu_that_does_not_answer_leaves_the_host_slots_and_nothing_is_kept_of_it(
    device: Device, hang: Callable[[str], Path], slab: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    """Also the next attachment does not wait for it, and one after it came back has a slab."""
    gate = hang("cuMemImportFromShareableHandle")
    before = len(descriptors_of(os.getpid()))
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        made = epoch(device, slab())
    assert time.monotonic() - began < 5
    assert made.mapped() == Mapped(epoch=3)
    assert "no staging in device memory: the GPU does not answer" in caplog.text
    with caplog.at_level(logging.WARNING):
        again = epoch(device, slab())
    assert again.mapped() == Mapped(epoch=3)
    eventually(lambda: "cannot pin staging: pinned_slots=0 slots=5: the GPU does not answer" in caplog.text)
    gate.unlink()
    caches = [made.device_cache, again.device_cache]
    eventually(lambda: caches[0] is not None and caches[0].pinned == SLOTS)
    last = epoch(device, slab())
    assert last.mapped().device
    caches.append(last.device_cache)
    del made, again, last
    while caches:
        cache = caches.pop()
        assert cache is not None
        assert cache.join(10)
    assert len(descriptors_of(os.getpid())) == before


def test_a_gpu_that_does_not_answer_while_slots_are_pinned_is_named_once_and_keeps_what_it_may_touch(
    device: Device, hang: Callable[[str], Path], slab: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    gate = hang("cuMemHostRegister_v2")
    made = epoch(device, slab())
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
    assert not cache.join(0.2)
    gate.unlink()
    assert cache.join(10)


def test_a_descriptor_that_is_missing_is_an_error() -> None:
    segment = Segment.create(SLOTS * SLOT_BYTES)
    fds = [os.dup(segment.fd)]
    segment.close()
    with pytest.raises(SegmentError, match="descriptors are missing"):
        WorkerEpoch.map(attached(device_slots=1), fds)
