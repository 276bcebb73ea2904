"""Measures the copies of the device cache on this GPU, beside the device's own copies in the same run.

Everything runs on the real parts: connector/worker on a paged cache of a model's shape, host slots pinned and device
slots allocated by connector/copy, promotion's copies by daemon/engine/device.py.  It needs torch, cupy and
numpy, but no vLLM or store.

    python -m benchmarks.cuda [--shape llama-8b] [--blocks 64] [--json PATH]

GB/s are medians of bytes copied per second (1 GB = 10^9 bytes); a copy within the device reads and writes as many.
Each copy within the device takes another set of blocks, so that none is in the L2 cache; the device's own copies do the
same, and record an event behind each copy, too.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import itertools
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.machine import command
from kvprefetch.connector.copy.paged import PagedCache
from kvprefetch.connector.worker.copies import Copy, CudaCopies, TorchStreams, checked
from kvprefetch.daemon.engine.device import DeviceStaging
from kvprefetch.daemon.engine.promoter import COPY_BYTES
from kvprefetch.shmring.errors import DeviceError
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.driver import GRAIN_BYTES
from tests.gpu.side import PinnedCache

# Layers, KV heads of a rank, K and V of a head; blocks of 16 tokens in bfloat16, in the layout LBNHC.
SHAPES = {"llama-8b": (32, 8, 256), "llama-70b-tp8": (80, 1, 256)}
TOKENS = 16
ROUNDS = 15
# Calls between two events, and for how long the device is kept busy meanwhile, so that they are queued when it comes to
# them and the time to launch them does not count.
CALLS = 8
BUSY_CYCLES = 4_000_000
PRODUCTS = 32  # of 4096 x 4096 matrices: about as long as 256 blocks take to come from the host
OUT_OF_CACHE = 4  # times the size of the L2 cache: what copies go over before they come to the same bytes again


class Bench:
    """A rank with a paged cache, `blocks` pinned host slots and `sets` times as many device slots."""

    def __init__(self, shape: str, blocks: int) -> None:
        layers, heads, content = SHAPES[shape]
        self.blocks = blocks
        block = TOKENS * heads * content
        self.bytes = blocks * layers * block * 2
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        self.sets = min(CALLS, max(1, -(-OUT_OF_CACHE * l2_bytes // self.bytes)))
        in_cache = 2 * blocks * self.sets
        raw = torch.randint(0, 256, (layers * in_cache * block * 2,), dtype=torch.uint8, device="cuda:0")
        raw = raw.view(torch.bfloat16)
        strides = (block, content, heads * content, 1)
        self.caches = {
            str(layer): raw.as_strided((in_cache, heads, TOKENS, content), strides, layer * in_cache * block)
            for layer in range(layers)
        }
        self.paged = PagedCache(self.caches, list(self.caches), in_cache)
        self.device = cuda.open_device(cuda.uuid_of(0))
        self.block_bytes = self.paged.block_bytes
        self.map, self.rows = random_slots(blocks, self.block_bytes)
        near = blocks * self.sets
        begun = time.perf_counter()
        self.device_cache = PinnedCache(self.device, self.rows, near)
        while self.device_cache.pinned < blocks:
            assert time.perf_counter() < begun + 60, f"not pinned: slots={self.device_cache.pinned}"
            time.sleep(0.001)
        self.pin_gbps = self.bytes / (time.perf_counter() - begun) / 1e9
        self.streams = TorchStreams(self.paged.device)
        self.copies = CudaCopies(self.paged, self.device, self.streams)
        self.epoch: Any = SimpleNamespace(number=1, rows=self.rows, device_cache=self.device_cache)
        self.scattered = [int(n) for n in np.random.default_rng(0).permutation(in_cache)[:near]]

    def copy(
        self, first_slot: int, *, save: bool = False, beside: bool = False, count: int | None = None, at: int = 0
    ) -> Callable[[], Any]:
        """The copies of the slots from `first_slot` on, as one step does them, with the scattered blocks from `at`."""
        count = self.blocks if count is None else count
        slots = list(range(first_slot, first_slot + count))
        orders = [checked(self.paged, self.epoch, slots, self.scattered[at : at + count], save=save)]
        return lambda: self.copies.run(orders, save=save, beside=beside)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.device_cache.close()


def random_slots(blocks: int, block_bytes: int) -> tuple[mmap.mmap, Any]:
    """Host slots, as they are shared between processes, and an array of them."""
    size = blocks * block_bytes
    memory = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    rows = np.frombuffer(memory, np.uint8, size).reshape(blocks, block_bytes)
    rows[:] = np.random.default_rng(1).integers(0, 256, rows.shape, np.uint8)
    return memory, rows


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """One of the calls at each call, in turn."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def gpu_seconds(*calls: Callable[[], Any]) -> list[float]:
    """Median time on the device of each call; they alternate, so that all meet the same clocks."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(ROUNDS + 2):
        for call, times in zip(calls, found, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(BUSY_CYCLES)
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            end.synchronize()
            if turn >= 2:
                times.append(begin.elapsed_time(end) / 1e3 / CALLS)
    return [statistics.median(times) for times in found]


def device_rates(bench: Bench) -> dict[str, float]:
    """GB/s of scatter, gather (into device slots) and the device's own copy of as many bytes."""
    source = torch.randint(0, 256, (bench.sets, bench.bytes), dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source)

    def own(part: int) -> None:
        target[part].copy_(source[part])
        torch.cuda.Event().record()

    parts = range(bench.sets)
    calls = (
        in_turn([lambda part=part: own(part) for part in parts]),  # type: ignore[misc]
        in_turn([bench.copy(bench.blocks * (1 + part), at=bench.blocks * part) for part in parts]),
        in_turn([gather_into_device(bench, part) for part in parts]),
    )
    return {
        name: bench.bytes / seconds / 1e9
        for name, seconds in zip(("own", "scatter", "gather"), gpu_seconds(*calls), strict=True)
    }


