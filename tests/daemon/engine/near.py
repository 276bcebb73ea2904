"""What tests of a daemon's device cache share: a daemon on a machine with fake GPUs, and engines with blocks on one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.stores import stored
from tests.lab.daemon import Daemon
from tests.support import fakecuda
from tests.support.auditor import ask_daemon
from tests.support.fake_engine import FakeEngine
from tests.support.fakecuda import UUID

BLOCK = 256 << 10
DEVICE_SLOTS = (4 << 20) // BLOCK
Key = tuple[int, int]
Start = Callable[..., Daemon]


def daemon_with(*extra: str) -> Daemon:
    """With 4 MiB of a GPU for staging."""
    options = ("--device-staging", "4MiB", "--device-margin", "0", "--log-level", "debug", *extra)
    environment = fakecuda.machine().environment
    return Daemon(memory="64MiB", staging="16MiB", extra=options, env=environment)


def engine_at(daemon: Daemon, *, on: str = UUID, **options: Any) -> FakeEngine:
    return FakeEngine(daemon.socket, block_bytes=BLOCK, device=on, **options)


def values_of(name: str, count: int, content: str = "") -> dict[bytes, bytes]:
    digests = [hashlib.sha256(f"{name}-{i}".encode()).digest() for i in range(count)]
    contents = [hashlib.sha256(digest + content.encode()).digest() for digest in digests]
    return {digest: each * (BLOCK // 32) for digest, each in zip(digests, contents, strict=True)}


def save(daemon: Daemon, engine: FakeEngine, values: dict[bytes, bytes]) -> None:
    before = sum(line["stored_blocks"] for line in daemon.records("save.done"))
    engine.save(values)
    stored(daemon, before + len(values))


def on_device(engine: FakeEngine, key: Key) -> int:
    return sum(slot >= engine.layout.slot_count for slot in engine.slots(key))


def near(daemon: Daemon, engine: FakeEngine, name: str, count: int) -> tuple[Key, dict[bytes, bytes]]:
    """Save so many blocks and hint a request for them, which is published when this returns."""
    values = values_of(name, count)
    save(daemon, engine, values)
    key = engine.hint(list(values))
    assert engine.settled(key).count == count
    return key, values


def take(engine: FakeEngine, key: Key, values: dict[bytes, bytes]) -> int:
    """Claim, read from where the table says, release; how many blocks came from the device."""
    assert engine.move(key, FlagState.CLAIMED)
    slots = engine.slots(key)
    for rank in range(engine.spec.ranks):
        assert [engine.read(slot, rank) for slot in slots] == list(values.values())
    assert engine.move(key, FlagState.RELEASED)
    engine.done(key, loaded=len(slots))
    return sum(slot >= engine.layout.slot_count for slot in slots)


def numbers(daemon: Daemon) -> dict[str, int | str]:
    return ask_daemon(daemon.socket).engines[0]
