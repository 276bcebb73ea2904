"""The daemon's throughput: hints, keys and bytes a second of one real daemon with one to eight simulated engines.

    python -m benchmarks.daemon [--store private cluster mooncake] [--shape small ranks large] [--engines 1 2 4 8]
                                [--seconds 3] [--fetch-threads 4] [--chunk 4] [--json PATH]

Each engine attaches over the control socket to its own shared memory, keeps three hints in flight, and claims and
releases each prompt as soon as all of it is staged.  Every block of a hint has to be fetched.  The engines share one
process; daemon, master and storage node have one each.

Stores `private` and `cluster` take no time (instant_store.py), so all that is measured is the daemon: with the embedded
store, and with a cluster, where it checks more.  Store `mooncake` is a real master and a real storage node on loopback.

`us/key` and `us/call` are the daemon's CPU time for each key and each fetch: where its threads run Python alone, their
inverse is what one interpreter lock (GIL) admits, however loaded the machine is.  The columns `loop` to `others` are
cores in use; `others` are processes that have no part in it.  The last column names what is used up.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kvprefetch.shmring.wire.records import FlagState, Outcome
from tests.lab.daemon import Daemon
from tests.lab.process import exit_on_sigterm, scratch
from tests.lab.store import Store
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

STORES = ("private", "cluster", "mooncake")
DIGEST_BYTES = 32
PROMPTS_IN_FLIGHT = 3
STAGED_PROMPTS = 4  # room of an engine's staging, beside the save slots
STORED_PROMPTS = 8  # asked for in turn, so that staging never has the next one
WARM_UP_S = 1.0
STALLED_S = 60.0
FULL = 0.9  # of a core
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Shape:
    """The values of one model: each block has one for each rank."""

    ranks: int
    value_bytes: int
    blocks: int  # of a prompt

    @property
    def block_bytes(self) -> int:
        return self.ranks * self.value_bytes

    @property
    def keys(self) -> int:
        return self.ranks * self.blocks

    @property
    def prompt_bytes(self) -> int:
        return self.blocks * self.block_bytes

    def __str__(self) -> str:
        ranks = f"{self.ranks} x " if self.ranks > 1 else ""
        return f"{ranks}{self.value_bytes >> 10} KiB"


SHAPES = {
    "small": Shape(1, 64 << 10, 256),
    "ranks": Shape(8, 640 << 10, 16),
    "large": Shape(1, 2 << 20, 32),
}


@dataclass
class Result:
    """One setting's figures. `cores` in use: of the daemon's loop and its other threads, and of the processes."""

    store: str
    shape: str
    engines: int
    hints_s: float
    keys_s: float
    gb_s: float
    us_key: float
    us_call: float
    cores: dict[str, float]
    used_up: str = ""

    def judge(self, memory_gb_s: float) -> None:
        """Name what is used up."""
        cores = self.cores
        if self.store != "mooncake" and cores["loop"] + cores["threads"] > FULL:
            self.used_up = "GIL"
        elif cores["loop"] > FULL:
            self.used_up = "loop"
        elif cores["master"] > FULL:
            self.used_up = "master"
        elif self.store == "mooncake" and self.gb_s > FULL * memory_gb_s:
            self.used_up = "memory"
        elif sum(cores.values()) > FULL * len(os.sched_getaffinity(0)):
            self.used_up = "all cores"
        else:
            self.used_up = "none"


class Prompts:
    """One engine's prompts. With `stored` hashes they come in turn, otherwise each is new."""

    def __init__(self, engine: FakeEngine, shape: Shape, stored: list[list[bytes]], offset: int) -> None:
        self._engine, self._shape, self._stored, self._next = engine, shape, stored, offset
        self._flight: deque[tuple[int, int]] = deque()
        self.done = 0

    def turn(self) -> bool:
        """Take a prompt that is staged, and hint the next; False if there was nothing to do."""
        if len(self._flight) < PROMPTS_IN_FLIGHT:
            self._hint()
            return True
        flag = self._engine.flag(self._flight[0])
        if flag.state != FlagState.READY:
            return False
        if flag.count != self._shape.blocks:
            raise SystemExit(f"a prompt was not staged: blocks={flag.count} expected={self._shape.blocks}")
        key = self._flight.popleft()
        assert self._engine.move(key, FlagState.CLAIMED)
        assert self._engine.move(key, FlagState.RELEASED)
        self._engine.done(key, Outcome.LOADED, flag.count)
        self.done += 1
        return True

    def _hint(self) -> None:
        shape, engine = self._shape, self._engine
        self._next += 1
        if self._stored:
            digests = self._stored[self._next % len(self._stored)]
        else:
            digests = [os.urandom(DIGEST_BYTES) for _ in range(shape.blocks)]
        self._flight.append(engine.hint(digests, name=f"cmpl-{self._next}"))


