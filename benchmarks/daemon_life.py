"""CPU time of a hint's whole life in the daemon, on one thread: what one interpreter lock admits, calculated from it.

    python -m benchmarks.daemon_life [--store private cluster] [--shape small ranks large] [--hints 240]

Ring, epoch, look-up, planner, store calls and flags are the daemon's own; Mooncake's client takes no time
(instant_store.py).  Calls run one after the other where the daemon has threads, so no time goes into changing threads,
and other programs disturb it little: the figure is the lowest tenth of rounds of two hints.  No log is written.  The
last two columns are calculated: the inverse of the time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import time
from collections import deque
from dataclasses import replace
from typing import Any, cast

import structlog

from benchmarks.daemon import SHAPES, STAGED_PROMPTS, Shape
from benchmarks.instant_store import InstantClient
from kvprefetch.daemon.config.model import DaemonConfig
from kvprefetch.daemon.engine.epoch import Epoch
from kvprefetch.daemon.engine.epoch_parts import Services
from kvprefetch.daemon.engine.memory import EngineInfo, EngineMemory
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.store.client import Store
from kvprefetch.daemon.store.settings import MooncakeSettings
from kvprefetch.daemon.telemetry.metrics import Metrics
from kvprefetch.daemon.work.calls import Call
from kvprefetch.daemon.work.pools import Pools
from kvprefetch.shmring.wire.records import FlagState
from tests.support.engine_side import EngineSide, EngineSpec

SETTINGS = MooncakeSettings("P2PHANDSHAKE", "127.0.0.1:1", "tcp", "", 0, "default")


class OneThread(Pools):
    """Runs every call on the caller's thread, when it is told to."""

    def __init__(self) -> None:
        super().__init__(1)
        self.waiting: deque[Call] = deque()
        self.calls = 0

    def start(self, call: Call) -> None:
        call.start()
        self.waiting.append(call)

    def run(self) -> None:
        while self.waiting:
            call = self.waiting.popleft()
            call.finish(call.run())
            self.calls += 1


class Life:
    """An epoch, and the engine's side of it in the same thread."""

    def __init__(self, shape: Shape, *, private: bool) -> None:
        spec = EngineSpec(ranks=shape.ranks, block_bytes=shape.value_bytes, max_blocks=shape.blocks, saves=False)
        workers = [spec.worker(rank) for rank in range(shape.ranks)]
        engine = EngineInfo(spec.engine_id, spec.groups, spec.scheduler(), workers)
        options = {"staging": STAGED_PROMPTS * shape.prompt_bytes, "sessions": "off"}
        config = DaemonConfig.model_validate(options if private else {**options, "mooncake_config": "a cluster's"})
        memory = EngineMemory.create(config, 1, engine)
        for address, length in memory.staging.areas():
            ctypes.memset(address, 1, length)
        log = structlog.get_logger()
        store = Store(replace(SETTINGS, private=private), log)
        store.adopt(cast(Any, InstantClient(shape.value_bytes)))
        self.shape, self.pools, self.engine = shape, OneThread(), EngineSide()
        services = Services(config, store, self.pools, log, Metrics(), time.monotonic_ns)
        self.epoch = Epoch(services, memory, engine)
        self.engine.open(memory.control.buffer)

    def live(self, digests: list[bytes]) -> None:
        """Take one prompt from its hint to its end."""
        key = self.engine.hint(digests)
        while self.engine.flag(key).state != FlagState.READY:
            self.epoch.drain(1 << 62)
            while self.epoch.start_fetch(Lane.MEMORY):
                pass
            self.pools.run()
        assert self.engine.flag(key).count == self.shape.blocks
        assert self.engine.move(key, FlagState.CLAIMED)
        assert self.engine.move(key, FlagState.RELEASED)
        self.engine.done(key, loaded=self.shape.blocks)


def measure(store: str, shape: Shape, hints: int) -> tuple[float, float]:
    """Return seconds of CPU for each hint, and the calls that each takes."""
    life, rounds = Life(shape, private=store == "private"), list[float]()
    prompts = [[os.urandom(32) for _ in range(shape.blocks)] for _ in range(hints)]
    gc.collect()
    gc.disable()
    for first, second in zip(prompts[::2], prompts[1::2], strict=False):
        began = time.thread_time()
        life.live(first)
        life.live(second)
        rounds.append((time.thread_time() - began) / 2)
    gc.enable()
    return sorted(rounds)[len(rounds) // 10], life.pools.calls / len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", nargs="+", choices=("private", "cluster"), default=["private", "cluster"])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--hints", type=int, default=240)
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    print(f"{'store':9} {'values':12} {'us/hint':>8} {'us/key':>8} {'us/call':>8} {'keys/s':>10} {'GB/s':>8}")
    for store in arguments.store:
        for name in arguments.shape:
            shape = SHAPES[name]
            each, calls = measure(store, shape, arguments.hints)
            print(
                f"{store:9} {shape!s:12} {each * 1e6:8.0f} {each / shape.keys * 1e6:8.2f} {each / calls * 1e6:8.0f} "
                f"{shape.keys / each:10.0f} {shape.prompt_bytes / each / 1e9:8.1f}",
                flush=True,
            )
    os._exit(0)  # memory and descriptors go with the process


if __name__ == "__main__":
    main()
