"""A GPU behind the driver: found by its UUID, its context, its memory, and one clear error for each failure.

What happens between processes: tests/gpu.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.cuda import Device
from kvprefetch.shmring.gpu.driver import GRAIN_BYTES, PIECE_BYTES, pieces
from tests.support.fakecuda import UUID, UUIDS, Gpu, Machine, machine, needs_fake

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def gpus() -> Iterator[Machine]:
    """The machine of this process; a test leaves nothing on it."""
    yield machine()
    machine().mend()
    assert machine().left() == {}


@pytest.fixture
def device(gpus: Machine) -> Device:
    return cuda.open_device(UUID)


# --- which GPU --------------------------------------------------------------------------------------------------------

A_GPU, ANOTHER = "00112233-4455-6677-8899-aabbccddeeff", "00000000-0000-0000-0000-000000000000"
INSTANCES = ("10112233-4455-6677-8899-aabbccddeeff", "20112233-4455-6677-8899-aabbccddeeff")
SLICED = [Gpu(each, mig=A_GPU) for each in INSTANCES]


def seen(gpus: list[Gpu], visible: str | None = None) -> list[str]:
    """Return the UUIDs of the GPUs that a process on a machine with these sees, each of which it can open."""
    code = """
from tests.support import fakecuda
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.driver import asked, call
fakecuda.load()
call("cuInit", 0)
for index in range(asked("cuDeviceGetCount")):
    print(cuda.open_device(cuda.uuid_of(index)).uuid)
"""
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    done = run(code, Machine(gpus), **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def run(code: str, here: Machine, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program on another machine, which ends with it."""
    env = {**os.environ, **here.environment, **variables}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60)
    here.remove()
    return done


@needs_fake
@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        pytest.param([Gpu(A_GPU), Gpu(ANOTHER)], None, [A_GPU, ANOTHER], id="all, one with zero bytes"),
        pytest.param([Gpu(A_GPU), Gpu(ANOTHER)], "1,0", [ANOTHER, A_GPU], id="by number"),
        pytest.param([Gpu(A_GPU), Gpu(ANOTHER)], f"GPU-{A_GPU}", [A_GPU], id="by UUID"),
        pytest.param(SLICED, f"MIG-{INSTANCES[1]}", [INSTANCES[1]], id="an instance by UUID"),
        pytest.param(SLICED, f"MIG-{INSTANCES[1]},MIG-{INSTANCES[0]}", [INSTANCES[1]], id="of two instances one"),
        pytest.param([*SLICED, Gpu(ANOTHER)], None, [INSTANCES[0]], id="an instance and no whole GPU"),
    ],
)
def test_gpus_and_instances_of_them_have_names_of_their_own(
    gpus: list[Gpu], visible: str | None, expected: list[str]
) -> None:
    assert seen(gpus, visible) == expected


@needs_fake
def test_a_gpu_that_is_not_there_is_one_error(gpus: Machine) -> None:
    with pytest.raises(DeviceError, match=f"^not exactly one device has this UUID: uuid={A_GPU} found=0 devices=2$"):
        cuda.open_device(A_GPU)


def test_without_a_driver_there_is_one_error_in_one_line() -> None:
    """As on a machine without GPUs."""
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is a CUDA device")
    code = """
from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
for ask in (lambda: cuda.open_device("x"), lambda: cuda.uuid_of(0)):
    try:
        ask()
    except DeviceError as error:
        assert "\\n" not in str(error), error
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert len(done.stdout.splitlines()) == 2, done


# --- contexts ---------------------------------------------------------------------------------------------------------


@needs_fake
def test_a_process_has_one_context_on_each_gpu_that_it_opened(gpus: Machine) -> None:
    """It costs memory of the GPU, and stays until the process ends."""
    assert cuda.open_device(UUID) is cuda.open_device(UUID)
    assert len([name for name in gpus.held() if f"-context-{os.getpid()}-" in name]) == 1


@needs_fake
def test_a_device_is_for_any_thread_beside_those_of_other_gpus(device: Device) -> None:
    other = cuda.open_device(UUIDS[1])
    failed: list[BaseException] = []

    def use(one: Device) -> None:
        try:
            for _ in range(50):
                memory, stream = one.allocate(GRAIN_BYTES), one.stream()
                stream.copy(memory.address, memory.address + 4096, 64)
                stream.wait()
                stream.close()
                memory.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(one,)) for one in (device, other) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@needs_fake
def test_a_gpu_for_one_process_is_one_error() -> None:
    """Exclusive mode: the other process has it."""
    code = """
