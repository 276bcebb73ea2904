"""Reservations of several engines at once: on real threads and memory, with the machine's limit as the test says."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
from structlog.testing import capture_logs

from kvprefetch.daemon.config.model import DaemonConfig
from kvprefetch.daemon.engine import reservations as module
from kvprefetch.daemon.engine.memory import EngineInfo, EngineMemory, layout_for
from kvprefetch.daemon.engine.reservations import Reservations, Reserved, Withdrawn
from kvprefetch.daemon.store.errors import StoreError, StoreUnavailable
from kvprefetch.daemon.work.calls import Call
from kvprefetch.daemon.work.pools import Pools
from kvprefetch.shmring.errors import SegmentError
from kvprefetch.shmring.segment import Segment
from tests.support.engine_side import ONE_GROUP, EngineSpec
from tests.support.waiting import eventually

CONFIG = DaemonConfig.model_validate({"staging": "16MiB", "hint_ring": "1MiB", "mooncake_config": "/cluster.json"})
SPEC = EngineSpec(max_blocks=8)
ENGINE = EngineInfo("e", ONE_GROUP, SPEC.scheduler(), [SPEC.worker()])
EACH = (16 << 20) + layout_for(CONFIG, 1, ENGINE)[0].total_bytes


class Known:
    """A store: which memory it knows, and what it refuses."""

    is_open = True

    def __init__(self) -> None:
        self.areas: set[int] = set()
        self.most = 1 << 10

    def register(self, address: int, _: int) -> None:
        if len(self.areas) >= self.most:
            raise StoreError("registering failed with code -1")
        assert address not in self.areas
        self.areas.add(address)

    def unregister(self, address: int) -> None:
        self.areas.remove(address)


class Machine:
    """`total` bytes, of which the segments that are filled take their part; a gate may hold up what fills them."""

    def __init__(self, total: int) -> None:
        self.total, self.lock = total, threading.Lock()
        self.taken: dict[int, int] = {}
        self.most = 0
        self.gate = threading.Event()
        self.gate.set()

    @property
    def available(self) -> int:
        return self.total - sum(self.taken.values())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(1 << 40)
    fill, close = Segment.fill, Segment.close

    def filled(segment: Segment, start: int, stop: int) -> None:
        assert machine.gate.wait(10)
        fill(segment, start, stop)
        with machine.lock:
            machine.taken[segment.address] = machine.taken.get(segment.address, 0) + stop - start
            machine.most = max(machine.most, sum(machine.taken.values()))

    def closed(segment: Segment) -> bool:
        with machine.lock:
            machine.taken.pop(segment.address, None)
        return close(segment)

    monkeypatch.setattr(Segment, "fill", filled)
    monkeypatch.setattr(Segment, "close", closed)
    monkeypatch.setattr(module, "available_bytes", lambda: machine.available)
    return machine


class Desk:
    """Reservations on pools of their own; `next` waits for the next result, as the loop takes it."""

    def __init__(self, store: Known) -> None:
        self.store, self.pools = store, Pools(1)
        self.all = Reservations(self.pools, cast(Any, store), structlog.get_logger())

    def poll(self) -> Reserved | None:
        self.pools.run_finished()
        return self.all.next_done()

    def next(self) -> Reserved:
        return eventually(self.poll, what="a result")


@pytest.fixture
def desk() -> Iterator[Desk]:
    maps = Path("/proc/self/maps")
    before = maps.read_text().count("memfd:kvprefetch")
    desk = Desk(Known())
    yield desk
    eventually(lambda: desk.pools.run_finished() or not desk.pools.running(), what="idle threads")
    assert desk.pools.close()
    assert maps.read_text().count("memfd:kvprefetch") == before, "nothing stays mapped"
    assert not desk.store.areas, "nothing stays registered"


def free(desk: Desk, *results: Reserved) -> None:
    for result in results:
        assert isinstance(result.memory, EngineMemory)
        desk.all.free(result.memory)


def test_memory_is_filled_and_known_to_the_store_when_it_is_handed_out(desk: Desk, machine: Machine) -> None:
    desk.all.want(1, CONFIG, ENGINE)
    result = desk.next()
    assert isinstance(result.memory, EngineMemory)
    assert {address for address, _ in result.memory.staging.areas()} == desk.store.areas
    assert machine.most == result.memory.total_bytes == EACH
    assert result.memory.staging.page_bytes >= 4096
    free(desk, result)


def test_two_engines_at_once_are_not_promised_the_same_memory(desk: Desk, machine: Machine) -> None:
    """The first has taken next to nothing when the second one comes."""
    machine.total = EACH * 3 // 2
    machine.gate.clear()
    desk.all.want(1, CONFIG, ENGINE)
    desk.all.want(2, CONFIG, ENGINE)
    refused = desk.next()
    assert refused.number == 2
    assert isinstance(refused.memory, SegmentError)
    assert str(refused.memory).startswith("staging: not enough memory for another engine: staging=16MiB control=")
    machine.gate.set()
    first = desk.next()
    assert machine.most <= machine.total
    desk.all.want(3, CONFIG, ENGINE)
    assert isinstance(desk.next().memory, SegmentError), "the first has taken its memory"
    free(desk, first)
    desk.all.want(4, CONFIG, ENGINE)
    free(desk, desk.next())


def test_several_engines_are_reserved_at_the_same_time(desk: Desk, machine: Machine) -> None:
    machine.gate.clear()
    for number in (1, 2, 3):
        desk.all.want(number, CONFIG, ENGINE)
    names = [f"attach-{number}" for number in (1, 2, 3)]
    eventually(lambda: {thread.name for thread in threading.enumerate()} >= set(names), what="three threads")
    machine.gate.set()
    free(desk, *(desk.next() for _ in range(3)))


def test_engines_wait_for_a_store_that_is_not_open_and_one_that_dies_waits_no_more(
    desk: Desk, machine: Machine
) -> None:
    desk.store.is_open = False
    desk.all.want(1, CONFIG, ENGINE)
    desk.all.want(2, CONFIG, ENGINE)
    desk.all.withdraw(1)
    assert isinstance(desk.next().memory, Withdrawn)
    assert (desk.poll(), machine.taken) == (None, {})
    desk.store.is_open = True
    desk.all.carry_on()
    second = desk.next()
    assert second.number == 2
    free(desk, second)


def test_the_memory_of_a_reservation_that_is_withdrawn_is_waited_for(desk: Desk, machine: Machine) -> None:
    machine.total = EACH * 3 // 2
    machine.gate.clear()
    desk.all.want(1, CONFIG, ENGINE)
    desk.all.withdraw(1)
    desk.all.want(2, CONFIG, ENGINE)
    machine.gate.set()
    withdrawn, second = desk.next(), desk.next()
    assert (withdrawn.number, second.number) == (1, 2)
    free(desk, second)


def test_memory_that_is_made_as_its_wish_is_withdrawn_is_freed_here_and_waited_for(
    desk: Desk, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last slice is filled already, and the store registers it: no other part gets to see it."""
    begun, gate, register = threading.Event(), threading.Event(), desk.store.register

    def slow(address: int, size: int) -> None:
        begun.set()
        assert gate.wait(10)
        register(address, size)

    machine.total = EACH * 3 // 2
    monkeypatch.setattr(desk.store, "register", slow)
    desk.all.want(1, CONFIG, ENGINE)
    assert begun.wait(10)
    desk.all.withdraw(1)
    desk.all.want(2, CONFIG, ENGINE)
    gate.set()
    withdrawn, second = desk.next(), desk.next()
    assert isinstance(withdrawn.memory, Withdrawn)
    free(desk, second)


