"""The driver's slow calls let other threads run: a library of ours in its place is slow and checks its arguments."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu.device import HANDLE_BYTES
from kvprefetch.shmring.gpu.driver import Driver

SLOW_S = 0.3
LIBRARY = """
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned char bytes[64]; } handle;
static int slow(int good) { usleep(300000); return good ? 0 : 201; }
int cuInit(unsigned flags) { return slow(flags == 0); }
int cuDeviceGet(int *device, int index) { *device = index + 10; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = context; return device == 13 ? 0 : 101; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 5ull << 32; *total = 6ull << 32; return slow(1); }
int cuIpcGetMemHandle(handle *to, uint64_t address) { memset(to, 7, 64); return slow(address == 1ull << 40); }
int cuIpcOpenMemHandle_v2(uint64_t *address, handle from, unsigned flags) {
    *address = 1ull << 41;
    return slow(from.bytes[0] == 7 && from.bytes[63] == 7 && flags == 1);
}
int cuIpcCloseMemHandle(uint64_t address) { return slow(address == 1ull << 41); }
int cuGetErrorName(int code, const char **text) { *text = code == 101 ? "INVALID_DEVICE" : "OTHER"; return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    if shutil.which("cc") is None:
        pytest.skip("cc is not installed")
    folder: Path = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "driver.so", "driver.c"], cwd=folder, check=True)
    return Driver(str(folder / "driver.so"))


def beside(call: Callable[[], Any]) -> Any:
    """Return the call's result; another thread makes progress meanwhile."""
    turns: list[float] = []
    done = threading.Event()

    def count() -> None:
        while not done.wait(0.001):
            turns.append(time.monotonic())

    thread = threading.Thread(target=count)
    thread.start()
    began = time.monotonic()
    found = call()
    ended = time.monotonic()
    done.set()
    thread.join()
    assert ended - began >= SLOW_S
    assert sum(began < turn < ended for turn in turns) >= 5
    return found


def test_others_run_while_the_driver_takes_its_time(driver: Driver) -> None:
    beside(lambda: driver.start(3))
    assert beside(driver.free_bytes) == 5 << 32
    handle = beside(lambda: driver.handle(1 << 40))
    assert handle == bytes([7]) * HANDLE_BYTES
    assert beside(lambda: driver.open(handle)) == 1 << 41
    beside(lambda: driver.close(1 << 41))


def test_what_the_driver_refuses_is_named(driver: Driver) -> None:
    with pytest.raises(DeviceError, match=r"^cuDevicePrimaryCtxRetain: INVALID_DEVICE: code=101$"):
        driver.start(2)
    with pytest.raises(DeviceError, match=r"^no-such-library: "):
        Driver("no-such-library").free_bytes()
