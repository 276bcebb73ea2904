"""No record and no message, at the largest that its bounds allow, keeps the main loop from the other engines."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvprefetch.client.door import Door
from kvprefetch.shmring.layout import Line
from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.admin import Remove
from kvprefetch.shmring.wire.attach import Reset, SchedulerInfo
from kvprefetch.shmring.wire.codec import send_message
from kvprefetch.shmring.wire.records import MAX_SAVED_BLOCKS, FlagState, Outcome, RecordKind, Saved
from tests.daemon.door.test_door import message
from tests.daemon.stores import stored
from tests.lab.daemon import Daemon
from tests.support.auditor import ask_daemon
from tests.support.engine_side import EngineSpec, Key
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

PAUSE_S = 1.0
BEAT_S = 0.1  # between heartbeats, when no slice of work is longer
DIGEST_BYTES = 8
BLOCK_BYTES = 64  # the smaller, the more slots there are


@dataclass(frozen=True)
class LongSpec(EngineSpec):
    """An engine with long prompts whose digests are short, so that its control segment stays small."""

    def scheduler(self) -> SchedulerInfo:
        size = 4096 + self.max_blocks * DIGEST_BYTES + self.max_blocks // 64
        return super().scheduler().model_copy(update={"max_hint_bytes": size})


class Foe(FakeEngine):
    """An attached engine that sends the largest of everything. `staged`: how many blocks it stores first."""

    def __init__(self, daemon: Daemon, blocks: int, staged: int) -> None:
        super().__init__(daemon.socket, attach=False)
        self.spec = LongSpec(engine_id="foe", prefix=uuid.uuid4().hex, block_bytes=BLOCK_BYTES, max_blocks=blocks)
        self.attach()
        self.daemon, self.blocks, self.digests = daemon, blocks, digests(staged)
        before = sum(line["stored_blocks"] for line in daemon.records("save.done"))
        for start in range(0, staged, MAX_SAVED_BLOCKS):
            some = self.digests[start : start + MAX_SAVED_BLOCKS]
            self.save(dict.fromkeys(some, b"x" * BLOCK_BYTES))
            stored(daemon, before + start + len(some))
        if staged:
            self.cancel(self.wanted(self.digests, "stages them"))

    def pushed(self, kind: int, payload: bytes) -> None:
        """Push a record as soon as the ring has room."""
        eventually(lambda: self.producer.push(kind, payload), what="room in the ring")

    def wanted(self, chain: list[bytes], name: str) -> Key:
        """Hint a prompt, and wait for its answer."""
        key = self.hint(chain, name=name)
        flag = self.settled(key, 60)
        assert flag.count in (0, len(self.digests)), "nowhere, or staged"
        return key

    def hints(self, chain: list[bytes], count: int = 6) -> list[Key]:
        return [self.wanted(chain, f"r{number}") for number in range(count)]


def digests(count: int, first: int = 0) -> list[bytes]:
    numbers = np.random.default_rng(first).permutation(np.arange(first, first + count, dtype="<u8"))
    joined = (numbers + (1 << 40)).tobytes()
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


def absent(foe: Foe) -> None:
    for key in foe.hints(digests(foe.blocks, 1 << 30)):
        foe.cancel(key)


def in_a_wrong_order(foe: Foe) -> None:
    for key in foe.hints(foe.digests[::-1]):
        foe.cancel(key)


def one_block_again_and_again(foe: Foe) -> None:
    for number in range(16):
        foe.hint(foe.digests[:1] * foe.blocks, name=f"r{number}")
        head = lambda: foe.words.load_acquire(Line.HEAD) == foe.words.load_acquire(Line.TAIL)  # noqa: E731
        eventually(head, 60, what="the end of the hint")
    send_message(foe.scheduler, Reset(reset_generation=1, weights=f"{1:032x}"))


def reset(foe: Foe) -> None:
    foe.hints(foe.digests[::2] + foe.digests[1::2])
    send_message(foe.scheduler, Reset(reset_generation=1, weights=f"{1:032x}"))


def ended(foe: Foe) -> None:
    for key in foe.hints(foe.digests[::-1], 2):
        assert foe.move(key, FlagState.CLAIMED)
        assert foe.move(key, FlagState.RELEASED)
        foe.done(key, loaded=len(foe.digests))


def asked_and_stopped(foe: Foe) -> None:
    key = foe.hint(foe.digests[::-1])
    foe.ask(key)
    foe.ask(key, stop=True)
    for number in range(5000):
        foe.pushed(RecordKind.ASK, records.encode_ask(records.Ask(number, 1, 1, stop=number % 2 > 0)))
    foe.settled(key)
    foe.cancel(key)


def ended_without_a_request(foe: Foe) -> None:
    for number in range(5000):
        done = records.Done(number % 1024, 7, Outcome.ABORTED, 0, foe.blocks, 0, 0, 0, 0)
        foe.pushed(RecordKind.DONE, records.encode_done(done))


def saved_and_dropped(foe: Foe) -> None:
    for dropped in (True, False):
        for _ in range(16):
            slots = foe.credits.take(MAX_SAVED_BLOCKS)
            names = [] if dropped else [os.urandom(32) + b"\0" for _ in slots]
            foe.pushed(RecordKind.SAVED, records.encode_saved(Saved(1, 0, dropped, slots, names)))


def saved_one_by_one_then_reset(foe: Foe) -> None:
    for slot in foe.credits.take(4 * MAX_SAVED_BLOCKS):
        foe.pushed(RecordKind.SAVED, records.encode_saved(Saved(1, 0, False, [slot], [os.urandom(32) + b"\0"])))
    send_message(foe.scheduler, Reset(reset_generation=1, weights=f"{1:032x}"))


def records_of_any_bytes(foe: Foe) -> None:
    for kind in (*RecordKind, 99):
        for _ in range(20):
            foe.pushed(kind, os.urandom(1 << 18))


def announced(foe: Foe) -> None:
    chain = [digest.hex() for digest in digests(min(foe.blocks, 1 << 19), 1 << 31)]
    for number in range(3):
        prompt = {"block_hashes": chain, "engine": "foe"}
        Door(foe.daemon.socket).ask("POST", "/v1/kv_hints", message(f"m{number}", prompt))


def large_messages(foe: Foe) -> None:
    for _ in range(20):
        with foe.connect() as sock:
            send_message(sock, Remove(keys=[f"u{os.getuid()}@{'x' * 200}{number}" for number in range(256)]))
        with foe.connect() as sock:
            sock.send(b'{"type":"status_query","x":[' + b"[]," * 20_000 + b"0]}")


ALL: list[Callable[[Foe], None]] = [
    absent, in_a_wrong_order, one_block_again_and_again, reset, ended, asked_and_stopped, ended_without_a_request,
    saved_and_dropped, saved_one_by_one_then_reset, records_of_any_bytes, announced, large_messages,
]  # fmt: skip


@contextmanager
def longest_pause(daemon: Daemon) -> Iterator[list[float]]:
    """The main loop's longest pause until now, as a neighbour sees it by its heartbeat, and the CPU time in one."""
    neighbour, longest = FakeEngine(daemon.socket, engine_id="neighbour", prefix="neighbour"), [0.0, 0.0]
    over, main_thread = threading.Event(), Path(f"/proc/{daemon.pid}/task/{daemon.pid}/schedstat")

    def look() -> None:
        last, at, began_s = -1, time.monotonic(), 0.0
        while not over.is_set():
            beat, now = neighbour.words.load_acquire(Line.CONSUMER_BEAT), time.monotonic()
            used_s = int(main_thread.read_text().split()[0]) / 1e9
            if beat != last:
                last, at, began_s = beat, now, used_s
            longest[:] = max(longest[0], now - at), max(longest[1], used_s - began_s)
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield longest
    finally:
        over.set()
        thread.join()
        neighbour.close()


