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
from tests.support.descriptors import targets
from tests.support.engine_side import Key
from tests.support.fake_engine import FakeEngine, answer
from tests.support.waiting import eventually

RESET_EVERY, ATTACH_EVERY, TOGETHER = 4_000, 10_000, 16
PROMPTS, LENGTH = 40, 4
SLACK = 8


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
        eventually(self._saved, 60, "the saves", pause_s=0.05)

    def _saved(self) -> bool:
        """Save what is not there: a full store refuses while leases protect all that it has."""
        absent = [prompt for prompt in self._prompts if self._engine.load(list(prompt)) is None]
        for number, prompt in enumerate(absent):
            self._engine.save(prompt, reset_generation=self._generation, save_id=number + 1)
        return not absent

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
            assert self._engine.take(key) == list(known.values())[: flag.count]
            self.hits += 1


def held(pid: int) -> tuple[int, int, int]:
    """Return a process's private memory (KiB), descriptors and threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]), len(targets(pid)), int(status["Threads"])


@pytest.mark.parametrize(
    ("requests", "resets", "memory"),
    [(4_000, 2, "64MiB"), pytest.param(100_000, 40, "16MiB", marks=pytest.mark.stress)],
)
@pytest.mark.timeout(1800)
def test_memory_and_descriptors_stay(
    serve: Callable[..., Daemon], auditor: Auditor, requests: int, resets: int, memory: str
) -> None:
    daemon = serve(memory=memory)
    engines = [Soaked(daemon, f"soak{number}", seed=number) for number in range(2)]
    for engine in resets * engines:  # until the store is full, and as many weights are known as may be
        engine.serve()
        engine.reset()
    auditor.assert_idle(daemon.pid, daemon.socket)
    after = held(daemon.pid)
    done = attachments = served = 0
    while served < requests:
        for engine in engines:
            engine.serve()
        served = sum(engine.served for engine in engines)
        if served // RESET_EVERY > done:
            done += 1
            engines[done % 2].reset()
        if served // ATTACH_EVERY > attachments:
            attachments += 1
            engines[attachments % 2].again()
    auditor.assert_idle(daemon.pid, daemon.socket)
    kib, descriptors, threads = held(daemon.pid)
    print(f"{served} requests: {after} then, {(kib, descriptors, threads)} at the end")
    assert kib < 1.05 * after[0] + (8 << 10)
    assert descriptors <= after[1] + SLACK, "threads of a pool start when they are needed first, with a file each"
    assert threads <= after[2] + SLACK
    assert sum(engine.hits for engine in engines) > 0.3 * served
