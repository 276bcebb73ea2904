"""The link against a hand-played daemon on a real socket: absent, attaching, refused, gone, reset."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.connector.attach import link as link_module
from kvprefetch.connector.attach.epoch import SchedulerEpoch
from kvprefetch.connector.attach.link import Link
from kvprefetch.shmring.layout import Line
from kvprefetch.shmring.liveness import PeerStatus
from kvprefetch.shmring.segment import Segment
from kvprefetch.shmring.wire.attach import Attached, Notice, Refused, Reset, ResetDone, Stored
from kvprefetch.shmring.wire.codec import receive_message, send_message
from tests.support.clock import Clock
from tests.support.waiting import eventually

from .fakes import FakeDaemon
from .played_daemon import Server, hello


@contextlib.contextmanager
def linked(path: Path | str | None, **options: Any) -> Iterator[Link[SchedulerEpoch]]:
    """A scheduler's link that has started; closed at the end."""
    link = Link(None if path is None else str(path), lambda: hello("scheduler"), SchedulerEpoch.map, **options)
    link.start()
    with contextlib.closing(link):
        yield link


@pytest.fixture
def scheduler(server: Server) -> Iterator[Link[SchedulerEpoch]]:
    with linked(server.path) as link:
        yield link


def test_an_absent_daemon_is_said_once_and_found_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quick_link: None
) -> None:
    path = tmp_path / "d.sock"
    with caplog.at_level(logging.INFO, "vllm.kvprefetch.link"), linked(path) as link:
        eventually(lambda: "no daemon" in caplog.text)
        time.sleep(0.05)  # some attempts more
        assert link.epoch is None
        server = Server(path)
        assert server.accept()[1] == hello("scheduler")
    server.close()
    assert [record.levelno for record in caplog.records if "no daemon" in record.message] == [logging.WARNING]
    assert not link.running


def test_a_daemon_is_started_where_none_listens_and_only_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, quick_link: None
) -> None:
    """Neither beside a daemon that answers, nor where this user may not look."""
    path, starts = tmp_path / "d.sock", list[bool]()
    with linked(path, start=lambda: starts.append(path.exists())):
        eventually(lambda: False in starts, what="a start without a socket")
        with contextlib.closing(Server(path)) as server:
            server.accept()
            starts.clear()
            time.sleep(0.05)
            assert starts == []
        eventually(lambda: True in starts, what="a start beside a dead socket")
    assert "no daemon" not in caplog.text
    starts.clear()
    with linked(f"{__file__}/d.sock", start=lambda: starts.append(True)):
        eventually(lambda: "no daemon" in caplog.text)
    assert starts == []


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The system's place and the user's own, where nothing listens yet."""
    found = [str(tmp_path / "system.sock"), str(tmp_path / "own.sock")]
    monkeypatch.setattr(link_module, "sockets", lambda: found)
    monkeypatch.setattr(link_module, "SYSTEM_SOCKET", found[0])
    return found


def test_processes_of_one_engine_meet_at_the_system_s_daemon_once_it_answers(
    places: list[str], quick_link: None, caplog: pytest.LogCaptureFixture
) -> None:
    """One that waits for its epoch at the user's daemon leaves it; one that has an epoch stays."""
    with contextlib.closing(Server(Path(places[1]))) as own, caplog.at_level(logging.INFO), linked(None) as first:
        own.attached()
        with linked(None) as second:
            own.accept()
            with contextlib.closing(Server(Path(places[0]))) as system:
                system.sock.accept()[0].close()  # a look whether it answers
                system.attached()
                assert first.epoch is not None
                eventually(lambda: second.epoch is not None)
                said = [
                    f"kvprefetch: attached to the daemon at {path}: epoch=1 slots={own.fake.layout.slot_count}"
                    for path in reversed(places)
                ]
                eventually(lambda: said == [text for text in caplog.messages if "attached to" in text])


def test_no_daemon_is_started_to_replace_the_system_s(places: list[str], quick_link: None) -> None:
    """It comes back, and a second daemon beside it would have other KV. Without it, the user's own is started."""
    starts = list[bool]()
    with linked(None, start=lambda: starts.append(True)) as link:
        eventually(lambda: starts)
        with contextlib.closing(Server(Path(places[0]))) as system:
            system.attached()
            starts.clear()
        eventually(lambda: link.epoch is None)
        with contextlib.closing(Server(Path(places[1]))) as own:
            time.sleep(0.05)
            assert starts == []
            own.sock.settimeout(0)
            with pytest.raises(BlockingIOError):
                own.accept()