class Cores:
    """Seconds of CPU of the processes that take part, since the start."""

    def __init__(self, daemon: Daemon, store: Store | None) -> None:
        self._daemon = daemon.pid
        self._master, self._nodes = (store.master_pid, store.node_pids) if store is not None else (0, [])

    def read(self) -> dict[str, float]:
        daemon, loop = _cpu_s(f"{self._daemon}"), _cpu_s(f"{self._daemon}/task/{self._daemon}")
        used = {
            "loop": loop,
            "threads": daemon - loop,
            "engine": _cpu_s("self"),
            "master": _cpu_s(f"{self._master}") if self._master else 0.0,
            "node": sum(_cpu_s(f"{pid}") for pid in self._nodes),
        }
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
        return used | {"others": _TICK_S * (user + nice + system + sum(interrupts)) - sum(used.values())}


def _cpu_s(of: str) -> float:
    fields = Path(f"/proc/{of}/stat").read_text().rpartition(")")[2].split()
    return _TICK_S * (int(fields[11]) + int(fields[12]))


def memory_gb_s() -> float:
    """Return the median speed of one core's copies of 64 MiB."""
    size, speeds = 64 << 20, []
    source, target = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)
    ctypes.memset(source, 1, size)
    for _ in range(9):
        began = time.perf_counter()
        ctypes.memmove(target, source, size)
        speeds.append(size / (time.perf_counter() - began) / 1e9)
    return statistics.median(speeds)


def attach(daemon: Daemon, shape: Shape, number: int) -> FakeEngine:
    """Attach an engine, its staging full of ones."""
    engine = FakeEngine(
        daemon.socket,
        engine_id=f"engine-{number}",
        ranks=shape.ranks,
        block_bytes=shape.value_bytes,
        max_blocks=shape.blocks,
    )
    for segment in engine.staging:
        address = ctypes.addressof(ctypes.c_char.from_buffer(segment.buffer))
        ctypes.memset(address, 1, segment.size_bytes)
    return engine


