"""Shows what a user has without kvprefetch and with it, in one command: real engines, a real store that is far.

The same requests are recomputed, loaded by vLLM's own Mooncake connector, loaded by kvprefetch on demand, prefetched
from arrival on, and served with all KV local (the ideal).  The ways take turns, so that a slow moment of the machine
meets all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from benchmarks.far_store import LOCAL, PREFETCHED, FarStore, Load
from tests.lab import process
from tests.lab.daemon import Record
from tests.lab.engine import EngineError
from tests.lab.passes import RequestResult, percentile

TIMES = ("hint_seen", "looked_up", "first_byte", "last_byte", "asked", "claimed", "loaded")
WORDS = {
    "hint_seen": "the daemon read the hint",
    "looked_up": "the store was asked which blocks it has",
    "first_byte": "the first bytes were staged",
    "last_byte": "all its KV was staged",
    "asked": "the scheduler asked for it",
    "claimed": "the scheduler claimed it",
    "loaded": "the engine had loaded it",
}
COLORS = {PREFETCHED: "green", LOCAL: "bright_black"}
BAR_WIDTH = 14


@dataclass(slots=True)
class Way:
    """The requests that were served in one way, of all rounds."""

    name: str
    requests: list[RequestResult] = field(default_factory=list)

    @property
    def ttft_s(self) -> list[float]:
        return [each.ttft_s for each in self.requests]

    @property
    def median_s(self) -> float:
        return statistics.median(self.ttft_s)

    @property
    def mean_s(self) -> float:
        return statistics.mean(self.ttft_s)

    @property
    def tokens(self) -> list[list[int]]:
        return [each.tokens for each in self.requests]


def measure(far: FarStore) -> tuple[list[Way], list[Record]]:
    """Serve all rounds in every way. Return the results, and the daemon's lines about prefetched requests."""
    load, lines = far.load, list[Record]()
    ways = [Way(name) for name in far.ways]
    for number in range(load.rounds):
        for way in ways:
            before = len(far.daemon.records("request.done"))
            result = far.serve(way.name, number)
            way.requests += result.requests
            mean = statistics.mean(each.ttft_s for each in result.requests)
            far.say(f"round {number + 1} of {load.rounds}: {way.name}, time to first token {mean:.2f} s on average")
            if way.name == PREFETCHED:
                far.daemon.wait_record("request.done", count=before + len(result.requests), timeout_s=5)
                lines += far.daemon.records("request.done")[before:]
    return ways, lines


def table(ways: Sequence[Way]) -> Table:
    """A row for each way, with a bar of its mean time to first token."""
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("time to first token", no_wrap=True)
    for column in ("median", "mean", "p99"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("mean", width=BAR_WIDTH)
    shown.add_column("loaded", justify="right", no_wrap=True)
    longest = max(way.mean_s for way in ways)
    for way in ways:
        tokens = statistics.mean(each.cached_tokens for each in way.requests)
        shown.add_row(
            way.name,
            f"{way.median_s:.3f} s",
            f"{way.mean_s:.3f} s",
            f"{percentile(way.ttft_s, 0.99):.3f} s",
            Bar(longest, 0, way.mean_s, width=BAR_WIDTH, color=COLORS.get(way.name, "default")),
            f"{tokens:.0f}",
        )
    return shown


def picture(ways: Sequence[Way], path: Path, note: str) -> None:
    """Write the distribution of the time to first token as a PNG: the share of requests that had one by then."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    for way in ways:
        times = sorted(way.ttft_s)
        shares = [(index + 1) / len(times) for index in range(len(times))]
        style, width = "--" if way.name == LOCAL else "-", 2 if way.name == PREFETCHED else 1.3
        axes.step(times, shares, where="post", linestyle=style, linewidth=width, label=way.name)
    axes.set_xlabel("time to first token, s")
    axes.set_ylabel("share of requests")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.grid(visible=True, alpha=0.25)
    axes.set_title(note, fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def timeline(record: Record) -> list[str]:
    """Return one request's trace as lines, from the daemon's ``request.done`` line, in the order of time."""
    happened = [(float(at), name) for name in TIMES if (at := record.get(f"{name}_ms")) is not None]
    lines = ["     0.0 ms  it arrived in the engine, which pushed the hint"]
    lines += [f"{at:8.1f} ms  {WORDS[name]}" for at, name in sorted(happened)]
    if (hidden := record.get("hidden_fraction")) is not None:
        lines.append(f"{100 * float(hidden):8.1f} %   of look-up and transfer was hidden by the queue")
    return lines


def verdict(ways: Sequence[Way]) -> list[str]:
    """Say by how much prefetch is ahead, or behind, of every other way that had nothing local."""
    ours = next(way for way in ways if way.name == PREFETCHED)
    lines = []
    for other in ways:
        if other.name not in (PREFETCHED, LOCAL):
            mean, median = ours.mean_s / other.mean_s - 1, ours.median_s / other.median_s - 1
            lines.append(f"kvprefetch against {other.name}: mean {mean:+.0%}, median {median:+.0%}")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--picture", type=Path, default=process.REPO / "build" / "demo.png", help="a PNG of the result")
    options = parser.parse_args(argv)
    process.exit_on_sigterm()
    begun, console = time.monotonic(), Console(highlight=False)

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begun:5.1f} s] {line}", flush=True)

    try:
        far = FarStore(Load(), process.REPO / "build", say)
        with far.started():
            note = (
                f"{far.load.places} places, {far.load.users} users; a request holds its place for {far.place_s:.2f} s, "
                f"and fetching its KV takes {far.fetch_s:.2f} s"
            )
            say(note)
            ways, lines = measure(far)
            say("stopping")
    except EngineError as error:
        print(f"demo: an engine failed: {error}", file=sys.stderr)
        return 1
    print()
    console.print(table(ways))
    print(f"\n{note}.")
    print("On demand a request waits for a place and then for its KV; prefetched it waits for the longer of the two.\n")
    print("\n".join(verdict(ways)))
    loaded = sorted((each for each in lines if each.get("loaded_ms")), key=lambda each: float(each["loaded_ms"]))
    if loaded:
        middle = loaded[len(loaded) // 2]
        print(f"\nOne prefetched request ({middle.get('request_id')}):")
        print("\n".join(timeline(middle)))
    picture(ways, options.picture, note)
    print(f"\nThe picture is {options.picture}.")
    wrong = [way.name for way in ways[1:] if way.tokens != ways[0].tokens]
    print(f"FAILED: other tokens than recomputed: {', '.join(wrong)}" if wrong else "All ways gave the same tokens.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
