"""Measures the time that a connector takes of vLLM's own thread: each hook of the scheduler's side, in a real engine.

The load is that of ``full_queue.py``. Passes alternate between the connectors. The hooks are timed from outside, where
the scheduler calls them. Pushes and bells are counted in a pass of its own, so that counting costs the timed hooks
nothing. That pass also times a function that does nothing in each hook's place: the floor of what a hook can cost,
caches being as they are.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import inspect
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench.__main__ import PUBLISHED, WORK
from benchmarks.bench.figures import Figure
from benchmarks.bench.page import heading, row, spread
from benchmarks.full_queue import Bench, Setting
from benchmarks.machine import command, machine
from tests.lab.checkpoint import PEERS, make_checkpoint
from tests.lab.interference import Interference, cpu_s
from tests.lab.passes import percentile
from tests.lab.process import REPO, exit_on_sigterm

VARIANTS = ("kvprefetch", "upstream-async")
NAME = "engine-thread.json"
FLOOR = "a function that does nothing"
ASK = "get_num_new_matched_tokens"

# --- in the engine's process ------------------------------------------------------------------------------------------

_spent: dict[str, list[int]] = {}
_counts: Counter[str] = Counter()


def watch(engine: Any) -> None:
    """Time every hook of the scheduler's connector from now on."""
    _wrap(engine, _timed)


def _wrap(engine: Any, wrapper: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> None:
    """Let vLLM's scheduler call each of the connector's hooks through this wrapper."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    connector = engine.engine_core.engine_core.scheduler.connector
    for name, _ in inspect.getmembers(KVConnectorBase_V1, inspect.isfunction):
        if not name.startswith("_"):
            vars(connector).pop(name, None)  # the wrapper of before
            setattr(connector, name, wrapper(getattr(connector, name), name))


def _floored(hook: Callable[..., Any], _name: str) -> Callable[..., Any]:
    spent, clock = _spent.setdefault(FLOOR, []), time.perf_counter_ns

    def floored(*args: Any, **options: Any) -> Any:
        began = clock()
        _nothing(*args, **options)
        spent.append(clock() - began)
        return hook(*args, **options)

    return floored


def _nothing(*_args: Any, **_options: Any) -> None:
    pass


def _timed(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    spent, polls = _spent.setdefault(name, []), _spent.setdefault(f"{name}: not yet", [])
    clock = time.perf_counter_ns

    def timed(*args: Any, **options: Any) -> Any:
        began = clock()
        answer = hook(*args, **options)
        took = clock() - began
        (polls if name == ASK and answer[0] is None else spent).append(took)
        return answer

    return timed


def take_spent(_engine: Any) -> dict[str, list[int]]:
    """Nanoseconds of each call since the last time, by hook."""
    taken = {name: list(calls) for name, calls in _spent.items() if calls}
    for calls in _spent.values():
        calls.clear()
    return taken


def count(engine: Any) -> None:
    """Count kvprefetch's pushes and bells from now on, and time empty functions instead of hooks."""
    _wrap(engine, _floored)
    from kvprefetch.shmring.ring import Producer

    for owner, name in ((Producer, "push"), (os, "eventfd_write")):
        setattr(owner, name, _counted(getattr(owner, name), name))


def _counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any) -> Any:
        _counts[name] += 1
        return function(*args)

    return counted


def take_counts(_engine: Any) -> tuple[int, int]:
    """Pushes and bells since the last time."""
    taken = _counts["push"], _counts["eventfd_write"]
    _counts.clear()
    return taken


# --- here -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Figures:
    """What the passes of one variant gave."""

    requests: int = 0
    steps: list[int] = field(default_factory=list)
    spent: dict[str, list[int]] = field(default_factory=dict)
    """Nanoseconds of each call, by hook."""
    per_request_us: list[float] = field(default_factory=list)
    """Per pass: all hooks together."""
    pushes: int = 0
    bells: int = 0
    floor: list[int] = field(default_factory=list)
    """Nanoseconds of each call of a function that does nothing, one in front of each hook."""
    others_cores: list[float] = field(default_factory=list)

    def add(self, spent: Mapping[str, list[int]], requests: int) -> None:
        for name, calls in spent.items():
            self.spent.setdefault(name, []).extend(calls)
        self.requests += requests
        self.per_request_us.append(sum(map(sum, spent.values())) / requests / 1e3)