def test_a_reservation_that_waits_for_a_release_is_not_overtaken(desk: Desk, machine: Machine) -> None:
    machine.total = EACH * 5 // 2
    machine.gate.clear()
    desk.all.want(1, CONFIG, ENGINE)
    desk.all.withdraw(1)
    desk.all.want(2, CONFIG.model_copy(update={"staging": 32 << 20}), ENGINE)
    desk.all.want(3, CONFIG, ENGINE)
    machine.gate.set()
    withdrawn, refused, second = desk.next(), desk.next(), desk.next()
    assert (withdrawn.number, refused.number, second.number) == (1, 3, 2)
    assert isinstance(refused.memory, SegmentError), "there was room for it while the second one waited"
    free(desk, second)


def test_the_last_byte_is_not_handed_out(desk: Desk, machine: Machine) -> None:
    machine.total = EACH
    desk.all.want(1, CONFIG, ENGINE)
    assert isinstance(desk.next().memory, SegmentError)


def test_memory_that_the_store_refuses_is_given_back(desk: Desk, machine: Machine) -> None:
    """RDMA registers staging, and may not be allowed to lock so much: of two ranks the first is not kept either."""
    desk.store.most = 1
    desk.all.want(1, CONFIG, ENGINE._replace(workers=[SPEC.worker(), SPEC.worker(1)]))
    assert isinstance(desk.next().memory, StoreError)
    assert not machine.taken