def check(daemon: Daemon, send: Callable[[Foe], None], blocks: int, staged: int) -> float:
    """Return the most CPU time (s) of the main loop in one slice of work."""
    eventually(lambda: not ask_daemon(daemon.socket).engines, 30, "the end of the engines before")
    needs = send in (in_a_wrong_order, one_block_again_and_again, reset, ended, asked_and_stopped)
    foe = Foe(daemon, blocks, staged if needs else 0)
    with longest_pause(daemon) as pause:
        send(foe)
        idle = [time.monotonic(), cpu_s(daemon.pid)]

        def computes_no_more() -> bool:
            if (used := cpu_s(daemon.pid)) - idle[1] > 0.02:
                idle[:] = [time.monotonic(), used]
            return time.monotonic() - idle[0] > 0.5

        eventually(computes_no_more, 60, what="the end of what it sent")
        pause_s, cpu = pause
        assert pause_s < PAUSE_S
    foe.close()
    return cpu - BEAT_S


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    with Daemon(staging="32MiB", memory="64MiB") as daemon:
        yield daemon


@pytest.mark.parametrize("send", ALL, ids=lambda each: each.__name__)
def test_the_largest_of_everything_keeps_no_neighbour_waiting(
    shared_daemon: Daemon, send: Callable[[Foe], None]
) -> None:
    check(shared_daemon, send, 50_000, 12_000)


@pytest.mark.stress
@pytest.mark.parametrize("send", ALL, ids=lambda each: each.__name__)
def test_a_million_of_everything_keeps_no_neighbour_waiting(
    serve: Callable[..., Daemon], send: Callable[[Foe], None]
) -> None:
    slice_s = check(serve(staging="512MiB", memory="512MiB"), send, 1_000_000, 200_000)
    print(f"{send.__name__}: {slice_s:.3f} s of CPU")
    assert slice_s <= (0.25 if "reset" in send.__name__ else 0.1)
