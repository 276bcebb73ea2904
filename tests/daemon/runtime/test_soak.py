"""A hundred thousand requests with aborts, saves, sessions, resets and new attachments: memory and descriptors stay."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.attach import Reset, ResetDone
from kvprefetch.shmring.wire.codec import send_message
from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.stores import blocks
from tests.lab.daemon import Daemon
from tests.support.auditor import Auditor
from tests.support.engine_side import Key
from tests.support.fake_engine import FakeEngine, answer
from tests.support.waiting import eventually

WARM_UP, RESET_EVERY, ATTACH_EVERY, TOGETHER = 0.2, 4_000, 10_000, 16
PROMPTS, LENGTH = 40, 4


class Soaked:
    """An engine with some stored prompts, which it asks for among others."""

    def __init__(self, daemon: Daemon, name: str, seed: int) -> None:
        self._daemon, self._name, self._random = daemon, name, random.Random(seed)
        self._generation = self.served = self.hits = 0
        self.attach()

    def attach(self) -> None:
        self._engine = FakeEngine(self._daemon.socket, engine_id=self._name, prefix=self._name)
        self._generation = 0
        self._save()

    def _save(self) -> None:
        self._prompts = [blocks(f"{self._name} {number}", LENGTH) for number in range(PROMPTS)]
        for number, prompt in enumerate(self._prompts):
            self._engine.save(prompt, reset_generation=self._generation, save_id=number + 1)
        eventually(lambda: self._engine.load(list(self._prompts[-1])), what="the save")

    def again(self) -> None:
        self._engine.close()
        self.attach()

    def reset(self) -> None:
        self._generation += 1
        message = Reset(reset_generation=self._generation, weights=f"{self._random.getrandbits(128):032x}")
        send_message(self._engine.scheduler, message)
        while answer(self._engine.scheduler, ResetDone).reset_generation != self._generation:
            pass
        self._save()

    def serve(self) -> None:
        """Serve some requests at a time; a fifth is aborted, whatever has become of it."""
        asked: list[tuple[Key, dict[bytes, bytes] | None]] = []
        for _ in range(TOGETHER):
            self.served += 1
            known = self._random.choice(self._prompts) if self._random.random() < 0.7 else None
            digests = list(known) if known else [os.urandom(32) for _ in range(LENGTH)]
            session = hashlib.sha256(bytes([self._random.randrange(50)])).digest()[: len(records.NO_SESSION)]
            asked.append((self._engine.hint(digests, name=f"{self._name}-{self.served}", session=session), known))
        for key, known in asked:
            if self._random.random() < 0.2:
                eventually(lambda key=key: self._engine.move(key, FlagState.CANCELLED))  # type: ignore[misc]
                self._engine.done(key, records.Outcome.ABORTED)
                continue
            flag = self._engine.settled(key)
            if not flag.count:
                self._engine.cancel(key, records.Outcome.MISS)
                continue
            assert known is not None, "a hit that nobody stored"
            assert self._engine.move(key, FlagState.CLAIMED)
            values = [self._engine.read(slot) for slot in self._engine.slots(key)]
            assert values == list(known.values())[: len(values)]
            assert self._engine.move(key, FlagState.RELEASED)
            self._engine.done(key, loaded=flag.count)
            self.hits += 1


def held(pid: int) -> tuple[int, int, int]:
    """Return a process's private memory (KiB), descriptors and threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


@pytest.mark.parametrize("requests", [4_000, pytest.param(100_000, marks=pytest.mark.stress)])
@pytest.mark.timeout(1800)
def test_memory_and_descriptors_stay(serve: Callable[..., Daemon], auditor: Auditor, requests: int) -> None:
    daemon = serve(extra=("--sessions", "on"))
    engines = [Soaked(daemon, f"soak{number}", seed=number) for number in range(2)]
    after: tuple[int, int, int] | None = None
    resets = attachments = served = 0
    while served < requests:
        for engine in engines:
            engine.serve()
        served = sum(engine.served for engine in engines)
        if served // RESET_EVERY > resets:
            resets += 1
            engines[resets % 2].reset()
        if served // ATTACH_EVERY > attachments:
            attachments += 1
            engines[attachments % 2].again()
        if after is None and served > WARM_UP * requests:
            auditor.assert_idle(daemon.pid, daemon.socket)
            after = held(daemon.pid)
    auditor.assert_idle(daemon.pid, daemon.socket)
    assert after is not None
    memory, descriptors, threads = held(daemon.pid)
    print(f"{served} requests: {after} then, {(memory, descriptors, threads)} at the end")
    assert memory < 1.1 * after[0] + (16 << 10)
    assert (descriptors, threads) == after[1:]
    assert sum(engine.hits for engine in engines) > 0.3 * served