def gather_into_device(bench: Bench, part: int) -> Callable[[], Any]:
    """The gather, with the device slots standing where an epoch's host slots do.

    Saves into device slots do not occur; the gather is timed with them all the same, for PCIe would hide the kernel.
    """
    first = bench.blocks * part

    class Rows:
        ctypes = SimpleNamespace(data=bench.device_cache.address + first * bench.block_bytes)

        def __len__(self) -> int:
            return bench.blocks

    cache = SimpleNamespace(pinned=bench.blocks, slots=0, address=0)
    epoch: Any = SimpleNamespace(number=2, rows=Rows(), device_cache=cache)
    orders = [Copy(epoch, list(range(bench.blocks)), bench.scattered[first : first + bench.blocks])]
    return lambda: bench.copies.run(orders, save=True)


def host_rates(bench: Bench) -> dict[str, float]:
    """GB/s from and to pinned host slots, on the compute stream and beside it, and of pinned memory's own copies."""
    pinned = torch.zeros(bench.bytes, dtype=torch.uint8, pin_memory=True)
    pinned.random_(0, 256)
    target = torch.empty(bench.bytes, dtype=torch.uint8, device="cuda:0")
    times = gpu_seconds(
        lambda: target.copy_(pinned, non_blocking=True),
        bench.copy(0),
        lambda: pinned.copy_(target, non_blocking=True),
        bench.copy(0, save=True),
    )
    with torch.cuda.stream(bench.streams.side):
        times += gpu_seconds(bench.copy(0, beside=True))
    names = ("own_to_device", "load", "own_to_host", "save", "beside")
    return {name: bench.bytes / seconds / 1e9 for name, seconds in zip(names, times, strict=True)}


def forward_ms(bench: Bench) -> dict[str, float]:
    """Milliseconds of matrix products on the compute stream: alone, and while a load runs beside them."""
    size = 4096
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda:0") for _ in range(2))
    result = torch.empty_like(left)

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.matmul(left, right, out=result)

    loads = {"alone": None, "host": bench.copy(0, beside=True), "device": bench.copy(bench.blocks, beside=True)}
    found: dict[str, list[float]] = {name: [] for name in loads}
    for turn in range(ROUNDS + 2):
        for name, load in loads.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(BUSY_CYCLES)
            bench.copies.mark()
            begin.record()
            products()
            end.record()
            if load is not None:
                load()
            torch.cuda.synchronize()
            if turn >= 2:
                found[name].append(begin.elapsed_time(end))
    return {name: statistics.median(times) for name, times in found.items()}


def launch_us(bench: Bench, calls: int = 2000) -> dict[str, float]:
    """Microseconds that the engine's thread spends on a load of one device slot, and until its bytes are there."""
    one = bench.copy(bench.blocks, count=1)
    submit, whole = [], []
    for turn in range(calls):
        begun = time.perf_counter_ns()
        fence = one()
        submitted = time.perf_counter_ns()
        fence.synchronize()
        ended = time.perf_counter_ns()
        if turn >= calls // 10:
            submit.append((submitted - begun) / 1e3)
            whole.append((ended - begun) / 1e3)
    return {"submit": statistics.median(submit), "until_done": statistics.median(whole)}


