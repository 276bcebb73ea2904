"""Memory of the embedded store that has no pages yet: counted from the kernel's own answers, and kept for the store."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvprefetch.daemon.config.machine import machine_bytes
from kvprefetch.daemon.store.untouched import Untouched
from kvprefetch.shmring.wire.attach import Refused
from tests.daemon.stores import another_client
from tests.lab.daemon import Daemon
from tests.support.fake_engine import FakeEngine, answer
from tests.support.waiting import eventually

MIB = 1 << 20
ALL = f"{machine_bytes() // MIB}MiB"
NEIGHBOURS = 8 * MIB  # that the kernel may merge with an area, such as a thread's stack


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def taken(undo: ExitStack, size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    undo.callback(memory.close)
    return memory


def test_what_has_pages_is_counted_once_it_has_them(undo: ExitStack) -> None:
    before = taken(undo, 256 * MIB)  # of other parts
    account = Untouched(200 * MIB)
    assert account.bytes == 200 * MIB
    memory = taken(undo, 200 * MIB)
    account.opened()
    for touched in (0, 50 * MIB, 130 * MIB, 200 * MIB):
        for at in range(0, touched, mmap.PAGESIZE):
            memory[at] = 1
        account.look()
        assert abs(account.bytes - (200 * MIB - touched)) <= NEIGHBOURS
    assert len(before) == 256 * MIB


def test_memory_that_is_not_found_counts_in_full() -> None:
    account = Untouched(1 << 40)
    account.opened()
    account.look()
    assert account.bytes == 1 << 40


def promised(daemon: Daemon, name: str) -> int:
    """Return how many MiB the daemon keeps for others than engines, as it says to an engine that wants too much."""
    engine = FakeEngine(daemon.socket, attach=False, engine_id=name, block_bytes=MIB)
    error = answer(engine.greet_all()[-1], Refused).error
    engine.close()
    found = re.search(r" promised=(\d+)MiB", error)
    assert found is not None, error
    return int(found[1])


def test_the_memory_that_the_store_will_take_is_promised_to_no_engine(
    serve: Callable[..., Daemon], tmp_path: Path
) -> None:
    """Until values are there: then the machine itself says that it is taken."""
    daemon = serve(staging=ALL, memory="128MiB", extra=("--door", "off"))
    assert promised(daemon, "first") == 128
    values = ctypes.create_string_buffer(64 * MIB)
    at = ctypes.addressof(values)
    with another_client(daemon, tmp_path) as store:
        keys = [f"value-{number}" for number in range(64)]
        store.put_from(keys, [at + number * MIB for number in range(64)], [MIB] * 64)
        names = iter(range(1000))
        eventually(
            lambda: promised(daemon, f"e{next(names)}") <= 128 - 64 + NEIGHBOURS // MIB, what="less", pause_s=0.3
        )
    assert promised(daemon, "last") >= 128 - 64 - NEIGHBOURS // MIB


def test_the_process_of_the_door_is_promised_its_memory(serve: Callable[..., Daemon]) -> None:
    daemon = serve(staging=ALL, memory="64MiB")
    names = iter(range(1000))
    eventually(lambda: promised(daemon, f"e{next(names)}") == 64 + 256, what="the door's part", pause_s=0.3)
