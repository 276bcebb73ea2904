"""The processes of an engine one by one: their hellos, and the answers that they get."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, TypeVar, cast

from kvprefetch.shmring.wire.attach import SchedulerInfo, WorkerInfo
from kvprefetch.shmring.wire.codec import receive_message, send_message
from tests.daemon.fake_engine import FakeEngine

M = TypeVar("M")


def answer(sock: socket.socket, *kinds: type[M]) -> M:
    """Return the daemon's next message, which is of one of these kinds. Descriptors that come with it are closed."""
    received = receive_message(sock)
    assert received is not None
    for fd in received[1]:
        os.close(fd)
    assert isinstance(received[0], kinds), received[0]
    return received[0]


def hellos(
    engine: FakeEngine, *, worker: WorkerInfo | None = None, scheduler: SchedulerInfo | None = None
) -> list[socket.socket]:
    """Connect an engine's processes and send their hellos; return the workers' sockets, then the scheduler's."""
    sockets = [engine.connect() for _ in range(engine.ranks + 1)]
    for rank, sock in enumerate(sockets[:-1]):
        send_message(sock, engine.hello("worker", rank, **cast(Any, {"worker": worker} if worker else {})))
    send_message(sockets[-1], engine.hello("scheduler", **cast(Any, {"scheduler": scheduler} if scheduler else {})))
    return sockets


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
