"""The epochs that a worker's link keeps mapped when they have ended, and the thread that unmaps them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvprefetch.connector.attach import link as link_module
from kvprefetch.connector.attach.epoch import WorkerEpoch
from kvprefetch.connector.attach.link import Link
from kvprefetch.shmring.segment import Segment
from kvprefetch.shmring.wire.attach import Attached, Mapped
from kvprefetch.shmring.wire.codec import send_message
from tests.support.waiting import eventually

from .played_daemon import Server, hello

SLOT_BYTES = 16


@pytest.fixture
def worker(server: Server) -> Iterator[Link[WorkerEpoch]]:
    link = Link(str(server.path), lambda: hello("worker"), WorkerEpoch.map, keep_ended=True)
    link.start()
    yield link
    link.close()


def attach(
    server: Server, link: Link[WorkerEpoch], epoch: int, live_epochs: tuple[int, ...] = ()
) -> tuple[socket.socket, Segment]:
    """A daemon attaches the worker with this epoch. Return its connection, and the staging."""
    sock, _ = server.accept()
    segment = Segment.create(4 * SLOT_BYTES)
    attached = Attached(
        epoch=epoch, segment_bytes=segment.size_bytes, slot_count=4, slot_bytes=SLOT_BYTES, live_epochs=[*live_epochs]
    )
    send_message(sock, attached, [segment.fd])
    assert Server.receive(sock) == Mapped(epoch=epoch)
    eventually(lambda: link.epoch is not None)
    return sock, segment


def live_and_die(server: Server, link: Link[WorkerEpoch], epoch: int, live_epochs: tuple[int, ...] = ()) -> None:
    """A daemon that attaches the worker with this epoch and ends."""
    sock, segment = attach(server, link, epoch, live_epochs)
    sock.close()
    segment.close()
    eventually(lambda: link.epoch is None)


def mapped_segments() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvprefetch")


def test_a_worker_keeps_ended_epochs_until_steps_no_longer_name_them(server: Server, worker: Link[WorkerEpoch]) -> None:
    live_and_die(server, worker, 1)
    for _ in range(link_module.FORGET_STEPS - 1):
        worker.keep(())
    worker.keep((1,))
    for _ in range(link_module.FORGET_STEPS - 1):
        worker.keep((2,))
    kept = worker.mapped(1)
    assert kept is not None
    assert kept.rows.shape == (4, SLOT_BYTES)
    worker.keep(())
    assert worker.mapped(1) is None


def test_an_idle_worker_lets_go_of_every_ended_epoch_that_the_scheduler_does_not_name(
    server: Server, worker: Link[WorkerEpoch]
) -> None:
    """No step comes; the daemon is started again and again."""
    before = mapped_segments()
    for epoch in range(1, 7):
        live_and_die(server, worker, epoch, live_epochs=(2,))
    assert [epoch for epoch in range(1, 7) if worker.mapped(epoch) is not None] == [2, 6]
    eventually(lambda: mapped_segments() == before + 2)


def test_the_staging_of_the_epoch_is_left_alone_beside_an_ended_one(
    server: Server, worker: Link[WorkerEpoch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A try to unmap it would empty its page tables, though it cannot succeed."""
    live_and_die(server, worker, 1)
    ended, tried, close = worker.mapped(1), list[Segment](), Segment.close
    monkeypatch.setattr(Segment, "close", lambda segment: tried.append(segment) or close(segment))
    sock, segment = attach(server, worker, 2, live_epochs=(1,))
    assert ended is not None
    tried.clear()
    eventually(lambda: len(tried) > 1, what="the ended one is tried again")
    assert {each.address for each in tried} == {ended.segment.address}
    sock.close()
    close(segment)


def test_no_thread_but_the_links_unmaps_staging(
    server: Server, worker: Link[WorkerEpoch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unmapping costs 50 ms per GiB: the step that drops the last reference must not pay for it."""
    unmapped_by: list[str] = []
    close = Segment.close

    def recorded(segment: Segment) -> bool:
        if closed := close(segment):
            unmapped_by.append(threading.current_thread().name)
        return closed

    before = mapped_segments()
    live_and_die(server, worker, 1)
    monkeypatch.setattr(Segment, "close", lambda segment: False)  # the link's thread does not come to it
    copying = worker.mapped(1)
    assert copying is not None
    for _ in range(link_module.FORGET_STEPS):
        worker.keep(())
    assert worker.mapped(1) is None
    del copying
    assert mapped_segments() == before + 1, "the step dropped the last reference, and unmapped nothing"
    monkeypatch.setattr(Segment, "close", recorded)
    eventually(lambda: mapped_segments() == before)
    assert unmapped_by == ["kvprefetch-link"]


def test_what_a_copy_still_uses_stays_mapped(server: Server, worker: Link[WorkerEpoch]) -> None:
    before = mapped_segments()
    live_and_die(server, worker, 1)
    copying = worker.mapped(1)
    assert copying is not None
    live_and_die(server, worker, 2)
    assert worker.mapped(1) is None
    time.sleep(0.1)  # the link's thread tries it several times
    copying.rows[3, SLOT_BYTES - 1] = 7
    assert copying.rows[3, SLOT_BYTES - 1] == 7
    assert mapped_segments() == before + 2
    del copying
    eventually(lambda: mapped_segments() == before + 1)
