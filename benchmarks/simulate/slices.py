"""Slices of the agents' trace as `make bench-serve` serves them, simulated: `python -m benchmarks.simulate.slices`.

The judge of wait policies.  Each slice begins, as the benchmark does, with long prompts that the store lacks.  Under
"max(W, F)" is the mean if each request only waited for the later of its place and its KV: the blocks that it lacked at
its arrival, each sent once, as requests arrive.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import struct
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.serve import trace
from benchmarks.serve.trace import TRACES
from benchmarks.simulate.engine import EngineModel, full_attention
from benchmarks.simulate.events import NS, ns
from benchmarks.simulate.link import MediumModel
from benchmarks.simulate.node import NodeModel
from benchmarks.simulate.run import Result, Scenario, simulate
from benchmarks.simulate.waiting import POLICIES
from benchmarks.simulate.workload import Load, SimRequest, chain
from tests.lab.passes import percentile

BLOCK, LONGEST, PLACES, REQUESTS = 32, 4000, 4, 200
BLOCK_BYTES = 65_536
ROOM = 3  # of the longest requests fit the pool
WARM_UP, WARM_UP_OUTPUT = 4, 8
REST_S = 20.0  # from the begin of the warm-up to the first request
MINUTES, LOADS = (8.0, 20.0, 35.0), (0.635, 0.688, 0.794)
LOCAL, BASE, WAIT, LEAST = "local", "on-demand-wait", "wait", "max(W, F)"
DEFAULT = (LOCAL, "no-prefetch", BASE, WAIT, "adaptive")
_DIGEST = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured: seconds to compute a token, and of a step; the link; requests a second with all KV local."""

    token_s: float
    step_s: float
    link_mbit: float
    capacity: float


COSTS = {
    "published": Costs(728e-6, 0.013, 150.0, 18.9),  # docs/benchmarks/2026-11-24, through the HTTP server
    "process": Costs(291e-6, 0.006, 376.0, 49.4),  # engines in the benchmark's own process
}


@dataclass(frozen=True, slots=True)
class Point:
    """A slice, its rate of arrivals as a share of the capacity, and the costs; `slower`: the link, so many times."""

    minute: float
    load: float
    costs: str = "published"
    slower: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy's run of one point, the warm-up left out; times in s."""

    ttft_s: list[float]
    lacked: list[list[bytes]]
    """Digests of the blocks that the store had and the engine did not, when the request arrived."""
    arrival_s: list[float]
    recomputed: int
    """Blocks that the store had, and the engine computed."""
    wasted_share: float

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.ttft_s)

    @property
    def p99_s(self) -> float:
        return percentile(self.ttft_s, 0.99)


