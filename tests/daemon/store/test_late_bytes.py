"""Transfers that Mooncake gives up and that go on: their bytes arrive late, and never in memory in use again.

A real cluster of two storage nodes; SIGSTOP holds one up. The gets are Mooncake's own: a read that sleeps gives nothing
up (test_sleeping_reads_real.py). Mooncake gives up after 60 s of CLOCK_REALTIME: the test steps that clock of the
daemon's process (tests/support/clock_shift.c).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.stores import blocks
from tests.lab import control
from tests.lab.daemon import Daemon
from tests.lab.process import frozen
from tests.lab.store import Store
from tests.support.auditor import ask_daemon
from tests.support.fake_engine import BLOCK_BYTES, FakeEngine
from tests.support.waiting import eventually

SLOTS = 32
SOURCE = Path(__file__).parents[2] / "support" / "clock_shift.c"
Key = tuple[int, int]


def blocking(cluster: Store, folder: Path) -> Path:
    """Return a file that names this cluster so that reads do not sleep: without an RDMA device this is TCP too."""
    config = folder / "blocking.json"
    config.write_text(cluster.config.read_text().replace('"tcp"', '"rdma"'))
    return config


@pytest.fixture
def cluster() -> Iterator[Store]:
    with Store(memory="256 MB", nodes=2) as store:
        yield store


class Clock:
    """CLOCK_REALTIME of a daemon that runs with `env`."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("cc") is None:
            pytest.skip("no C compiler")
        library, self._file = folder / "clock_shift.so", folder / "shift"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        self._ns = 0
        self._file.write_bytes(bytes(8))
        self.env = {"LD_PRELOAD": str(library), "SHIFT_FILE": str(self._file)}

    def step_until(self, condition: Callable[[], object], what: str) -> None:
        """Step by 61 s, and again while a transfer began only after the last step, until this is so."""
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come"
            self._ns += 61 * 10**9
            with self._file.open("r+b") as file:  # in place: it is mapped
                file.write(self._ns.to_bytes(8, "little"))
            time.sleep(0.5)


def put(cluster: Store, node: int, values: dict[bytes, bytes], prefix: str = "model") -> None:
    named = {f"u{os.getuid()}@{prefix}@tp_rank:0@{digest.hex()}": value for digest, value in values.items()}
    control.put(cluster.config, named, cluster.segments[node])


def numbers(daemon: Daemon, engine: FakeEngine) -> dict[str, int]:
    [found] = [each for each in ask_daemon(daemon.socket).engines if each["engine"] == engine.spec.engine_id]
    return {name: value for name, value in found.items() if isinstance(value, int)}


def running(daemon: Daemon, kind: str) -> bool:
    return kind in ask_daemon(daemon.socket).calls


def claim(engine: FakeEngine, digests: Sequence[bytes]) -> tuple[Key, list[int]]:
    """Have these blocks staged, claim them, and return their slots."""
    key = engine.hint(list(digests))
    assert engine.settled(key).count == len(digests)
    assert engine.move(key, FlagState.CLAIMED)
    return key, list(engine.table.read_slots(key[0], 0, len(digests)))


def holds(engine: FakeEngine, values: dict[bytes, bytes]) -> bool:
    """Whether each of these values lies in some slot."""
    memory = engine.staging[0].buffer
    there = {bytes(memory[at : at + engine.spec.block_bytes]) for at in range(0, len(memory), engine.spec.block_bytes)}
    return set(values.values()) <= there


def test_bytes_that_come_late_never_come_into_a_slot_that_is_used_again(
    serve: Callable[..., Daemon], cluster: Store, tmp_path: Path
) -> None:
    """Of one engine four slots are lost, and it goes on with the others; of another half, and it attaches anew."""
    clock = Clock(tmp_path)
    config = blocking(cluster, tmp_path)
    daemon = serve(memory=None, mooncake_config=config, staging=str(SLOTS * BLOCK_BYTES), env=clock.env)
    engine = FakeEngine(daemon.socket, engine_id="some", prefix="some")
    worn = FakeEngine(daemon.socket, engine_id="worn", prefix="worn", saves=False)
    fetch_slots = numbers(daemon, engine)["slots"]
    late, fine, half = blocks("late", 4), blocks("fine", fetch_slots), blocks("half", SLOTS // 2)
    warm = blocks("warm", 1)
    for prefix, values in (("some", {**warm, **late}), ("worn", {**warm, **half})):
        put(cluster, 0, values, prefix)
        put(cluster, 1, fine, prefix)
    for each in (engine, worn):
        assert each.load(list(warm)) == list(warm.values()), "connected"
    with frozen(cluster.node_pid):
        keys = [engine.hint(list(late)), worn.hint(list(half))]
        eventually(
            lambda: numbers(daemon, engine)["orders"] + numbers(daemon, worn)["orders"] == 2, what="both fetches"
        )
        # The second begins a second after the first, and has to be in its transfer when the clock steps: were it not,
        # it would find the node put aside, and lose nothing.
        eventually(lambda: ask_daemon(daemon.socket).calls.get("fetch", 0.0) > 2.0, what="both transfers")
        clock.step_until(lambda: engine.flag(keys[0]).state != FlagState.HINTED, "the end of the fetch")
        assert engine.settled(keys[0]).count == 0
        engine.cancel(keys[0])
        eventually(lambda: numbers(daemon, engine)["slots_quarantined"] == 4, what="the gauge")
        lost = eventually(lambda: daemon.records("slots.quarantined"), what="the log's line")
        assert {line["call"] for line in lost} == {"fetch"}
        few = list(fine)[: fetch_slots - 4]
        _, slots = claim(engine, few)
        assert len(set(slots)) == fetch_slots - 4, "all that are left"
        clock.step_until(lambda: daemon.records("engine.worn"), "the end of the other fetch")
        detached = eventually(lambda: daemon.records("engine.detached"), what="the end of the epoch")
        assert [line["kept_bytes"] for line in detached] == [SLOTS * BLOCK_BYTES]
        assert not holds(engine, late)
        anew = FakeEngine(daemon.socket, engine_id="worn", prefix="worn", saves=False)
        key, whole = claim(anew, list(fine))
    eventually(lambda: holds(engine, late) and holds(worn, half), 30, "the late bytes")
    assert [engine.read(slot) for slot in slots] == [fine[digest] for digest in few], "claimed blocks have not changed"
    assert [anew.read(slot) for slot in whole] == list(fine.values())
    assert anew.move(key, FlagState.RELEASED)
    anew.done(key, loaded=len(whole))
    eventually(lambda: anew.load(list(half)) == list(half.values()), 30, "a hit")
    eventually(lambda: daemon.records("owner.back"), what="the line that the node is back")

    with contextlib.ExitStack() as stopped:  # a put: Mooncake chooses its node
        for pid in cluster.node_pids:
            stopped.enter_context(frozen(pid))
        engine.save(blocks("saved", 2))
        eventually(lambda: running(daemon, "save"), what="the put")
        clock.step_until(lambda: numbers(daemon, engine)["save_slots_quarantined"] == 2, "the end of the put")
    assert numbers(daemon, engine)["save_slots_busy"] == 0
    for each in (engine, worn, anew):
        each.close()
    assert daemon.sigterm(30) == 0
