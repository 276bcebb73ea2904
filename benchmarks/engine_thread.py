"""Measures the time that a connector takes of vLLM's own thread: each hook of the scheduler's side, in a real engine.

The load is that of ``full_queue.py``. Passes alternate between the connectors. The hooks are timed from outside, where
the scheduler calls them. Pushes and bells are counted in a pass of its own, so that counting costs the timed hooks
nothing. That pass also times a function that does nothing in each hook's place: the floor of what a hook can cost,
caches being as they are.
"""

from __future__ import annotations

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
from typing import Any

from benchmarks import arguments
from benchmarks.full_queue import LMCACHE, Bench, Setting
from benchmarks.machine import machine
from tests.lab.checkpoint import PEERS, make_checkpoint
from tests.lab.interference import Interference, cpu_s
from tests.lab.passes import percentile
from tests.lab.process import exit_on_sigterm

VARIANTS = ("ours", "upstream-async")
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
    if "ours" in variants:
        engine, ours = bench.engines["ours"], figures["ours"]
        engine.call("benchmarks.engine_thread:count")
        bench.serve("ours")
        ours.pushes, ours.bells = engine.call("benchmarks.engine_thread:take_counts")
        ours.floor = engine.call("benchmarks.engine_thread:take_spent")[FLOOR]
    return figures


def _daemon_s(bench: Bench) -> float:
    return 0.0 if bench.daemon is None else cpu_s([bench.daemon.pid])


def table(variant: str, figures: Figures) -> list[str]:
    """Lines: per hook how often a request calls it, a call's time, and its share of a request.

    Means contain moments in which another program had the core, and looks at flags about to change; medians do not.
    """
    lines = [
        f"| {variant} | calls a request | median, us | p99, us | calls x median, us | us a request |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    typical = 0.0
    for name, calls in sorted(figures.spent.items(), key=lambda each: -sum(each[1])):
        micros = [ns / 1e3 for ns in calls]
        often, middle = len(calls) / figures.requests, statistics.median(micros)
        typical += often * middle
        lines.append(
            f"| {name} | {often:.2f} | {middle:.1f} | {percentile(micros, 0.99):.1f} "
            f"| {often * middle:.1f} | {sum(micros) / figures.requests:.1f} |"
        )
    passes = figures.per_request_us
    calls_all = sum(map(len, figures.spent.values())) / figures.requests
    lines.append(
        f"| all hooks, median of passes (min-max) | {calls_all:.1f} | | | {typical:.1f} "
        f"| {statistics.median(passes):.1f} ({min(passes):.1f}-{max(passes):.1f}) |"
    )
    if figures.floor:
        middle = statistics.median(figures.floor) / 1e3
        lines.append(f"| {FLOOR}, so often | {calls_all:.1f} | {middle:.1f} | | {calls_all * middle:.1f} | |")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = arguments.parser("engine_thread", __doc__, VARIANTS + LMCACHE, rounds=4)
    options = parser.parse_args(argv)
    exit_on_sigterm()
    variants = arguments.variants_of(parser, options, VARIANTS, LMCACHE)

    def say(line: str) -> None:
        print(line, flush=True)

    setting, ran_on = Setting(), machine()
    say(f"machine: {json.dumps(ran_on)}")
    say(f"setting: {json.dumps(asdict(setting))}")
    if options.lmcache_python is None:
        say("LMCache is not installed: give --lmcache-python to have it beside (docs/BENCHMARKS.md)")
    bench = Bench(setting, make_checkpoint(options.work / "checkpoints", PEERS), say, options.lmcache_python)
    with bench.started(variants):
        figures = measure(bench, variants, options.rounds, say)
    for variant, each in figures.items():
        say("")
        for line in table(variant, each):
            say(line)
        say(f"{statistics.median(each.steps) / setting.prompts:.1f} steps a request")
        if each.pushes:
            say(f"{each.bells} bells in {each.pushes} pushes: one in {each.pushes / max(1, each.bells):.0f}")
    if options.json is not None:
        report = {"machine": ran_on, "setting": asdict(setting), "limited_link": bench.link is not None}
        report["variants"] = {name: asdict(each) for name, each in figures.items()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
