"""Shows what a user has without kvprefetch and with it, in one command: real engines, a real store that is far.

The same requests are recomputed, loaded by vLLM's own Mooncake connector, loaded by kvprefetch on demand, prefetched
from arrival on, and served with all KV local (the ideal).  The parts are those of the benchmark (`benchmarks.bench`).
With root the store is behind a limited link; otherwise it is a disk with a slow open.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from benchmarks.bench.figures import ttft_s
from benchmarks.bench.lab import Lab
from benchmarks.bench.runner import Runner, Say
from benchmarks.bench.served import Served
from benchmarks.bench.setting import Pace, Setting
from benchmarks.bench.variants import LOCAL, ON_DEMAND, OURS, RECOMPUTED
from benchmarks.machine import machine
from kvprefetch.daemon.telemetry.trace_picture import explain
from tests.lab import link, process
from tests.lab.daemon import Record
from tests.lab.passes import percentile

# Two users take turns at one place: while one reads an answer, the other one's request runs.  A request then waits for
# its place about as long as its fetch takes.  All of it follows the machine's pace, so a busy one has the same shape.
LOAD = Setting(
    arrivals="closed",
    level=2,
    pause=0.5,
    requests=10,
    prompt_tokens=1500,
    output_tokens=(80, 140),
    places=1,
    fetch=0.45,
)
# Opening a file takes some milliseconds more than the delay that it is given.
DISK_FETCH = 0.3
ROUNDS = 2
WAYS = {
    RECOMPUTED: "recomputed",
    "upstream-async": "vLLM's Mooncake connector",
    ON_DEMAND: "kvprefetch on demand",
    OURS: "kvprefetch",
    LOCAL: "all local",
}
BAR_COLORS = {OURS: "green", LOCAL: "bright_black"}
BAR_WIDTH = 14


class Bed(Lab):
    """The benchmark's lab; `lines` has what the daemon logged of prefetched requests."""

    lines: list[Record]

    def serve(self, variant: str, setting: Setting, pace: Pace, number: int) -> Served:
        served = super().serve(variant, setting, pace, number)
        if variant == OURS:
            self.lines += served.lines
        return served


@dataclass(slots=True)
class Way:
    """The requests that one variant served, of all rounds."""

    variant: str
    ttft_s: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        return WAYS[self.variant]

    @property
    def median_s(self) -> float:
        return statistics.median(self.ttft_s)

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.ttft_s)


def ways(result: Mapping[str, Any]) -> list[Way]:
    """What a run of one point gave, by variant."""
    found: dict[str, Way] = {}
    for served in result["points"][0]["passes"]:
        way = found.setdefault(served["variant"], Way(served["variant"]))
        way.ttft_s += ttft_s(served)
        way.cached_tokens += served["requests"]["cached_tokens"]
    return list(found.values())


def fetch_s(result: Mapping[str, Any]) -> float:
    """The median fetch of our two ways, as the daemon measured it: from the hint to the last byte."""
    point = result["points"][0]
    daemons = [served["daemon"] for served in point["passes"] if served["daemon"] is not None]
    measured = [each for daemon in daemons for each in daemon["transfer_s"]]
    return statistics.median(measured) if measured else float(point["pace"]["fetch_s"])


def table(some: Sequence[Way]) -> Table:
    """A row for each way, with a bar of its mean time to first token."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("time to first token", no_wrap=True)
    for column in ("median", "mean", "p99"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("mean", width=BAR_WIDTH)
    shown.add_column("loaded", justify="right", no_wrap=True)
    longest = max(way.mean_s for way in some)
    for way in some:
        shown.add_row(
            way.name,
            f"{way.median_s:.3f} s",
            f"{way.mean_s:.3f} s",
            f"{percentile(way.ttft_s, 0.99):.3f} s",
            Bar(longest, 0, way.mean_s, width=BAR_WIDTH, color=BAR_COLORS.get(way.variant, "default")),
            f"{statistics.mean(way.cached_tokens):.0f}",
        )
    return shown


def verdict(some: Sequence[Way]) -> list[str]:
    """By how much prefetch is below, or above, every other way that had nothing local; the last line sums it up."""
    ours = next(way for way in some if way.variant == OURS)
    lines, behind = [], []
    for other in some:
        if other.variant not in (OURS, LOCAL):
            median, mean = ours.median_s / other.median_s - 1, ours.mean_s / other.mean_s - 1
            lines.append(f"kvprefetch against {other.name}: median {median:+.0%}, mean {mean:+.0%}")
            behind += [f"{name} of {other.name}" for name, by in (("median", median), ("mean", mean)) if by >= 0]
    if behind:
        return [*lines, f"kvprefetch is NOT ahead of: {', '.join(behind)}."]
    return [*lines, "kvprefetch is ahead of all of them, at the median and in the mean."]


def measure(load: Setting, seconds: float, say: Say) -> tuple[dict[str, Any], list[Record]]:
    """Serve the load in every way. Return the result, and the daemon's lines about prefetched requests."""
    runner, lines = Runner([(load.level, load)], list(WAYS), ROUNDS, seconds, say), list[Record]()

    def bed(settings: Sequence[Setting], chosen: Sequence[str]) -> Bed:
        made = Bed(settings, chosen, say)
        made.lines = lines
        return made

    runner.run(bed)
    return runner.result, lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write settings and all figures to this file")
    parser.add_argument("--disk", action="store_true", help="the store is a slow disk, as it is without root")
    parser.add_argument(
        "--minutes",
        type=float,
        default=4.5,
        help="of all, set-up included: the second round is dropped if it does not fit (default %(default)g)",
    )
    options = parser.parse_args(argv)
    process.exit_on_sigterm()
    begun, console, on = time.monotonic(), Console(highlight=False), machine()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begun:5.1f} s] {line}", flush=True)

    load = LOAD
    if options.disk or (why_not := link.available()) is not None:
        if not options.disk:
            say(f"no limited link here: {why_not}")
        say("the store is a slow disk, which vLLM's own connector cannot read")
        load = LOAD.but(far="disk", fetch=DISK_FETCH)
    try:
        result, lines = measure(load, 60 * options.minutes, say)
    except RuntimeError as error:  # of an engine, the daemon, the store or the link; it ends with the log
        print(f"demo: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        result |= {"machine": on, "seconds": round(time.monotonic() - begun, 1)}
        options.json.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    some, place_s = ways(result), result["points"][0]["pace"]["place_s"]
    note = (
        f"{load.places} place, {load.level:.0f} users; a request holds its place for {place_s:.2f} s, "
        f"and fetching its KV takes {fetch_s(result):.2f} s"
    )
    print()
    console.print(table(some))
    print(f"\n{note}.")
    print(
        "On demand a request waits for its place and then for its KV; prefetched it waits for the longer of the two.\n"
    )
    print("\n".join(verdict(some)))
    loaded = sorted((each for each in lines if each.get("loaded_ms")), key=lambda each: float(each["loaded_ms"]))
    if loaded:
        middle = loaded[len(loaded) // 2]
        print(f"\nOne of the prefetched requests:\n\n{explain(middle)}\n")
    wrong = result["tokens"]["different"]
    print(f"FAILED: other tokens than recomputed: {', '.join(wrong)}" if wrong else "All ways gave the same tokens.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