def requests(some: trace.Slice, rate: float) -> list[SimRequest]:
    """Return the warm-up's requests and the slice's, so many a second on average."""
    warm_tokens = longest_blocks(some) * BLOCK // 2
    made = [
        SimRequest(at, 1, chain(at + 1, (warm_tokens - 1) // BLOCK), 0, warm_tokens, WARM_UP_OUTPUT)
        for at in range(WARM_UP)
    ]
    pace = (len(some.calls) - 1) / (some.span_s * rate)
    names: dict[tuple[int, ...], int] = {}
    stored = {
        prefix[: end * BLOCK // some.chunk]
        for prefix in some.stored()
        for end in range(1, len(prefix) * some.chunk // BLOCK + 1)
    }
    for index, call in enumerate(some.calls, WARM_UP):
        usable = (call.input_tokens - 1) // BLOCK
        prefixes = [call.hashes[: end * BLOCK // some.chunk] for end in range(1, usable + 1)]
        digests = [
            _DIGEST.pack(names.setdefault(prefix, WARM_UP + 1 + len(names)), at) for at, prefix in enumerate(prefixes)
        ]
        found = sum(1 for _ in itertools.takewhile(stored.__contains__, prefixes))
        arrival_ns = ns(REST_S + pace * call.at_s)
        made.append(SimRequest(index, arrival_ns, b"".join(digests), found, call.input_tokens, call.output_tokens))
    return made


def longest_blocks(some: trace.Slice) -> int:
    """Return the blocks of the longest request, as the benchmark counts them."""
    return -(-max(each.input_tokens + each.output_tokens for each in some.calls) // BLOCK) + 1


def scenario(some: trace.Slice, point: Point) -> Scenario:
    """Return the benchmark's engine, daemon and link."""
    costs, longest = COSTS[point.costs], longest_blocks(some)
    mean = statistics.fmean((each.input_tokens + each.output_tokens) / BLOCK for each in some.calls)
    engine = EngineModel(
        max_num_seqs=PLACES,
        max_num_batched_tokens=2048,
        groups=full_attention(BLOCK),
        block_bytes=BLOCK_BYTES,
        pool_blocks=max(ROOM * longest, round((PLACES + 2) * mean)),
        prefill_tokens_per_s=1 / costs.token_s,
        step_s=costs.step_s,
        sequence_s=0.0,
        copy_bytes_per_s=2e9,
    )
    store = MediumModel(costs.link_mbit * 125_000 / point.slower, 0.001)
    node = NodeModel(
        staging_blocks=1024 * 3 // 4,  # 64 MiB, a quarter of it for saves
        chunk_blocks=64,
        fetch_threads=2,
        disk_threads=0,
        knows_pace=True,
        memory=store,
        disk=store,
        look_up_s=0.0008,
        message_s=0.0003,
    )
    return Scenario("agents", f"{point}", Load(), engine, node)


def run(some: trace.Slice, point: Point, policy: str) -> Outcome:
    """Simulate one policy at one point, whose slice is given."""
    asked = requests(some, point.load * COSTS[point.costs].capacity)
    result = simulate(scenario(some, point), POLICIES[policy], requests=asked)
    assert result.finished == len(asked), result
    return outcome(result, asked[WARM_UP:])


def outcome(result: Result, asked: Sequence[SimRequest]) -> Outcome:
    return Outcome(
        [(each.first_token_ns - each.arrival_ns) / NS for each in asked],
        [[each.digest(block) for block in range(each.hinted_local, each.found)] for each in asked],
        [each.arrival_ns / NS for each in asked],
        sum(max(0, each.found - each.local_blocks - each.loaded_blocks) for each in asked),
        result.wasted_share,
    )


def least_s(local: Outcome, loaded: Outcome, bytes_per_s: float) -> float:
    """The mean of max(W, F): W as with all KV local, F for what requests lacked in the run `loaded`."""
    came: dict[bytes, float] = {}
    sent = total = 0.0
    compute = min(local.ttft_s)
    for arrival, ttft, lacked in zip(local.arrival_s, local.ttft_s, loaded.lacked, strict=True):
        for digest in lacked:
            if digest not in came:
                sent = came[digest] = max(sent, arrival) + BLOCK_BYTES / bytes_per_s
        fetched = max((came[digest] for digest in lacked), default=0.0)
        total += max(ttft, fetched - arrival + compute) if fetched > arrival else ttft
    return total / len(local.ttft_s)


def geometric(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def table(points: Sequence[Point], found: Mapping[tuple[Point, str], Outcome], chosen: Sequence[str]) -> list[str]:
    """Return a line for each point, and lines over all of them; `BASE` and max(W, F) are compared with."""
    means = {(point, name): found[point, name].mean_s for point in points for name in chosen}
    names = list(chosen)
    if {LOCAL, WAIT} <= set(chosen):
        names.append(LEAST)
        for point in points:
            rate = COSTS[point.costs].link_mbit * 125_000 / point.slower
            means[point, LEAST] = least_s(found[point, LOCAL], found[point, WAIT], rate)

    def line(label: str, cells: Mapping[str, str]) -> str:
        return f"{label:22}" + "".join(f"{cells.get(name, ''):>16}" for name in names)

    lines = [line("seed, minute, load", {name: name for name in names})]
    for point in points:
        cells = {name: f"{1e3 * means[point, name]:.1f} ms" for name in names}
        lines.append(line(f"{point.seed}, {point.minute:g}, {point.load:g}", cells))
    for base in (BASE, LEAST):
        if base in names:
            ratios = {name: [means[point, name] / means[point, base] for point in points] for name in names}
            lines.append(line(f"/ {base}", {name: f"{geometric(ratios[name]):.3f}" for name in names}))
    if BASE in chosen:
        ratios = {name: [found[at, name].p99_s / found[at, BASE].p99_s for at in points] for name in chosen}
        lines.append(line(f"p99 / {BASE}", {name: f"{geometric(ratios[name]):.3f}" for name in chosen}))
    recomputed = {name: f"{sum(found[point, name].recomputed for point in points)}" for name in chosen}
    wasted = {name: f"{statistics.fmean(found[point, name].wasted_share for point in points):.1%}" for name in chosen}
    return [*lines, line("blocks recomputed", recomputed), line("bytes in vain", wasted)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate.slices", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the trace's folder, agents")
    parser.add_argument("--costs", default="published", choices=COSTS)
    parser.add_argument("--slower", type=float, default=1.0, help="the link is so many times slower")
    parser.add_argument("--compare", default=",".join(DEFAULT), help=f"of {','.join(POLICIES)} (default %(default)s)")
    parser.add_argument("--seeds", default="0", help="of the sessions' begins")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="shares of the capacity")
    parser.add_argument("--minutes", default=",".join(map(str, MINUTES)), help="of the trace, where a slice begins")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all times to this file")
    options = parser.parse_args(argv)
    chosen = options.compare.split(",")
    if unknown := [each for each in chosen if each not in POLICIES]:
        parser.error(f"unknown policies {unknown}: choose from {','.join(POLICIES)}")
    where, tokens_per_hash, k = TRACES["agents"]
    if not (options.data / where).is_dir():
        parser.error(f"no trace here: {options.data / where}: give its folder (--data)")
    points = [
        Point(minute, load, options.costs, options.slower, seed)
        for seed in map(int, options.seeds.split(","))
        for minute in map(float, options.minutes.split(","))
        for load in map(float, options.loads.split(","))
    ]
    slices = {}
    for seed, minute in {(point.seed, point.minute) for point in points}:
        slices[seed, minute] = trace.scaled(
            trace.agents(options.data / where, seed=seed),
            k=k,
            tokens_per_hash=tokens_per_hash,
            start_s=60 * minute,
            count=REQUESTS,
            longest=LONGEST,
        )
    tasks = [(slices[point.seed, point.minute], point, policy) for point in points for policy in chosen]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        outcomes = list(pool.map(run, *zip(*tasks, strict=True)))
    found = {(point, policy): each for (_, point, policy), each in zip(tasks, outcomes, strict=True)}
    print("\n".join(table(points, found, chosen)), flush=True)
    if options.json is not None:
        written = [
            {**asdict(point), "policy": policy, **asdict(replace(each, lacked=[]))}
            for (point, policy), each in found.items()
        ]
        options.json.write_text(json.dumps(written) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