def test_an_engine_goes_on_where_the_system_s_daemon_refuses_its_user(places: list[str], quick_link: None) -> None:
    """Also one that it served before."""
    with contextlib.closing(Server(Path(places[0]))) as system, linked(None) as link:
        system.attached().close()
        eventually(lambda: link.epoch is None)
        with contextlib.closing(Server(Path(places[1]))) as own:
            refused, _ = system.accept()
            send_message(refused, Refused(error="uid=1 may not attach", final=True, forbidden=True))
            refused.close()
            system.sock.close()
            os.unlink(places[0])
            own.attached()
            eventually(lambda: link.epoch is not None)


def test_attaching_maps_beats_and_ends_with_the_connection(server: Server, scheduler: Link[SchedulerEpoch]) -> None:
    """The end of file is published within the shared words, the memory stays usable, and a new epoch follows."""
    sock = server.attached()
    epoch = scheduler.epoch
    assert epoch is not None
    assert epoch.number == 1
    server.fake.liveness.beat(time.monotonic_ns())
    assert epoch.alive(time.monotonic_ns())
    eventually(lambda: server.fake.liveness.peer(time.monotonic_ns()) is PeerStatus.ALIVE)
    sock.close()
    eventually(lambda: scheduler.epoch is None)
    assert not epoch.alive(time.monotonic_ns())
    assert epoch.producer.push(1, b"still mapped")
    server.attached(FakeDaemon(Clock(), epoch=9))
    assert scheduler.epoch is not None
    assert scheduler.epoch.number == 9


def test_a_warning_says_that_the_daemon_is_gone_not_that_an_epoch_ended(
    server: Server, scheduler: Link[SchedulerEpoch], caplog: pytest.LogCaptureFixture
) -> None:
    """An epoch also ends when another process of the engine does, as at every shutdown: nothing is wrong then."""
    with caplog.at_level(logging.INFO, "vllm.kvprefetch.link"):
        sock = server.attached()
        sock.close()
        again, _ = server.accept()
        assert [record.levelno for record in caplog.records if "has ended" in record.message] == [logging.INFO]
        assert not [record for record in caplog.records if record.levelno > logging.INFO]
        server.attach(again, FakeDaemon(Clock(), epoch=9))
        server.path.unlink()
        again.close()
        eventually(lambda: any("no daemon at" in record.message for record in caplog.records))
    assert [record.levelno for record in caplog.records if "no daemon at" in record.message] == [logging.WARNING]