import sys
from tests.support import fakecuda
from kvprefetch.shmring.gpu import cuda
fakecuda.load()
device = cuda.open_device(fakecuda.UUID)
print("open", flush=True)
sys.stdin.read()
"""
    here = Machine([Gpu(UUID, exclusive=True)])
    env, pipe = {**os.environ, **here.environment}, subprocess.PIPE
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    refused = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, stdin=pipe, capture_output=True, text=True, check=False
    )
    holder.communicate()
    here.remove()
    assert "DeviceError: cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE: code=46" in refused.stderr


# --- calls ------------------------------------------------------------------------------------------------------------


def runs_beside(fault: Path, call: Callable[[], Any]) -> bool:
    """Make the call, which hangs until another thread made progress meanwhile; False if none did for a while."""
    began, turns = threading.Event(), 0

    def count() -> None:
        nonlocal turns
        began.wait()
        for _ in range(5):
            time.sleep(0.001)
            turns += 1
        fault.unlink()

    rescue = subprocess.Popen(["sh", "-c", f"sleep 20; rm -f {fault}"])
    thread = threading.Thread(target=count)
    thread.start()
    began.set()
    call()
    found = turns == 5
    rescue.kill()
    rescue.wait()
    thread.join()
    return found


@needs_fake
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("cuInit", lambda device: cuda.uuid_of(0)),
        ("cuDeviceGetUuid_v2", lambda device: cuda.uuid_of(0)),
        ("cuDevicePrimaryCtxRetain", lambda device: cuda.Device(device.index, UUID)),
        ("cuMemGetInfo_v2", lambda device: device.free_bytes()),
        ("cuMemCreate", lambda device: device.allocate(GRAIN_BYTES).close()),
        ("cuMemUnmap", lambda device: device.allocate(GRAIN_BYTES).close()),
        ("cuStreamCreate", lambda device: device.stream().close()),
        ("cuStreamSynchronize", lambda device: device.stream().close()),
    ],
)
def test_others_run_while_the_driver_takes_its_time(
    device: Device, gpus: Machine, name: str, call: Callable[[Device], Any]
) -> None:
    assert runs_beside(gpus.plant(name), lambda: call(device))


@needs_fake
def test_a_lost_gpu_is_one_error_and_does_not_hang() -> None:
    code = """
import threading
from tests.support import fakecuda
from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
fakecuda.load()
device = cuda.open_device(fakecuda.UUID)
stream, memory = device.stream(), device.allocate(4096)
stream.copy(memory.address, memory.address + 64, 64)
threading.Timer(0.1, lambda: open(fakecuda.folder() / "faults" / "lost", "w").write("999")).start()
for call in (stream.wait, stream.close, device.free_bytes, lambda: device.allocate(4096), lambda: cuda.Device(0, "x")):
    try:
        call()
    except DeviceError as error:
        print(error)
"""
    here = Machine()
    here.plant("copies")
    done = run(code, here)
    assert len(done.stdout.splitlines()) == 5, done
    assert all(": code=999" in line or "cudaErrorUnknown: " in line for line in done.stdout.splitlines()), done.stdout


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slot_bytes", [1, 100, 4096, 655_360, 274 * 4096 + 2048, 16 << 20, (16 << 20) + 4096, 40 << 20]
)
@pytest.mark.parametrize("slots", [1, 7, 1000])
def test_pieces_are_whole_pages_and_whole_slots(slot_bytes: int, slots: int) -> None:
    size = slots * slot_bytes
    found = pieces(size, slot_bytes)
    end = 0
    for offset, length in found:
        assert offset == end
        assert offset % slot_bytes == 0
        assert offset % mmap.PAGESIZE == length % mmap.PAGESIZE == 0
        end = offset + length
    assert size <= end < size + mmap.PAGESIZE
    assert all(length <= max(PIECE_BYTES, slot_bytes * mmap.PAGESIZE) for _, length in found)
