"""Measures the cost of saving: time of the steps that compute prompts, with saving on against off.

Two engines alike, both alive, one connected as a producer (it saves and never loads), one with the connector off; their
passes alternate, and every second round begins with the other one. Each round has prompts of its own, computed twice:
the first pass stores every block (full rate), the second finds them stored already.

On a machine with other load the ratio of times says little; the lowest tenth of the steps says more, and so does the
time that our own calls took inside the steps ("own").  Only the ratios contain the daemon's share of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.ttft import DISTURBED_CORES
from tests.lab import connectors
from tests.lab.checkpoint import PEERS, make_checkpoint
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.interference import Interference
from tests.lab.passes import percentile
from tests.lab.process import REPO, exit_on_sigterm
from tests.lab.prompts import make_prompts

CASES = ("storing", "stored")
AIMS = {"storing": 1.10, "stored": 1.02}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run."""

    prompts: int = 6
    prompt_tokens: int = 1500
    output_tokens: int = 8
    block_size: int = 32
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 512
    pool_blocks: int = 1024
    staging: str = "256MiB"
    memory: str = "4GiB"

    @property
    def blocks(self) -> int:
        """Full blocks of all prompts of a pass."""
        return self.prompts * (self.prompt_tokens // self.block_size)


@dataclass(slots=True)
class Figures:
    """Of one case, per round: ratios on / off, and the medians in ms they come from."""

    prefill_ratio: list[float] = field(default_factory=list)
    low_ratio: list[float] = field(default_factory=list)
    """As prefill_ratio, of the 10th percentiles."""
    own_share: list[float] = field(default_factory=list)
    """Time inside our own calls, scheduler's and worker's, of the time of all steps with saving on."""
    decode_ratio: list[float] = field(default_factory=list)
    total_ratio: list[float] = field(default_factory=list)
    prefill_on_ms: list[float] = field(default_factory=list)
    prefill_off_ms: list[float] = field(default_factory=list)
    saved_share: list[float] = field(default_factory=list)
    """Blocks that were saved, of those that could be."""
    others_cores: list[float] = field(default_factory=list)


# --- inside the engine ------------------------------------------------------------------------------------------------


_STEPS: list[tuple[int, int]] = []
_OWN_NS = [0]


def watch_steps(engine: Any) -> None:
    """From now on, note each step's scheduled tokens and time in ns, and the time of our own calls in it."""
    core = engine.engine_core.engine_core
    scheduler, connector = core.scheduler, core.scheduler.connector
    step, schedule, update = core.step_fn, scheduler.schedule, scheduler.update_from_output
    tokens = [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        tokens[0] = output.total_num_scheduled_tokens
        return output

    def updating(output: Any, result: Any) -> Any:
        if (report := result.kv_connector_output) is not None and report.kv_connector_stats is not None:
            _OWN_NS[0] += int(report.kv_connector_stats.data.get("save_seconds", 0) * 1e9)
        return update(output, result)

    def timed() -> Any:
        tokens[0] = 0
        begun = time.perf_counter_ns()
        result = step()
        _STEPS.append((tokens[0], time.perf_counter_ns() - begun))
        return result

    def timed_call(call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any) -> Any:
            begun = time.perf_counter_ns()
            try:
                return call(*args)
            finally:
                _OWN_NS[0] += time.perf_counter_ns() - begun

        return inner

    for name in ("build_connector_meta", "update_connector_output", "get_num_new_matched_tokens", "on_new_request"):
        setattr(connector, name, timed_call(getattr(connector, name)))
    scheduler.schedule, scheduler.update_from_output, core.step_fn = counting, updating, timed


def take_steps(_engine: Any) -> dict[str, Any]:
    """Return (scheduled tokens, ns) of each step since the last call, and the ns of our own calls."""
    taken = {"steps": list(_STEPS), "own_ns": _OWN_NS[0]}
    _STEPS.clear()
    _OWN_NS[0] = 0
    return taken


# --- outside ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """One pass: medians in ms of full prefill steps and of decode steps, and its length in s."""

    prefill_ms: float
    prefill_low_ms: float
    decode_ms: float
    total_s: float
    own_share: float

    @classmethod
    def of(cls, taken: dict[str, Any], setting: Setting, total_s: float) -> Measured:
        steps = taken["steps"]
        full = [ns / 1e6 for tokens, ns in steps if tokens == setting.max_num_batched_tokens]
        decode = [ns / 1e6 for tokens, ns in steps if 0 < tokens <= setting.max_num_seqs]
        return cls(
            percentile(full, 0.5),
            percentile(full, 0.1),
            percentile(decode, 0.5),
            total_s,
            taken["own_ns"] / sum(ns for _, ns in steps),
        )


class Bench:
    """Both engines and the daemon beside one of them."""

    def __init__(self, setting: Setting, say: Callable[[str], None]) -> None:
        self.setting, self.say = setting, say
        self.engines: dict[str, Engine] = {}
        self.figures = {case: Figures() for case in CASES}

    def run(self, model: Path, rounds: int) -> None:
        setting = self.setting
        with contextlib.ExitStack() as stack:
            daemon = stack.enter_context(Daemon(memory=setting.memory, staging=setting.staging))
            for name, transfer in (
                ("off", connectors.ours(daemon.socket, mode="off")),
                ("on", connectors.ours(daemon.socket, role="kv_producer")),
            ):
                self.say(f"starting the engine with saving {name}")
                spec = EngineSpec(
                    own_worker=False,
                    model=model,
                    dtype=PEERS.dtype,
                    block_size=setting.block_size,
                    max_num_seqs=setting.max_num_seqs,
                    max_num_batched_tokens=setting.max_num_batched_tokens,
                    num_gpu_blocks=setting.pool_blocks,
                    kv_transfer=transfer,
                )
                self.engines[name] = stack.enter_context(Engine(spec))
                self.engines[name].call("benchmarks.save:watch_steps")
            for number in range(rounds + 1):
                self._round(number, rounds, daemon)

    def _round(self, number: int, rounds: int, daemon: Daemon) -> None:
        prompts = make_prompts(self.setting.prompts, self.setting.prompt_tokens, vocab=PEERS.vocab, seed=1000 + number)
        for case in CASES:
            others, before = Interference(), _stored(daemon)
            order = ("off", "on") if number % 2 else ("on", "off")
            passes = {name: self._pass(name, prompts) for name in order}
            cores = others.cores()
            on, off = passes["on"], passes["off"]
            share = self._share(daemon, before) if case == "storing" else 0.0
            name = "warm-up" if number == 0 else f"round {number} of {rounds}"
            note = f"  (others used {cores:.1f} cores)" if cores > DISTURBED_CORES else ""
            self.say(
                f"{name}: {case:8} prefill step {on.prefill_ms:.1f} / {off.prefill_ms:.1f} ms  "
                f"total {on.total_s:.2f} / {off.total_s:.2f} s" + (f"  saved {share:.0%}" if share else "") + note
            )
            if number == 0:
                continue
            figures = self.figures[case]
            figures.prefill_ratio.append(on.prefill_ms / off.prefill_ms)
            figures.low_ratio.append(on.prefill_low_ms / off.prefill_low_ms)
            figures.own_share.append(on.own_share)
            figures.decode_ratio.append(on.decode_ms / off.decode_ms)
            figures.total_ratio.append(on.total_s / off.total_s)
            figures.prefill_on_ms.append(on.prefill_ms)
            figures.prefill_off_ms.append(off.prefill_ms)
            figures.saved_share.append(share)
            figures.others_cores.append(cores)

    def _pass(self, name: str, prompts: list[list[int]]) -> Measured:
        engine = self.engines[name]
        if not engine.reset_prefix_cache():
            self.say(f"WARNING: the prefix cache of {name} could not be emptied")
        engine.call("benchmarks.save:take_steps")
        result = engine.run(prompts, max_tokens=self.setting.output_tokens, timeout_s=180)
        return Measured.of(engine.call("benchmarks.save:take_steps"), self.setting, result.total_s)

    def _share(self, daemon: Daemon, before: int) -> float:
        """Wait until the saves of the pass are through; the share of its blocks that was stored."""
        last, quiet_since = _stored(daemon), time.monotonic()
        while time.monotonic() - quiet_since < 0.5 and last - before < self.setting.blocks:
            time.sleep(0.05)
            if (now := _stored(daemon)) != last:
                last, quiet_since = now, time.monotonic()
        return (last - before) / self.setting.blocks


def _stored(daemon: Daemon) -> int:
    return sum(line["stored_blocks"] for line in daemon.records("save.done"))


def table(figures: dict[str, Figures]) -> list[str]:
    """Lines: per case the median ratio with its spread, beside the aim."""
    names = ("prefill step, on / off", "its lowest tenth", "whole pass", "decode step")
    lines = [f"{'':9}" + "".join(f"{name:>24}" for name in names) + f"{'aim':>9}{'own':>8}{'saved':>7}"]
    for case, each in figures.items():
        saved = f"{min(each.saved_share):>7.0%}" if case == "storing" else ""
        ratios = (each.prefill_ratio, each.low_ratio, each.total_ratio, each.decode_ratio)
        lines.append(
            f"{case:9}" + "".join(f"{_spread(values):>24}" for values in ratios) + f"{f'<= {AIMS[case]:.2f}':>9}"
            f"{statistics.median(each.own_share):>8.2%}{saved}"
        )
    return lines


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds after the warm-up (default 8)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write settings and all figures to this file")
    parser.add_argument("--work", type=Path, default=REPO / "build", help="where the checkpoint is kept")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    exit_on_sigterm()
    setting, ran_on = Setting(), machine()

    def say(line: str) -> None:
        print(line, flush=True)

    say(f"machine: {json.dumps(ran_on)}")
    say(f"setting: {json.dumps(asdict(setting))}, {setting.blocks} blocks a pass")
    bench = Bench(setting, say)
    bench.run(make_checkpoint(options.work / "checkpoints", PEERS), options.rounds)
    say("")
    for line in table(bench.figures):
        say(line)
    for case, each in bench.figures.items():
        disturbed = sum(cores > DISTURBED_CORES for cores in each.others_cores)
        if disturbed:
            say(f"WARNING: {case}: other programs disturbed {disturbed} of {options.rounds} rounds")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "machine": ran_on,
            "setting": asdict(setting),
            "rounds": options.rounds,
            "cases": {case: asdict(each) for case, each in bench.figures.items()},
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
