"""Loads and saves of one engine at a time, without pause: what a link carries of each, and how long loads take."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from kvprefetch.shmring.wire import records
from kvprefetch.shmring.wire.records import FlagState, RecordKind
from tests.lab.daemon import Daemon
from tests.support.auditor import ask_daemon
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

RECORD_BLOCKS = 512  # of one save, about a step of an engine


@dataclass
class Figures:
    """Seconds of each load that ended, and the rates."""

    load_s: list[float] = field(default_factory=list)
    missed: int = 0
    load_rate: float = 0.0
    """bytes per second"""
    save_rate: float = 0.0


class Traffic:
    """An engine whose `prompts`, of `blocks` each, lie in the store, and together do not fit its staging."""

    def __init__(self, daemon: Daemon, *, block_bytes: int, blocks: int, prompts: int) -> None:
        self._daemon, self._block_bytes, self._blocks = daemon, block_bytes, blocks
        self._engine = FakeEngine(daemon.socket, block_bytes=block_bytes, max_blocks=max(512, blocks))
        staging = self._engine.staging[0].buffer
        staging[:] = b"\x5a" * len(staging)  # a page of zeros would count as lost by a disk
        self._name, self._count = uuid.uuid4().bytes, 0
        self._prompts = [self._new(blocks) for _ in range(prompts)]
        self._at = 0
        for prompt in self._prompts:
            left = prompt
            while left:
                taken = eventually(lambda: self._engine.credits.available(), what="credits")
                self._push(left[: min(taken, RECORD_BLOCKS)])
                left = left[min(taken, RECORD_BLOCKS) :]
        eventually(lambda: self._saved() >= blocks * prompts, 120, "the prompts in the store")

    def _new(self, count: int) -> list[bytes]:
        self._count += count
        return [self._name + (self._count - i).to_bytes(16, "big") for i in range(count)]

    def _push(self, digests: list[bytes]) -> None:
        slots = self._engine.credits.take(len(digests))
        self._engine.push(
            RecordKind.SAVED,
            records.encode_saved(records.Saved(1, 0, False, slots, [each + b"\0" for each in digests])),
        )

    def _saved(self) -> int:
        [status] = ask_daemon(self._daemon.socket).engines
        return int(status["saved_blocks"])

    def together(self, count: int) -> list[float]:
        """Load so many prompts that arrive together; return the seconds until any block was there, and each prompt."""
        began, ends, flying = time.monotonic(), list[float](), {self._next_hint() for _ in range(count)}
        while flying:
            if not ends and any(self._engine.flag(key).count for key in flying):
                ends.append(time.monotonic() - began)
            for key in [*flying]:
                if (loaded := self._load(key)) is not None:
                    assert loaded == self._blocks
                    ends.append(time.monotonic() - began)
                    flying.remove(key)
            time.sleep(0.0003)
        return ends

    def stopped(self) -> tuple[int, int]:
        """Stop the fetch of a prompt as its first blocks show; return how many these were, and how many came in all."""
        key, first, came = self._next_hint(), 0, None
        while came is None:
            if not first and (first := self._engine.flag(key).count):
                self._engine.ask(key, stop=True)
            came = self._load(key)
            time.sleep(0.0003)
        return first, came

    def _next_hint(self) -> tuple[int, int]:
        self._at = (self._at + 1) % len(self._prompts)
        return self._engine.hint(self._prompts[self._at])

    def _load(self, key: tuple[int, int]) -> int | None:
        """Take and release a prompt's blocks when they are ready, and return their number; None: not yet."""
        flag = self._engine.flag(key)
        if flag.state != FlagState.READY or not self._engine.move(key, FlagState.CLAIMED):
            return None
        assert self._engine.move(key, FlagState.RELEASED)
        self._engine.done(key, loaded=flag.count)
        return flag.count

    def run(self, seconds: float, *, outstanding: int, saving: bool) -> Figures:
        """Keep so many loads, and saves if wanted, going for so long."""
        figures, flying = Figures(), dict[tuple[int, int], float]()
        saved, began = self._saved(), time.monotonic()
        while (now := time.monotonic()) - began < seconds or flying:
            over = now - began >= seconds
            while len(flying) < outstanding and not over:
                flying[self._next_hint()] = time.monotonic()
            for key, since in list(flying.items()):
                if (loaded := self._load(key)) is not None:
                    if loaded == self._blocks:
                        figures.load_s.append(time.monotonic() - since)
                    else:
                        figures.missed += 1
                    del flying[key]
            if saving and not over and (room := self._engine.credits.available()):
                self._push(self._new(min(room, RECORD_BLOCKS)))
            time.sleep(0.0003)
        took = time.monotonic() - began
        figures.save_rate = (self._saved() - saved) * self._block_bytes / took
        figures.load_rate = len(figures.load_s) * self._blocks * self._block_bytes / took
        if saving:
            eventually(lambda: self._engine.credits.available() == self._slots(), 60, "the saves")
        return figures

    def _slots(self) -> int:
        [status] = ask_daemon(self._daemon.socket).engines
        return int(status["save_slots"])
