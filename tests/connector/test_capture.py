"""A capture of CUDA graphs in vLLM's mode, which unsafe calls of any thread spoil, beside a worker that attaches."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvprefetch.connector.attach.epoch import WorkerEpoch
from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.cuda import Device
from kvprefetch.shmring.wire.codec import send_message
from tests.daemon.engine.near import BLOCK, daemon_with
from tests.lab.daemon import Daemon
from tests.support.fake_engine import FakeEngine
from tests.support.fakecuda import GLOBAL_MODE, UUID, machine, needs_fake
from tests.support.waiting import eventually

pytestmark = [needs_fake, pytest.mark.store]


@pytest.fixture
def device() -> Device:
    machine()
    return cuda.open_device(UUID)


@pytest.fixture
def daemon(device: Device) -> Iterator[Daemon]:
    with daemon_with() as daemon:
        yield daemon
        FakeEngine.made.pop().close()


class Attaching:
    """A worker's thread that maps whatever memory the daemon hands it."""

    def __init__(self, engine: FakeEngine, device: Device) -> None:
        self.engine, self.sock, self.device = engine, engine.greet("worker"), device
        self.epoch: WorkerEpoch | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        attached, fds = self.engine.receive(self.sock)
        self.epoch = WorkerEpoch.map(attached, fds, self.device)
        send_message(self.sock, self.epoch.mapped())

    def end(self) -> None:
        self.thread.join(10)
        assert self.epoch is not None
        cache, self.epoch = self.epoch.device_cache, None
        assert cache is not None
        assert cache.join(10)


def capture(device: Device, beside: threading.Event | None) -> None:
    """Capture for a while, at least until `beside` came. Raises DeviceError for a capture that was spoilt."""
    stream = device.stream()
    device.call("streamBeginCapture", stream.pointer, GLOBAL_MODE)
    (beside or threading.Event()).wait(10 if beside else 1)
    try:
        device.call("streamEndCapture", stream.pointer)
    finally:
        stream.close()


def test_p37_a_worker_calls_nothing_that_spoils_a_capture_before_the_scheduler_is_there(
    daemon: Daemon, device: Device
) -> None:
    """vLLM builds its scheduler after the capture, and the daemon hands nothing over before the scheduler's hello."""
    engine = FakeEngine(daemon.socket, attach=False, block_bytes=BLOCK, device=UUID)
    worker = Attaching(engine, device)
    eventually(lambda: daemon.records("peer.hello"), what="the worker's hello")
    capture(device, None)
    assert worker.thread.is_alive()

    # Without the guard: the scheduler says hello while the worker captures.
    spoilt = threading.Event()
    threading.Thread(target=lambda: (engine.greet("scheduler"), worker.thread.join(10), spoilt.set())).start()
    with pytest.raises(DeviceError, match="cudaErrorStreamCaptureInvalidated"):
        capture(device, spoilt)
    worker.end()