def save(daemon: Daemon, engine: FakeEngine, shape: Shape) -> list[list[bytes]]:
    """Store some prompts; return the digests of each."""
    value, stored = b"\1" * shape.value_bytes, []
    for number in range(STORED_PROMPTS):
        digests = [os.urandom(DIGEST_BYTES) for _ in range(shape.blocks)]
        stored.append(digests)
        most = max(1, shape.blocks // 4)
        for start in range(0, shape.blocks, most):
            part = digests[start : start + most]
            engine.save(dict.fromkeys(part, value), save_id=number)
    count = STORED_PROMPTS * shape.blocks
    eventually(lambda: sum(line["stored_blocks"] for line in daemon.records("save.done")) >= count, 60, "the saves")
    return stored


@contextlib.contextmanager
def started(store: str, shape: Shape, fetch_threads: int, chunk: int) -> Iterator[tuple[Daemon, Store | None]]:
    """Start a daemon on this store."""
    save_share = 1.5 / (STAGED_PROMPTS + 2)
    extra = ("--fetch-threads", f"{fetch_threads}", "--chunk", f"{chunk}", "--save-share", f"{save_share}")
    staging = f"{(STAGED_PROMPTS + 2) * shape.prompt_bytes}"
    if store == "mooncake":
        memory = f"{2 * STORED_PROMPTS * shape.prompt_bytes >> 20} MB"
        with (
            Store(memory=memory) as cluster,
            Daemon(mooncake_config=cluster.config, staging=staging, extra=extra) as daemon,
        ):
            yield daemon, cluster
        return
    folder = scratch("instant")
    config = folder / "mooncake.json"
    settings = {"master_server_address": "192.0.2.1:1", "protocol": "tcp", "mode": "standalone-store"}
    config.write_text(json.dumps({**settings, "metadata_server": "P2PHANDSHAKE", "global_segment_size": 0}))
    daemon = Daemon(mooncake_config=config, staging=staging, extra=extra)
    at = daemon.argv.index("kvprefetch.daemon")
    daemon.argv[at : at + 1] = ["benchmarks.instant_store", store, str(shape.value_bytes)]
    try:
        with daemon:
            yield daemon, None
    finally:
        shutil.rmtree(folder)


def drive(prompts: list[Prompts], seconds: float) -> int:
    """Keep all engines busy for a while, and until a prompt is staged; return how many were."""
    before, began = sum(each.done for each in prompts), time.monotonic()
    done = 0
    while (lasted := time.monotonic() - began) < seconds or not done:
        if lasted > seconds + STALLED_S:
            raise SystemExit(f"no prompt was staged in {lasted:.0f} s")
        if sum(each.turn() for each in prompts) == 0:
            time.sleep(50e-6)
        done = sum(each.done for each in prompts) - before
    return done


def measure(prompts: list[Prompts], cores: Cores, setting: tuple[str, Shape, int], seconds: float) -> Result:
    """Return the figures of a store, a shape and a chunk."""
    store, shape, chunk = setting
    drive(prompts, WARM_UP_S)
    before, began = cores.read(), time.monotonic()
    done = drive(prompts, seconds)
    lasted, after = time.monotonic() - began, cores.read()
    hints_s = done / lasted
    busy = {name: (after[name] - before[name]) / lasted for name in after}
    daemon_us = (busy["loop"] + busy["threads"]) / hints_s * 1e6
    calls = -(-shape.blocks // max(1, chunk // shape.block_bytes))
    rates = hints_s, hints_s * shape.keys, hints_s * shape.prompt_bytes / 1e9
    costs = daemon_us / shape.keys, daemon_us / calls
    return Result(store, str(shape), len(prompts), *rates, *costs, busy)


HEADER = (
    f"{'store':9} {'values':12} {'engines':>7} {'hints/s':>8} {'keys/s':>8} {'GB/s':>6} {'us/key':>7} {'us/call':>7}   "
    f"{'loop':>7} {'threads':>7} {'engine':>7} {'master':>7} {'node':>7} {'others':>7}  used up"
)


def line(each: Result) -> str:
    return (
        f"{each.store:9} {each.shape:12} {each.engines:7} {each.hints_s:8.0f} {each.keys_s:8.0f} {each.gb_s:6.1f} "
        f"{each.us_key:7.1f} {each.us_call:7.0f}   {' '.join(f'{cores:7.2f}' for cores in each.cores.values())}"
        f"  {each.used_up}"
    )


def run(store: str, shape: Shape, arguments: argparse.Namespace) -> Iterator[Result]:
    """Yield the figures of this store and shape, with more and more engines."""
    chunk, engines, prompts, stored = arguments.chunk << 20, list[FakeEngine](), list[Prompts](), list[list[bytes]]()
    with started(store, shape, arguments.fetch_threads, chunk) as (daemon, cluster):
        try:
            for count in sorted(arguments.engines):
                while len(engines) < count:
                    engines.append(attach(daemon, shape, len(engines)))
                    if store == "mooncake" and not stored:
                        stored = save(daemon, engines[0], shape)
                    prompts.append(Prompts(engines[-1], shape, stored, 3 * len(prompts)))
                yield measure(prompts, Cores(daemon, cluster), (store, shape, chunk), arguments.seconds)
        finally:
            for engine in engines:
                engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", nargs="+", choices=STORES, default=list(STORES))
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each setting")
    parser.add_argument("--fetch-threads", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=4, help="MiB of a store call")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    exit_on_sigterm()
    memory, results = memory_gb_s(), list[Result]()
    print(f"{len(os.sched_getaffinity(0))} cores, one copies {memory:.1f} GB/s; {arguments.chunk} MiB a store call")
    print(HEADER)
    for store in arguments.store:
        for name in arguments.shape:
            for result in run(store, SHAPES[name], arguments):
                result.judge(memory)
                results.append(result)
                print(line(result), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(each) for each in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