class HostSlots:
    """Host staging of one rank, as daemon/engine/device.py sees it."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.slot_count, self.block_bytes = blocks, [block_bytes]
        self.map, self.rows = random_slots(blocks, block_bytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def areas(self) -> list[tuple[int, int]]:
        return [(self.base, self.rows.nbytes)]

    def addresses(self, slot: int) -> list[int]:
        return [self.base + slot * self.block_bytes[0]]


def bounce(bench: Bench, rounds: int = 7) -> dict[str, float]:
    """Seconds to fetch all blocks into host slots, to copy them on to the device, and for both as a pipeline.

    The fetch is a copy in memory by one thread; the daemon's copy jobs start as soon as what they copy was fetched.
    """
    host: Any = HostSlots(bench.blocks, bench.block_bytes)
    source = host.rows.copy()
    size = -(-host.rows.nbytes // GRAIN_BYTES) * GRAIN_BYTES
    staging = DeviceStaging(host.block_bytes, [bench.device.uuid], budget_bytes=size, margin_bytes=0)
    staging.follow(host)
    said = [staging.open(), *(staging.pin(*piece) for piece in staging.pieces())]
    assert not any(said), said
    step = max(1, COPY_BYTES // bench.block_bytes)
    jobs = [range(start, min(start + step, bench.blocks)) for start in range(0, bench.blocks, step)]

    def fetch(slots: range) -> None:
        for slot in slots:
            np.copyto(host.rows[slot], source[slot])

    def promote(slots: range, fetched: Future[None] | None = None) -> None:
        if fetched is not None:
            fetched.result()
        error = staging.copy([(slot, bench.blocks + slot) for slot in slots])
        assert not error, error

    with ThreadPoolExecutor(1) as fetcher, ThreadPoolExecutor(1) as promoter:
        ways: dict[str, Callable[[], list[Future[None]]]] = {
            "fetch": lambda: [fetcher.submit(fetch, slots) for slots in jobs],
            "copy": lambda: [promoter.submit(promote, slots) for slots in jobs],
            "pipeline": lambda: [promoter.submit(promote, slots, fetcher.submit(fetch, slots)) for slots in jobs],
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, way in ways.items():
                begun = time.perf_counter()
                for job in way():
                    job.result()
                if turn:
                    found[name].append(time.perf_counter() - begun)
    staging.close()
    return {name: statistics.median(times) for name, times in found.items()}


def measure(shape: str, blocks: int) -> dict[str, Any]:
    bench = Bench(shape, blocks)
    try:
        return {
            "shape": shape,
            "blocks": blocks,
            "block_bytes": bench.block_bytes,
            "pin_gbps": bench.pin_gbps,
            "device_gbps": device_rates(bench),
            "host_gbps": host_rates(bench),
            "launch_us": launch_us(bench),
            "forward_ms": forward_ms(bench),
            "bounce_s": bounce(bench),
        }
    finally:
        bench.close()


def shares(result: dict[str, Any]) -> dict[str, float]:
    """Of what the device does by itself, how much each path reaches; for the pipeline, of the slower of its parts."""
    device, host, bounced = result["device_gbps"], result["host_gbps"], result["bounce_s"]
    return {
        "scatter": device["scatter"] / device["own"],
        "gather": device["gather"] / device["own"],
        "load from host": host["load"] / host["own_to_device"],
        "save to host": host["save"] / host["own_to_host"],
        "load beside from host": host["beside"] / host["own_to_device"],
        "bounce pipeline": max(bounced["fetch"], bounced["copy"]) / bounced["pipeline"],
    }


def report(result: dict[str, Any]) -> str:
    device, host = result["device_gbps"], result["host_gbps"]
    lines = [
        f"{result['shape']}: {result['blocks']} blocks of {result['block_bytes'] / 2**20:.2f} MiB",
        f"  device: own copy {device['own']:.0f}  scatter {device['scatter']:.0f}  gather {device['gather']:.0f} GB/s",
        f"  host:   own copy {host['own_to_device']:.1f}  load {host['load']:.1f}  "
        f"beside {host['beside']:.1f}  own copy back {host['own_to_host']:.1f}  save {host['save']:.1f} GB/s; "
        f"pinning {result['pin_gbps']:.1f} GB/s",
        "  one block: {submit:.1f} us to submit, {until_done:.1f} us until done".format(**result["launch_us"]),
        "  forward: alone {alone:.2f}  beside a load from host {host:.2f}  from device {device:.2f} ms".format(
            **result["forward_ms"]
        ),
        "  bounce: fetch {fetch:.4f}  copy {copy:.4f}  pipeline {pipeline:.4f} s".format(**result["bounce_s"]),
        "  shares: " + "  ".join(f"{name} {share:.2f}" for name, share in shares(result).items()),
    ]
    return "\n".join(lines)


def device_there() -> bool:
    """Whether there is a CUDA device; says why not."""
    try:
        cuda.uuid_of(0)
    except DeviceError as error:
        print(f"no CUDA device: {error}", file=sys.stderr)
        return False
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--blocks", type=int, action="append", help="default: 64 and 256")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not device_there():
        return 1
    head = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "command": command("benchmarks.cuda", sys.argv[1:] if arguments is None else arguments),
    }
    print(" ".join(f"{key}={value}" for key, value in head.items()))
    results = []
    for shape in options.shape or list(SHAPES):
        for blocks in options.blocks or [64, 256]:
            results.append(measure(shape, blocks))
            print(report(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({**head, "results": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
