"""Requests that are slow for eight reasons: `kvprefetchd explain` and `top` alone name each reason.

The daemon, the store and the link are real, and the engine's scheduler is played;
`tests/e2e/test_waiting.py` has full places with a real engine.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvprefetch.shmring.wire.records import Done, FlagState, Outcome, RecordKind, encode_done
from tests.daemon.stores import blocks, stored
from tests.lab import link
from tests.lab.daemon import Daemon
from tests.lab.process import frozen
from tests.lab.store import Store
from tests.support.auditor import ask_daemon
from tests.support.command import kvprefetchd
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually, poll

pytestmark = pytest.mark.store
MB = 1 << 20


def wait_for(
    engine: FakeEngine,
    digests: list[bytes],
    name: str,
    *,
    asks: bool = True,
    patience_s: float = 30.0,
    meanwhile: Callable[[], None] = lambda: None,
    step_s: float = 0.0,
) -> None:
    """Play a scheduler: hint, ask at once, wait, and load or recompute. `step_s`: how long its step goes on after."""
    asked = time.monotonic_ns()
    key = engine.hint(digests, name=name)
    if asks:
        engine.ask(key)
    meanwhile()
    poll(lambda: engine.flag(key).state != FlagState.HINTED, patience_s, pause_s=0.001)
    time.sleep(step_s)
    flag, now = engine.flag(key), time.monotonic_ns()
    loads = flag.state == FlagState.READY and flag.count > 0
    if loads:
        assert engine.move(key, FlagState.CLAIMED)
    assert engine.move(key, FlagState.RELEASED if loads else FlagState.CANCELLED)
    outcome = Outcome.LOADED if loads else Outcome.MISS if flag.state == FlagState.READY else Outcome.RECOMPUTED
    times = (asked if asks else 0, now - asked if asks else 0, now if loads else 0, now if loads else 0)
    engine.push(RecordKind.DONE, encode_done(Done(*key, outcome, 0, flag.count if loads else 0, *times)))
    engine.flags.give_back(key[0])


def told(daemon: Daemon, name: str, *words: str) -> str:
    """Return the cause that `explain` names for the request with this in its id, once `top` has these words."""
    eventually(lambda: [e for e in daemon.records("request.done") if name in e["request_id"]], what="its line")
    explained = kvprefetchd("explain", name, given="\n".join(daemon.lines))
    assert explained.returncode == 0, explained

    def top() -> bool:
        shown = kvprefetchd("top", "--once", "--interval", "0.1", "--socket", daemon.socket)
        assert shown.returncode == 0, shown
        return all(word in shown.stdout for word in words)

    eventually(top, what=f"{words} in top")  # its picture is of the last second
    return next(line for line in explained.stdout.splitlines() if line.startswith("Cause: "))


def save(engine: FakeEngine, values: dict[bytes, bytes]) -> None:
    """Save in parts that fit the save slots, until all are with the daemon."""
    left = dict(values)
    while left:
        room = eventually(engine.credits.available, 60, "credits")
        part = dict(list(left.items())[:room])
        engine.save(part)
        left = {digest: value for digest, value in left.items() if digest not in part}


def saved_blocks(line: dict[str, Any]) -> int:
    return int(line["stored_blocks"]) + int(line["failed_blocks"])


def large(name: str, count: int) -> dict[bytes, bytes]:
    """Blocks of 1 MiB."""
    return {digest: value * (MB // len(value)) for digest, value in blocks(name, count).items()}


# --- the store and the link ------------------------------------------------------------------------------------------


@pytest.mark.stress  # a quarter of a minute: what is usual must be known first
def test_a_slow_link() -> None:
    if why_not := link.available():
        pytest.skip(why_not)
    with (
        link.LimitedLink() as wire,
        Store(memory="512 MB", link=wire) as store,
        Daemon(mooncake_config=store.config, staging="48MiB") as daemon,
    ):
        engine = FakeEngine(daemon.socket, block_bytes=MB)
        prompts = [large(f"link-{number}", 8) for number in range(8)]
        for prompt in prompts:
            save(engine, prompt)
        stored(daemon, 64)
        names = [list(prompt) for prompt in prompts]
        turns, until = itertools.count(), time.monotonic() + 5.0
        # Prompts that do not fit staging together, until the daemon knows how fast the store usually is.
        while time.monotonic() < until or "hour" not in ask_daemon(daemon.socket).rates.get("memory", {}):
            assert engine.load(names[next(turns) % 8]) is not None
        wire.limit(20)
        wait_for(engine, names[next(turns) % 8], "on-a-slow-link")
        cause = told(daemon, "on-a-slow-link", "slow link", "fetches from memory: now ")
        assert cause.startswith("Cause: the link was slow: the store gave "), cause
        assert "; its last hour " in cause
        engine.close()


def test_a_frozen_master_and_a_dead_storage_node() -> None:
    with (
        Store(memory="64 MB") as store,
        Daemon(mooncake_config=store.config, staging="1MiB", extra=("--rpc-timeout-ms", "500")) as daemon,
    ):
        engine = FakeEngine(daemon.socket)
        values = blocks("cluster", 16)
        save(engine, values)
        stored(daemon, 16)
        first, second = list(values)[:8], list(values)[8:]
        with frozen(store.master_pid):
            wait_for(engine, first, "master-frozen")
        cause = told(daemon, "master-frozen", "slow master")
        assert cause.startswith("Cause: the store's master was slow or away: the look-up ended after "), cause
        eventually(lambda: engine.load(first), 30, "the master, and the node")
        os.kill(store.node_pid, signal.SIGKILL)
        wait_for(engine, second, "node-dead")
        cause = told(daemon, "node-dead", "storage node")
        assert re.fullmatch(r"Cause: a storage node did not deliver: 127\.0\.0\.1:\d+\.", cause), cause
        engine.close()


# --- staging, the engine, and what the store does not have ------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(memory="64MiB", staging="1MiB") as daemon:
        yield daemon


def test_a_small_staging(daemon: Daemon) -> None:
    engine = FakeEngine(daemon.socket, prefix="small")
    [numbers] = ask_daemon(daemon.socket).engines
    slots = int(numbers["slots"])
    values = blocks("small", 2 * slots)
    save(engine, values)
    stored(daemon, 2 * slots)
    first, second = list(values)[:slots], list(values)[slots:]
    holder = engine.hint(first, name="holder")
    assert engine.settled(holder).count == slots
    assert engine.move(holder, FlagState.CLAIMED)

    def hold() -> None:
        time.sleep(0.7)
        assert engine.move(holder, FlagState.RELEASED)
        engine.done(holder, loaded=slots)

    wait_for(engine, second, "no-room", meanwhile=hold)
    cause = told(daemon, "no-room", "staging full")
    assert cause.startswith("Cause: staging was too small: its next fetch waited "), cause
    engine.close()


def test_full_places_and_a_long_prefill(daemon: Daemon) -> None:
    engine = FakeEngine(daemon.socket, prefix="busy")
    values = blocks("busy", 8)
    engine.save(values)
    eventually(lambda: engine.load(list(values)), what="the save")
    wait_for(engine, list(values), "queued", asks=False, step_s=0.5)
    cause = told(daemon, "queued", "places full")
    assert re.fullmatch(r"Cause: the engine's places or tokens went to other requests for [5-9]\d\d ms\.", cause), cause
    wait_for(engine, list(values), "behind-a-step", step_s=0.5)
    cause = told(daemon, "behind-a-step", "long step")
    assert cause.startswith("Cause: the engine's step of other requests, a long prefill, went on for "), cause
    engine.close()


def test_a_cold_store(daemon: Daemon) -> None:
    engine = FakeEngine(daemon.socket, prefix="cold")
    wait_for(engine, list(blocks("cold", 4)), "cold")
    assert told(daemon, "cold", "absent") == "Cause: 4 blocks of it were nowhere."
    engine.close()
