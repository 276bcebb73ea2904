"""A reset and a purge beside another engine, in a store with many keys that are neither engine's."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from kvprefetch.daemon.store.client import Store
from kvprefetch.daemon.store.settings import MooncakeSettings
from kvprefetch.shmring.wire.attach import Reset, ResetDone
from kvprefetch.shmring.wire.codec import send_message
from tests.daemon.cli.test_doctor import STAGED
from tests.daemon.stores import blocks, engine_with
from tests.lab.daemon import Daemon
from tests.lab.store import Store as Cluster
from tests.support.command import kvprefetchd
from tests.support.fake_engine import FakeEngine, answer

Serve = Callable[..., Daemon]
FOREIGN = "u7@Meta-Llama-3.1-70B-Instruct@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@fp:0123456789abcdef0123456789abcdef@"
# The time of one question to the master, so short that a walk over all keys would exceed it.
SCALED = ("--rpc-timeout-ms", "300")
KEYS = 100_000

pytestmark = pytest.mark.store


def fill(config: Path, count: int) -> None:
    """Store this many small values of another model."""
    store = Store(MooncakeSettings.from_file(config), structlog.get_logger())
    store.open()
    buffer = ctypes.create_string_buffer(64)
    address = ctypes.addressof(buffer)
    store.register(address, 64)
    for start in range(0, count, 1000):
        keys = [FOREIGN + hashlib.sha256(b"%d" % i).hexdigest() for i in range(start, start + 1000)]
        results = store.put_from(keys, [address] * 1000, [64] * 1000)
        assert {each.value for each in results} == {"ok"}
    store.close()


@contextlib.contextmanager
def loading(engine: FakeEngine, values: dict[bytes, bytes]) -> Iterator[list[tuple[bool, float]]]:
    """Load an engine's blocks one by one in a thread; yield which were hits and how long each took, as it grows."""
    found, stop = list[tuple[bool, float]](), threading.Event()

    def run() -> None:
        for digest, value in itertools.cycle(values.items()):
            began = time.monotonic()
            found.append((engine.load([digest]) == [value], time.monotonic() - began))
            if stop.wait(0.005):
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join(30)


def p99_s(found: list[tuple[bool, float]]) -> float:
    return statistics.quantiles([took for _, took in found], n=100)[98]


@pytest.mark.stress
def test_resets_and_a_purge_in_a_large_store_cost_another_engine_nothing(serve: Serve) -> None:
    """Under `stress`, as to fill such a store takes most of a minute."""
    with Cluster(memory="2 GB") as cluster:
        fill(cluster.config, KEYS)
        daemon = serve(memory=None, mooncake_config=cluster.config, staging="8MiB", extra=SCALED)
        calm, engine = engine_with(daemon, "calm", 50), FakeEngine(daemon.socket, prefix="resets")
        values, confirmed_s = blocks("weights", 20), list[float]()
        with loading(*calm) as before:
            time.sleep(3)
        with loading(*calm) as beside:
            for generation in range(1, 11):
                engine.save(values, reset_generation=generation - 1)
                began = time.monotonic()
                send_message(engine.scheduler, Reset(reset_generation=generation, weights=f"{generation:032x}"))
                assert answer(engine.scheduler, ResetDone).reset_generation == generation
                confirmed_s.append(time.monotonic() - began)
                assert engine.load(list(values)) is None, "no older KV"
                time.sleep(0.3)
        at = ("--socket", daemon.socket, "--master-http", cluster.http)
        with loading(*calm) as purging:
            purged = kvprefetchd("store", "purge", "--prefix", FOREIGN, "--yes", *at)
        assert (purged.returncode, purged.stdout) == (0, f"{KEYS} values removed; {STAGED}\n"), purged.stderr
        assert max(confirmed_s) < 1
        for found in (before, beside, purging):
            assert all(hit for hit, _ in found)
            assert len(found) > 50
        assert p99_s(beside) < 3 * p99_s(before) + 0.2
        assert p99_s(purging) < 3 * p99_s(before) + 0.5
        assert not daemon.records("store.failed")
