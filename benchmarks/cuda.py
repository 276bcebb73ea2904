"""What the copies of the device tier cost on this GPU, beside the device's own copies measured in the same run.

Everything runs on the real parts: connector/copies.py on a paged cache of a model's shape, host slots pinned and device
slots allocated by connector/tier.py, streams of shmring/cuda.py.  It needs torch, cupy and numpy, but no vLLM or store.

    python -m benchmarks.cuda [--shape llama-8b] [--blocks 64] [--json PATH]

GB/s are bytes copied per second (1 GB = 10^9 bytes): a copy within the device reads and writes as many.  Medians.
"""

from __future__ import annotations

import argparse
import datetime
import json
import mmap
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvprefetch.connector.copies import Copy, CudaCopies, TorchStreams, checked
from kvprefetch.connector.paged import PagedCache
from kvprefetch.connector.tier import DeviceTier
from kvprefetch.shmring import cuda

# Layers, KV heads of a rank, K and V of a head; blocks of 16 tokens in bfloat16, in the layout LBNHC.
SHAPES = {"llama-8b": (32, 8, 256), "llama-70b-tp8": (80, 1, 256)}
TOKENS = 16
ROUNDS = 15
# Calls between two events, and for how long the device is kept busy meanwhile, so that they are queued when it comes to
# them and the time to launch them does not count.
CALLS = 8
BUSY_CYCLES = 4_000_000


