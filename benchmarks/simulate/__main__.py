"""`make simulate`: run scenarios under several policies, print these side by side, and draw a plot per scenario."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.simulate import report
from benchmarks.simulate.plot import plot
from benchmarks.simulate.run import Result
from benchmarks.simulate.scenarios import SCENARIOS, run_named
from benchmarks.simulate.waiting import POLICIES
from tests.lab.process import REPO

DEFAULT = ("local", "no-prefetch", "recompute", "wait", "adaptive")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.add_argument("--scenario", default=",".join(SCENARIOS), help=f"of {','.join(SCENARIOS)} (default all)")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--policy", help="one policy beside the two baselines, local and no-prefetch")
    chosen.add_argument("--compare", default=",".join(DEFAULT), help=f"of {','.join(POLICIES)} (default %(default)s)")
    parser.add_argument("--requests", type=int, default=100_000, help="requests of each run (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal results (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--plots", type=Path, metavar="DIR", default=REPO / "build" / "simulation", help="SVG files")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write models and all figures to this file")
    options = parser.parse_args(argv)
    names = options.scenario.split(",")
    policies = options.compare.split(",") if options.policy is None else ["local", "no-prefetch", options.policy]
    policies = list(dict.fromkeys(policies))
    for what, given, known in (("scenarios", names, SCENARIOS), ("policies", policies, POLICIES)):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"unknown {what} {unknown}: choose from {','.join(known)}")
    for key in ("requests", "jobs"):
        if getattr(options, key) < 1:
            parser.error(f"--{key} must be at least 1, not {getattr(options, key)}")
    options.plots.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    size = f"{len(names)} scenarios × {len(policies)} policies × {options.requests} requests, seed {options.seed}"
    print(f"{size}, Python {platform.python_version()}, {options.jobs} processes", flush=True)
    for policy in policies:
        print(f"  {policy:12} {POLICIES[policy].says}")
    tasks = [(name, policy, options.requests, options.seed) for name in names for policy in policies]
    written: list[dict[str, object]] = []
    with contextlib.ExitStack() as stack:
        each: Callable[..., Iterator[Result]] = map
        if options.jobs > 1:
            context = multiprocessing.get_context("spawn")
            each = stack.enter_context(ProcessPoolExecutor(min(options.jobs, len(tasks)), context)).map
        results = each(run_named, *zip(*tasks, strict=True))
        for name in names:
            scenario = SCENARIOS[name]
            mine = [next(results) for _ in policies]
            print(f"\n{name}: {scenario.shows}", flush=True)
            print("\n".join(report.table(mine)), flush=True)
            plot(scenario, mine, options.plots / f"{name}.svg")
            written += [report.figures(result) for result in mine]
    print(f"\nplots in {options.plots}; {time.monotonic() - begun:.0f} s in all")
    if options.json is not None:
        models = {name: asdict(SCENARIOS[name]) for name in names}
        options.json.write_text(json.dumps({"scenarios": models, "results": written}, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