def measure(bench: Bench, variants: list[str], rounds: int, say: Callable[[str], None]) -> dict[str, Figures]:
    """Run timed rounds after one that warms up, and one round that counts bells; then look at the idle daemon."""
    figures = {variant: Figures() for variant in variants}
    for number in range(rounds + 1):
        for variant in variants:
            engine, each = bench.engines[variant], figures[variant]
            if number == 0:
                bench.serve(variant)
                engine.call("benchmarks.engine_thread:watch")
                continue
            others, before = Interference(), _daemon_s(bench)
            result = bench.serve(variant)
            each.add(engine.call("benchmarks.engine_thread:take_spent"), len(result.requests))
            each.steps.append(result.steps)
            each.others_cores.append(others.cores())
            say(
                f"round {number} of {rounds}: {variant:15} {each.per_request_us[-1]:7.0f} us a request, "
                f"{result.steps} steps in {result.total_s:.2f} s, CPU of the daemon {_daemon_s(bench) - before:.2f} s, "
                f"others {each.others_cores[-1]:.2f} cores"
            )
    if "kvprefetch" in variants:
        engine, ours = bench.engines["kvprefetch"], figures["kvprefetch"]
        engine.call("benchmarks.engine_thread:count")
        bench.serve("kvprefetch")
        ours.pushes, ours.bells = engine.call("benchmarks.engine_thread:take_counts")
        ours.floor = engine.call("benchmarks.engine_thread:take_spent")[FLOOR]
    return figures


def _daemon_s(bench: Bench) -> float:
    return 0.0 if bench.daemon is None else cpu_s([bench.daemon.pid])


def summary(figures: Figures) -> dict[str, Any]:
    """What the result keeps of a variant; microseconds. `hooks`: calls a request, a call's median, and its 99 %."""
    hooks = {}
    for name, calls in figures.spent.items():
        micros = [ns / 1e3 for ns in calls]
        found = len(calls) / figures.requests, statistics.median(micros), percentile(micros, 0.99)
        hooks[name] = [round(each, 2) for each in found]
    return {
        "requests": figures.requests,
        "steps": statistics.median(figures.steps),
        "passes_us": [round(each, 1) for each in figures.per_request_us],
        "hooks": hooks,
        "floor_us": round(statistics.median(figures.floor) / 1e3, 2) if figures.floor else None,
        "pushes": figures.pushes,
        "bells": figures.bells,
        "others_cores": [round(each, 2) for each in figures.others_cores],
    }


def table(result: Mapping[str, Any], day: str) -> list[str]:
    """A row for each hook that takes a request more than 1 us: a call's median, and calls a request in brackets.

    Means contain moments in which another program had the core, and looks at flags about to change; medians do not.
    """
    ran: dict[str, Any] = result["variants"]
    typical = {name: {hook: each[0] * each[1] for hook, each in one["hooks"].items()} for name, one in ran.items()}
    most = {hook: max(each.get(hook, 0.0) for each in typical.values()) for some in typical.values() for hook in some}
    lines = heading("hook", *ran)
    for hook in sorted(most, key=lambda each: -most[each]):
        if most[hook] >= 1:
            cells = (each["hooks"].get(hook) for each in ran.values())
            lines.append(
                row(f"`{hook}`", *("" if each is None else f"{each[1]:.1f} ({each[0]:.1f})" for each in cells))
            )
    lines.append(row("all, calls × median", *(f"{sum(each.values()):.0f}" for each in typical.values())))
    passes = (Figure.of(each["passes_us"]) for each in ran.values())
    lines.append(row("all, median of passes", *(spread(each) for each in passes)))
    versions, disturbed = result["machine"]["versions"], max(max(each["others_cores"]) for each in ran.values())
    return [
        *lines,
        "",
        f"[Raw](benchmarks/{day}/{NAME}), {versions['kvprefetch']}; other programs used up to {disturbed:.1f} cores.",
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_thread", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="measured, after the warm-up (default %(default)s)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="default %(default)s")
    parser.add_argument("--out", type=Path, default=WORK, help="folder of the JSON (default build/bench)")
    parser.add_argument("--publish", action="store_true", help=f"also write to {PUBLISHED.relative_to(REPO)}/DATE")
    options = parser.parse_args(argv)
    variants = options.variants.split(",")
    if options.rounds < 1 or not set(VARIANTS).issuperset(variants):
        parser.error(f"a round or more of {','.join(VARIANTS)}")
    exit_on_sigterm()

    def say(line: str) -> None:
        print(line, flush=True)

    begun = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    setting = Setting()
    result: dict[str, Any] = {"begun": begun, "machine": machine()}
    result["command"] = command("benchmarks.engine_thread", sys.argv[1:] if argv is None else argv)
    bench = Bench(setting, make_checkpoint(REPO / "build" / "checkpoints", PEERS), say)
    with bench.started(variants):
        figures = measure(bench, variants, options.rounds, say)
    result |= {"setting": asdict(setting), "limited_link": bench.link is not None}
    result["variants"] = {name: summary(each) for name, each in figures.items()}
    say("\n".join(table(result, begun[:10])))
    for folder in [options.out, *([PUBLISHED / begun[:10]] if options.publish else [])]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / NAME).write_text(json.dumps(result, indent=1) + "\n")
        say(f"written: {folder / NAME}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