class Bench:
    """A rank with a paged cache, pinned host slots and device slots, `blocks` of each."""

    def __init__(self, shape: str, blocks: int) -> None:
        layers, heads, content = SHAPES[shape]
        self.blocks = blocks
        in_cache = 2 * blocks
        block = TOKENS * heads * content
        raw = torch.zeros(layers * in_cache * block, dtype=torch.bfloat16, device="cuda:0")
        strides = (block, content, heads * content, 1)
        self.caches = {
            str(layer): raw.as_strided((in_cache, heads, TOKENS, content), strides, layer * in_cache * block)
            for layer in range(layers)
        }
        self.paged = PagedCache(self.caches, list(self.caches), in_cache)
        self.device = cuda.open_device(cuda.uuid_of("cuda", 0))
        self.block_bytes = self.paged.block_bytes
        self.bytes = blocks * self.block_bytes
        pages = -(-self.bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.map = mmap.mmap(-1, pages)
        self.rows = np.frombuffer(self.map, np.uint8, self.bytes).reshape(blocks, self.block_bytes)
        self.rows[:] = 1
        self.lease, theirs = socket.socketpair()
        attached: Any = SimpleNamespace(device_slots=blocks, slot_bytes=self.block_bytes, device_handle="")
        begun = time.perf_counter()
        self.tier = DeviceTier(self.device, self.rows, attached, theirs)
        while self.tier.pinned < blocks:
            time.sleep(0.001)
        self.pin_gbps = self.bytes / (time.perf_counter() - begun) / 1e9
        self.copies = CudaCopies(self.paged, self.device, TorchStreams(self.paged.device))
        self.session: Any = SimpleNamespace(epoch=1, rows=self.rows, tier=self.tier)
        random = np.random.default_rng(0)
        self.scattered = [int(n) for n in random.permutation(in_cache)[:blocks]]

    def copy(self, first_slot: int, *, save: bool = False, count: int | None = None) -> Callable[[], Any]:
        """The copies of the slots from `first_slot` on, as one step does them."""
        count = self.blocks if count is None else count
        slots = list(range(first_slot, first_slot + count))
        orders = [checked(self.paged, self.session, slots, self.scattered[:count], save=save)]
        return lambda: self.copies.run(orders, save=save)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.lease.close()
        self.tier.end()
        self.tier.join(30)


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
    source = torch.zeros(bench.bytes, dtype=torch.uint8, device="cuda:0")
    target = torch.zeros_like(source)
    # Saves into device slots do not occur; the gather is timed with them all the same, for PCIe would hide the kernel.
    gather = gather_into_device(bench)
    own, scatter, back = gpu_seconds(lambda: target.copy_(source), bench.copy(bench.blocks), gather)
    return {name: bench.bytes / s / 1e9 for name, s in (("own", own), ("scatter", scatter), ("gather", back))}


def gather_into_device(bench: Bench) -> Callable[[], Any]:
    """The gather, with the device slots standing where a session's host slots do."""

    class Rows:
        ctypes = SimpleNamespace(data=bench.tier.address)

        def __len__(self) -> int:
            return bench.blocks

    tier = SimpleNamespace(pinned=bench.blocks, slots=0, address=0)
    session: Any = SimpleNamespace(epoch=2, rows=Rows(), tier=tier)
    orders = [Copy(session, list(range(bench.blocks)), bench.scattered)]
    return lambda: bench.copies.run(orders, save=True)


def host_rates(bench: Bench) -> dict[str, float]:
    """GB/s from and to pinned host slots, and of copies of pinned memory by the copy engine."""
    pinned = torch.zeros(bench.bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.zeros(bench.bytes, dtype=torch.uint8, device="cuda:0")
    times = gpu_seconds(
        lambda: target.copy_(pinned, non_blocking=True), bench.copy(0),
        lambda: pinned.copy_(target, non_blocking=True), bench.copy(0, save=True),
    )  # fmt: skip
    names = ("own_to_device", "load", "own_to_host", "save")
    return {name: bench.bytes / seconds / 1e9 for name, seconds in zip(names, times, strict=True)}


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


def bounce(bench: Bench, rounds: int = 7) -> dict[str, float]:
    """Seconds to fetch all blocks into host slots, to copy them on to the device, and for both as a pipeline.

    The fetch is a copy in memory by one thread; a slot's copy to the device is queued as soon as it is filled.
    """
    source = np.full_like(bench.rows, 2)
    stream = bench.device.stream()

    def fetch(slot: int) -> None:
        np.copyto(bench.rows[slot], source[slot])

    def promote(slot: int) -> None:
        offset = slot * bench.block_bytes
        stream.copy(bench.tier.address + offset, bench.rows.ctypes.data + offset, bench.block_bytes)

    def timed(work: Callable[[ThreadPoolExecutor], None]) -> float:
        begun = time.perf_counter()
        work(pool)
        stream.record().wait()
        return time.perf_counter() - begun

    def only_fetch(pool: ThreadPoolExecutor) -> None:
        for job in [pool.submit(fetch, slot) for slot in range(bench.blocks)]:
            job.result()

    def only_promote(pool: ThreadPoolExecutor) -> None:
        for slot in range(bench.blocks):
            promote(slot)

    def both(pool: ThreadPoolExecutor) -> None:
        fetched = [pool.submit(fetch, slot) for slot in range(bench.blocks)]
        for slot, job in enumerate(fetched):
            job.result()
            promote(slot)

    with ThreadPoolExecutor(1) as pool:
        found: dict[str, list[float]] = {"fetch": [], "copy": [], "pipeline": []}
        for turn in range(rounds + 1):
            for name, work in (("fetch", only_fetch), ("copy", only_promote), ("pipeline", both)):
                seconds = timed(work)
                if turn:
                    found[name].append(seconds)
    stream.close()
    return {name: statistics.median(times) for name, times in found.items()}


def measure(shape: str, blocks: int) -> dict[str, Any]:
    bench = Bench(shape, blocks)
    try:
        return {
            "shape": shape, "blocks": blocks, "block_bytes": bench.block_bytes, "pin_gbps": bench.pin_gbps,
            "device_gbps": device_rates(bench), "host_gbps": host_rates(bench), "launch_us": launch_us(bench),
            "bounce_s": bounce(bench),
        }  # fmt: skip
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
        "bounce pipeline": max(bounced["fetch"], bounced["copy"]) / bounced["pipeline"],
    }


def report(result: dict[str, Any]) -> str:
    device, host = result["device_gbps"], result["host_gbps"]
    lines = [
        f"{result['shape']}: {result['blocks']} blocks of {result['block_bytes'] / 2**20:.2f} MiB",
        f"  device: own copy {device['own']:.0f}  scatter {device['scatter']:.0f}  gather {device['gather']:.0f} GB/s",
        f"  host:   own copy {host['own_to_device']:.1f}  load {host['load']:.1f}  "
        f"own copy back {host['own_to_host']:.1f}  save {host['save']:.1f} GB/s; pinning {result['pin_gbps']:.1f} GB/s",
        "  one block: {submit:.1f} us to submit, {until_done:.1f} us until done".format(**result["launch_us"]),
        "  bounce: fetch {fetch:.4f}  copy {copy:.4f}  pipeline {pipeline:.4f} s".format(**result["bounce_s"]),
        "  shares: " + "  ".join(f"{name} {share:.2f}" for name, share in shares(result).items()),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    parser.add_argument("--blocks", type=int, action="append", help="default: 64 and 256")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        cuda.uuid_of("cuda", 0)
    except cuda.DeviceError as error:
        print(f"no CUDA device: {error}", file=sys.stderr)
        return 1
    head = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": torch.cuda.get_device_name(0), "torch": torch.__version__, "command": " ".join(sys.argv),
    }  # fmt: skip
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
