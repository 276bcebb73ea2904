"""Engines on a fake GPU that save and load until they are killed; each is a fork of this process.

A line on stdin is the path of a daemon's socket; the answer is the number of the process with the engine.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvprefetch.connector.copy.device_cache import DeviceCache
from kvprefetch.shmring.wire.attach import Attached, Mapped
from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.engine.near import BLOCK, values_of
from tests.support import fakecuda
from tests.support.fake_engine import FakeEngine


class Doomed(FakeEngine):
    """With a worker's own device cache. It ends with the daemon, also while it attaches."""

    def connect(self) -> socket.socket:
        sock = super().connect()
        threading.Thread(target=end_with, args=(sock.fileno(),), daemon=True).start()
        return sock

    def mapped(self, attached: Attached, slabs: list[int]) -> Mapped:
        rows = np.frombuffer(self.staging[-1].buffer, np.uint8)[: attached.slot_count * BLOCK].reshape(-1, BLOCK)
        assert self.gpu is not None
        cache = DeviceCache(self.gpu, rows, attached, slabs[0] if slabs else None)
        memory: Any = SimpleNamespace(address=cache.address)
        self.slabs.append(memory)
        return Mapped(epoch=attached.epoch, device=cache.slots > 0)


def run(path: str) -> None:
    """Use the device slots until the end of this process, or of the daemon."""
    engine = Doomed(Path(path), block_bytes=BLOCK, device=fakecuda.UUID)
    for turn in itertools.count():
        values = values_of(f"{os.getpid()}-{turn % 3}", 4)
        if turn < 3:
            engine.save(values, save_id=turn + 1)
        key = engine.hint(list(values))
        if engine.settled(key).count and engine.move(key, FlagState.CLAIMED):
            assert all(engine.read(slot) in values.values() for slot in engine.slots(key))
            assert engine.move(key, FlagState.RELEASED)
        engine.done(key, loaded=0)


def end_with(daemon: int) -> None:
    hung_up = select.poll()
    hung_up.register(daemon, select.POLLRDHUP | select.POLLHUP)
    hung_up.poll()
    os._exit(0)


if __name__ == "__main__":
    fakecuda.load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            run(line.strip())
        print(child, flush=True)