@pytest.mark.parametrize("error", [StoreError("no"), StoreUnavailable("no"), RuntimeError("no")])
def test_memory_that_the_store_does_not_let_go_of_stays_taken_and_is_tried_again(
    desk: Desk, machine: Machine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It ends no other engine; the pauses between two tries grow up to a minute."""
    tries = []

    def unregister(address: int) -> None:
        tries.append(address)
        raise error

    def tried() -> object:
        return desk.all.held()[0]["tries"]

    desk.all.want(1, CONFIG, ENGINE)
    first, now_ns = desk.next(), 1
    said = str(error) if isinstance(error, StoreError | StoreUnavailable) else repr(error)
    with capture_logs() as log, monkeypatch.context() as patched:
        patched.setattr(desk.store, "unregister", unregister)
        free(desk, first)
        eventually(lambda: desk.pools.run_finished() or desk.all.held(), what="memory that is held")
        desk.all.want(2, CONFIG, ENGINE)
        second = desk.next()
        start, started = desk.pools.start, list[Call]()
        patched.setattr(desk.pools, "start", lambda call: (started.append(call), start(call)))
        assert machine.available == machine.total - (16 << 20) - EACH, "the ledger has both"
        for count, pause_s in enumerate((1, 2, 4, 8, 16, 32, 60, 60), 2):
            desk.all.tick(now_ns)
            now_ns += pause_s * 1_000_000_000
            desk.all.tick(now_ns - 1)
            assert not started, "too early"
            desk.all.tick(now_ns)
            started.clear()
            eventually(lambda count=count: desk.pools.run_finished() or tried() == count, what="a try")
    assert [(line["event"], line["error"]) for line in log] == [("memory.held", said)]
    assert desk.all.held() == [{"epoch": 1, "bytes": 16 << 20, "tries": 9, "error": said}]
    assert len(set(tries)) == 1
    desk.all.tick(now_ns)
    desk.all.tick(now_ns + 60_000_000_000)
    eventually(lambda: desk.pools.run_finished() or not desk.all.held(), what="memory that is free")
    free(desk, second)


def test_a_reservation_that_fails_leaves_no_memory_that_the_store_holds(
    desk: Desk, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks the second one is refused, and the first one stays: its memory is tried again, too."""
    desk.store.most = 1
    with monkeypatch.context() as patched:
        patched.setattr(desk.store, "unregister", lambda _: 1 / 0)
        desk.all.want(1, CONFIG, ENGINE._replace(workers=[SPEC.worker(), SPEC.worker(1)]))
        assert isinstance(desk.next().memory, StoreError)
    [held] = desk.all.held()
    assert held["bytes"] == sum(machine.taken.values()) == 8 << 20
    desk.all.tick(1)
    desk.all.tick(1_000_000_001)
    eventually(lambda: desk.pools.run_finished() or not desk.all.held(), what="memory that is free")
    assert not machine.taken


def test_memory_that_nobody_took_is_unregistered_at_the_end(desk: Desk, machine: Machine) -> None:
    desk.all.want(1, CONFIG, ENGINE)
    eventually(lambda: desk.pools.run_finished() and desk.store.areas, what="the memory")
    desk.all.close()
    assert not desk.store.areas
    free(desk, desk.next())


@pytest.mark.parametrize("seed", range(4))
def test_engines_that_come_and_go_at_random_keep_to_the_machines_memory(
    desk: Desk, machine: Machine, seed: int
) -> None:
    """No memory is handed out before the store knows it, none is unmapped while an engine has it, and none leaks."""
    rng = random.Random(seed)
    machine.total = 5 * EACH // 2
    held: dict[int, EngineMemory] = {}
    wanted: set[int] = set()
    outcomes: Counter[str] = Counter()

    def take(result: Reserved) -> None:
        wanted.discard(result.number)
        outcomes[type(result.memory).__name__] += 1
        if isinstance(result.memory, EngineMemory):
            assert {address for address, _ in result.memory.staging.areas()} <= desk.store.areas
            held[result.number] = result.memory

    actions: list[Callable[[], Any]] = [
        lambda: held and desk.all.free(held.pop(rng.choice(list(held)))),
        lambda: wanted and rng.random() < 0.3 and desk.all.withdraw(rng.choice(list(wanted))),
        lambda: time.sleep(rng.random() / 50),
    ]
    number, deadline_s = 0, time.monotonic() + 60
    while outcomes["EngineMemory"] < 8 and time.monotonic() < deadline_s:
        number += 1
        if len(wanted) < 3:
            wanted.add(number)
            desk.all.want(number, CONFIG, ENGINE)
        rng.choice(actions)()
        for memory in held.values():
            memory.staging.segments[0].buffer[rng.randrange(16 << 20)] = 1
        while (result := desk.poll()) is not None:
            take(result)
    while wanted:
        take(desk.next())
    assert machine.most <= machine.total
    assert outcomes["EngineMemory"] >= 8, outcomes
    for memory in held.values():
        desk.all.free(memory)


def test_memory_that_the_embedded_store_and_the_door_will_take_is_no_engines(desk: Desk, machine: Machine) -> None:
    """Before anything is counted, that is all of the store's memory."""
    store = 40 << 20
    embedded = DaemonConfig.model_validate({"staging": "16MiB", "hint_ring": "1MiB", "memory": store})
    machine.total = 2 * EACH + store + 1
    results = []
    for number in (1, 2, 3):
        desk.all.want(number, embedded, ENGINE)
        results.append(desk.next())
    assert isinstance(results.pop().memory, SegmentError)
    desk.all.others_bytes = store - EACH
    desk.all.want(4, embedded, ENGINE)
    results.append(desk.next())
    free(desk, *results)
