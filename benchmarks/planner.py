"""The planner's cost: time per hint and memory per waiting request, with few and with many waiting requests.

    python -m benchmarks.planner [--waiting 100 10000] [--blocks 256] [--chunk 64] [--rounds 2000]

One engine's planner has room for four requests. `waiting` more fill the queue behind them: the store has their blocks,
but staging has no room. Then `rounds` further requests arrive, one at a time, of `blocks` blocks each. A hint's time is
the sum over its life: arrival, the names for the look-up, its answer, ask, the try to order its blocks, end. It leaves
out flags, rings and store calls.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence

from kvprefetch.daemon.engine.lookups import FIRST_DIGESTS, SLICE_DIGESTS
from kvprefetch.daemon.planning.planner import Planner
from kvprefetch.daemon.planning.requests import Key
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.kv.prompts import Prompt

HASH_BYTES = 32
SHARED = 0.9
GROUPS = Groups((Group(Kind.FULL, 16),), 16)


class Flags:
    """The flags of an engine that never claims."""

    def take_back(self, key: Key) -> bool:
        return True

    def expire(self, key: Key) -> bool:
        return True


def chain(name: str, blocks: int) -> bytes:
    """Return `blocks` digests that no other name has."""
    return b"".join(hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(blocks))


def filled(waiting: int, blocks: int, chunk: int, *, shared: bool) -> Planner:
    """Return a planner with four staged requests, which fill its room, and `waiting` more behind them."""
    planner = Planner(4 * blocks, Flags(), chunk_blocks=chunk)
    for number in range(4):
        hint(planner, (number, 1), chain(f"staged-{number}", blocks), blocks)
    drain(planner)
    common = chain("staged-0", blocks)[: int(blocks * SHARED) * HASH_BYTES] if shared else b""
    own = blocks - len(common) // HASH_BYTES
    for number in range(4, 4 + waiting):
        on_disk = b"\1" * blocks if number % 2 else b""
        hint(planner, (number, 1), common + chain(f"waiting-{number}", own), blocks, on_disk)
        drain(planner)
    return planner


def hint(planner: Planner, key: Key, hashes: bytes, found: int, on_disk: bytes = b"") -> None:
    """A request arrives, and the store has its first `found` blocks, or, of those asked for, so many."""
    blocks = range(len(hashes) // HASH_BYTES)
    request = planner.hint(key, Prompt(GROUPS, hashes, blocks, room=0, staged=planner.blocks.holds), 0)
    most = FIRST_DIGESTS
    while names := request.prompt.next(most):
        request.prompt.found(b"\1" * min(found, len(names)), on_disk)
        most = SLICE_DIGESTS
    planner.choose(request)


def drain(planner: Planner) -> None:
    """Carry out all orders."""
    for lane in Lane:
        while (order := planner.next_order(lane)) is not None:
            planner.fetched(order.number, [True] * len(order.slots), 1)
    publish(planner)


def publish(planner: Planner) -> None:
    """Take all publications."""
    while planner.next_change() is not None:
        pass


def arrive(planner: Planner, key: Key, hashes: bytes, blocks: int, found: int) -> None:
    hint(planner, key, hashes, found)
    planner.next_order()
    publish(planner)


def miss(planner: Planner, key: Key, hashes: bytes, blocks: int) -> None:
    arrive(planner, key, hashes, blocks, 0)
    planner.finish(key)


def wait(planner: Planner, key: Key, hashes: bytes, blocks: int) -> None:
    arrive(planner, key, hashes, blocks, blocks)
    planner.ask(key)
    planner.finish(key)


def staged(planner: Planner, key: Key, hashes: bytes, blocks: int) -> None:
    arrive(planner, key, hashes, blocks, blocks)
    planner.finish(key)


def take_back(planner: Planner, key: Key, hashes: bytes, blocks: int) -> None:
    fetch(planner, key, hashes, blocks)
    drain(planner)


def fetch(planner: Planner, key: Key, hashes: bytes, blocks: int) -> None:
    hint(planner, key, hashes, blocks)
    planner.ask(key)  # makes it the most urgent request, so that it takes room from others
    drain(planner)
    planner.finish(key)


def measure(
    run: Callable[[Planner, Key, bytes, int], None], planner: Planner, hashes: Sequence[bytes], blocks: int
) -> list[float]:
    """Return the sorted microseconds of the rounds."""
    times = []
    gc.collect()
    gc.disable()
    for number, each in enumerate(hashes):
        started = time.perf_counter_ns()
        run(planner, (1_000_000 + number, 1), each, blocks)
        times.append((time.perf_counter_ns() - started) / 1e3)
    gc.enable()
    return sorted(times)


def memory(waiting: int, blocks: int, chunk: int, *, shared: bool) -> float:
    """Return the bytes per waiting request beyond its hashes."""

    def held(count: int) -> int:
        before = tracemalloc.get_traced_memory()[0]
        planner = filled(count, blocks, chunk, shared=shared)
        size = tracemalloc.get_traced_memory()[0] - before
        del planner
        return size

    tracemalloc.start()
    each = (held(waiting + 1) - held(1)) / waiting
    tracemalloc.stop()
    return each - blocks * HASH_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=64, help="blocks of one store call")
    parser.add_argument("--rounds", type=int, default=2000)
    arguments = parser.parse_args()
    blocks, chunk, rounds = arguments.blocks, arguments.chunk, arguments.rounds
    print(f"{platform.machine()}, Python {platform.python_version()}")
    print(f"hints of {blocks} blocks, {chunk} in a store call; {rounds} rounds each")
    fresh = [chain(f"fresh-{number}", blocks) for number in range(rounds)]
    there = [chain("staged-0", blocks)] * rounds
    cases: list[tuple[str, Callable[[Planner, Key, bytes, int], None], list[bytes]]] = [
        ("miss: nothing in the store", miss, fresh),
        ("waits: in the store, no room", wait, fresh),
        ("staged: every block shared", staged, there),
        ("fetched: every block ordered and staged", fetch, fresh[: rounds // 4]),
        ("taken back: as many fetched again for it", take_back, fresh[: rounds // 4]),
    ]
    print(f"{'microseconds per hint':42} {'waiting':>8} {'median':>8} {'p99':>8}")
    for name, run, hashes in cases:
        for waiting in arguments.waiting:
            times = measure(run, filled(waiting, blocks, chunk, shared=False), hashes, blocks)
            p99 = times[int(len(times) * 0.99)]
            print(f"{name:42} {waiting:8} {statistics.median(times):8.1f} {p99:8.1f}")
    print(f"{'bytes per waiting request beyond its hashes':42} {'waiting':>8} {'bytes':>8}")
    for shared in (False, True):
        name = "90 % of its blocks staged" if shared else "none of its blocks staged"
        waiting = max(arguments.waiting)
        print(f"{name:42} {waiting:8} {memory(waiting, blocks, chunk, shared=shared):8.0f}")


if __name__ == "__main__":
    main()
