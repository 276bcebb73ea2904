"""Recorded traces, unscaled, under the simulated policies: `python -m benchmarks.simulate.traces conversation`."""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.serve import trace
from benchmarks.serve.trace import SHARED, TRACES
from benchmarks.simulate import report
from benchmarks.simulate.events import ns
from benchmarks.simulate.run import Scenario, simulate
from benchmarks.simulate.scenarios import ENGINE, NODE
from benchmarks.simulate.waiting import POLICIES
from benchmarks.simulate.workload import Load, SimRequest

DEFAULT = ("local", "no-prefetch", "on-demand", "wait", "adaptive")
COPY_HASHES = 1 << 28  # a copy of the trace has other prompts
# Places for 32 mean requests of each trace, so that load means a full pool; and the pace that loads one engine.
POOL_BLOCKS = {"conversation": 6400, "agents": 24_000}
PACE = {"conversation": 2.2, "agents": 2.0}
_DIGEST = struct.Struct(">II")


def requests(
    calls: Sequence[trace.Call], tokens_per_hash: int, block_tokens: int, count: int, pace: float
) -> Iterator[SimRequest]:
    """Yield `count` requests: the trace, and copies of it behind one another, `pace` times as long as it was.

    The store has what the trace had before each request.
    """
    part = tokens_per_hash // block_tokens
    period = calls[-1].at_s + 1.0
    for index in range(count):
        copy, at = divmod(index, len(calls))
        if at == 0:
            seen = set[int]()
        call = calls[at]
        whole = call.hashes[: call.input_tokens // tokens_per_hash]
        known = next((place for place, each in enumerate(whole) if each not in seen), len(whole))
        seen.update(whole)
        tokens = min(call.input_tokens, len(call.hashes) * tokens_per_hash)
        usable = (tokens - 1) // block_tokens
        digests = b"".join(
            _DIGEST.pack(each + copy * COPY_HASHES, block) for each in call.hashes for block in range(part)
        )
        yield SimRequest(
            index,
            1 + ns(pace * (call.at_s + copy * period)),
            digests[: usable * _DIGEST.size],
            min(known * part, usable),
            tokens,
            max(1, call.output_tokens),
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate.traces", description=__doc__)
    parser.add_argument("trace", choices=TRACES)
    parser.add_argument("--data", type=Path, default=SHARED, help="folder of the traces")
    parser.add_argument("--compare", default=",".join(DEFAULT), help=f"of {','.join(POLICIES)} (default %(default)s)")
    parser.add_argument("--requests", type=int, default=100_000, help="the trace is repeated as need be")
    parser.add_argument("--pace", type=float, help="time between requests over that of the trace")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures to this file")
    options = parser.parse_args(argv)
    where, tokens_per_hash, _ = TRACES[options.trace]
    path = options.data / where
    if not path.exists():
        print(f"no trace here: {path}: give its folder (--data)", file=sys.stderr)
        return 0
    if unknown := [each for each in options.compare.split(",") if each not in POLICIES]:
        parser.error(f"unknown policies {unknown}: choose from {','.join(POLICIES)}")
    calls = trace.conversation(path) if options.trace == "conversation" else trace.agents(path)
    engine, pace = replace(ENGINE, pool_blocks=POOL_BLOCKS[options.trace]), options.pace or PACE[options.trace]
    calls = [
        call for call in calls if call.input_tokens + call.output_tokens < engine.pool_blocks * engine.block_tokens
    ]
    scenario = Scenario(options.trace, f"{options.trace}, unscaled, {pace:g} times as slow", Load(), engine, NODE)
    print(f"{scenario.shows}: {options.requests} requests, of {len(calls)} of the trace", flush=True)
    results = []
    for name in options.compare.split(","):
        some = list(requests(calls, tokens_per_hash, engine.block_tokens, options.requests, pace))
        results.append(simulate(scenario, POLICIES[name], requests=some))
        print(report.table(results)[-1], flush=True)
    print("\n".join(report.table(results)))
    for each in results:
        ratio = (
            f", {each.mean_ttft_s / results[0].mean_ttft_s:.3f} of {results[0].policy}"
            if each is not results[0]
            else ""
        )
        print(f"{each.policy:12} mean time to first token {each.mean_ttft_s:.3f} s{ratio}")
    if options.json is not None:
        figures = [report.figures(each) for each in results]
        options.json.write_text(
            json.dumps({"model": asdict(scenario), "results": figures}, indent=1, default=str) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