def test_descriptors_go_with_the_epoch_however_often_a_daemon_comes_anew(
    server: Server, scheduler: Link[SchedulerEpoch]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for epoch in range(1, 6):
        sock, _ = server.accept()
        fake = FakeDaemon(Clock(), epoch=epoch)
        server.attach(sock, fake)
        fake.segment.close()
        sock.close()
        eventually(lambda: scheduler.epoch is None)
    sock, _ = server.accept()
    for save_id in range(9):  # none is expected with it
        send_message(sock, Stored(save_id=save_id), [sock.fileno()])
    eventually(lambda: len(scheduler.stored) == 9)
    sock.close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


def test_detach_drops_the_epoch_and_comes_back(server: Server, scheduler: Link[SchedulerEpoch]) -> None:
    """An older one's damage says nothing of the one that has come since."""
    sock = server.attached()
    older = FakeDaemon(Clock()).epoch()
    scheduler.detach(older, "slot out of bounds")
    assert scheduler.epoch is not None
    scheduler.detach(scheduler.epoch, "slot out of bounds")
    assert scheduler.epoch is None
    assert receive_message(sock) is None
    server.accept()


@pytest.mark.parametrize("final", [True, False])
def test_a_refusal_is_said_once(server: Server, caplog: pytest.LogCaptureFixture, final: bool) -> None:
    with caplog.at_level(logging.INFO, "vllm.kvprefetch.link"), linked(server.path):
        for _ in range(3):
            sock, _ = server.accept()
            send_message(sock, Refused(error="too many engines", final=final))
            assert receive_message(sock) is None
            sock.close()
    said = [record for record in caplog.records if "too many engines" in record.message]
    assert [record.levelno for record in said] == [logging.ERROR if final else logging.INFO]


def test_an_engine_s_start_does_not_wait_for_a_daemon_that_it_cannot_talk_to(server: Server) -> None:
    begun = time.monotonic()
    with linked(server.path) as link:
        sock, _ = server.accept()
        sock.sendall(b"nonsense")
        link.wait()
        sock.close()
    assert time.monotonic() - begun < link_module.PATIENCE_S / 2


@pytest.mark.parametrize("daemon", ["says nothing", "hangs up", "turns away"])
@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_why_no_epoch_comes_is_one_warning(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, daemon: str, role: str
) -> None:
    """A worker waits for the scheduler as long as its engine starts, and says nothing."""
    monkeypatch.setattr(link_module, "PATIENCE_S", 0.05)
    reason = {"says nothing": "has not answered", "hangs up": "ended the connection", "turns away": "too many engines"}
    with caplog.at_level(logging.WARNING, "vllm.kvprefetch.link"), linked(server.path, keep_ended=role == "worker"):
        began = time.monotonic()
        while time.monotonic() - began < 0.3:
            sock, _ = server.accept()
            if daemon == "says nothing":
                time.sleep(0.3)
            elif daemon == "turns away":
                send_message(sock, Refused(error="too many engines: max_engines=1", final=False))
                assert receive_message(sock) is None
            sock.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (role == "scheduler")
    assert all(f"to the daemon at {server.path}: it " in line and reason[daemon] in line for line in said)


def test_what_the_daemon_waits_for_is_said_instead(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "PATIENCE_S", 0.05)
    with caplog.at_level(logging.WARNING, "vllm.kvprefetch.link"), linked(server.path):
        sock, _ = server.accept()
        send_message(sock, Notice(text="1 of 2 ranks have come"))
        time.sleep(0.3)
    assert caplog.messages == ["kvprefetch: 1 of 2 ranks have come"]


@pytest.mark.parametrize("kind", ["garbage", "geometry", "descriptors"])
def test_nonsense_is_survived(server: Server, scheduler: Link[SchedulerEpoch], kind: str) -> None:
    sock, _ = server.accept()
    if kind == "garbage":
        sock.send(b"\xff\xfe")
    else:
        segment = Segment.create(8192)
        fds = [segment.fd] if kind == "descriptors" else [segment.fd, segment.fd]
        send_message(sock, Attached(epoch=1, segment_bytes=8192, slot_count=1, slot_bytes=0), fds)
        segment.close()
    assert receive_message(sock) is None
    sock.close()
    server.attached()


def test_a_reset_is_confirmed_by_its_own_reply(server: Server, scheduler: Link[SchedulerEpoch]) -> None:
    assert not scheduler.send_reset(1, "1" * 32), "there is no daemon"
    sock = server.attached()
    eventually(lambda: scheduler.epoch, what="the epoch")
    assert scheduler.send_reset(3, "3" * 32)
    assert Server.receive(sock) == Reset(reset_generation=3, weights="3" * 32)
    for generation in (2, 3):
        send_message(sock, ResetDone(reset_generation=generation))
        eventually(lambda generation=generation: scheduler.confirmed_reset == generation, what="the reply")


def test_a_daemon_that_stands_still_holds_up_no_reset(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "BEAT_S", 10.0)
    with linked(server.path) as link:
        server.attached()
        eventually(lambda: link.epoch is not None)
        begun = time.monotonic()
        while link.send_reset(1, "1" * 32):
            """It reads none of them, and at last the socket takes no more."""
        assert time.monotonic() - begun < 5


def test_an_attachment_confirms_the_reset_that_its_hello_names(server: Server, scheduler: Link[SchedulerEpoch]) -> None:
    """And no later one, however many the epoch before had confirmed."""
    hello = scheduler.hello()
    assert hello.scheduler is not None
    scheduler.confirmed_reset = 9
    info = hello.scheduler.model_copy(update={"reset_generation": 5, "weights": "5" * 32})
    scheduler.hello = lambda: hello.model_copy(update={"scheduler": info})
    server.attached().close()
    server.attached()
    eventually(lambda: scheduler.confirmed_reset == 5, what="the attachment")


def test_the_heart_beats_while_messages_come(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that saves all the time hears of its saves all the time: nothing is waited for long enough to beat."""
    monkeypatch.setattr(link_module, "BEAT_S", 60.0)
    with linked(server.path) as link:
        sock = server.attached()
        beaten = server.fake.words.load_acquire(Line.PRODUCER_BEAT)
        for save_id in range(3):
            send_message(sock, Stored(save_id=save_id))
            eventually(lambda before=beaten: server.fake.words.load_acquire(Line.PRODUCER_BEAT) > before)
            beaten = server.fake.words.load_acquire(Line.PRODUCER_BEAT)
        assert [stored.save_id for stored in link.stored] == [0, 1, 2]
    assert not link.running, "nor is an end waited for"


def test_the_heart_beats_while_nothing_comes(server: Server, scheduler: Link[SchedulerEpoch]) -> None:
    server.attached()
    for _ in range(3):
        beaten = server.fake.words.load_acquire(Line.PRODUCER_BEAT)
        eventually(lambda before=beaten: server.fake.words.load_acquire(Line.PRODUCER_BEAT) > before)


def test_a_process_without_a_descriptor_left_for_what_came_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it closes the one that came."""
    came = os.dup(0)
    monkeypatch.setattr(socket, "recv_fds", lambda *_: (b"{}", [came], socket.MSG_CTRUNC, None))
    with socket.socket() as sock, pytest.raises(OSError, match=r"Too many open files \(ulimit -n\)"):
        receive_message(sock)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(came)
