"""Measures a miss: prompts that no store holds, with and without the connector, alternating on one machine.

Under load (a full queue) it compares time to first token and total time, round by round; on an idle engine it takes
single requests one after the other. Every prompt is new to every engine, and the store is emptied after each round.
Inside the scheduler it also measures how long the connector held each request, from the first question to the answer.
A miss adds this time, and it stays readable where the other times scatter too much.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from tests.lab import connectors
from tests.lab.checkpoint import PEERS, make_checkpoint
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.interference import Interference
from tests.lab.process import REPO, exit_on_sigterm
from tests.lab.prompts import make_prompts

BARE = "no connector"
# Looks up and misses; looks up, misses and saves; as the first one, without the look at a pending flag.
MISSES, SAVES, NO_SPIN = "misses", "misses and saves", "misses, no spin"
VARIANTS = (BARE, MISSES, SAVES, NO_SPIN)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run; the defaults are the published comparison."""

    prompts: int = 32
    prompt_tokens: int = 1000
    output_tokens: int = 16
    outstanding: int = 12
    max_num_seqs: int = 4
    pool_blocks: int = 200
    single_tokens: int = 400
    memory: str = "512MB"
    staging: str = "128MB"


@dataclass(slots=True)
class Figures:
    """One variant: per round under load, per request on an idle engine; seconds."""

    p50: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)
    single_misses: list[float] = field(default_factory=list)
    single_hits: list[float] = field(default_factory=list)
    unexpected_hits: int = 0
    held_under_load: list[float] = field(default_factory=list)
    held_misses: list[float] = field(default_factory=list)
    held_hits: list[float] = field(default_factory=list)


_asked: dict[str, float] = {}
_held: list[float] = []


def watch(engine: Any) -> None:
    """In the scheduler's process: time from now on how long the connector holds each request."""
    connector = engine.engine_core.engine_core.scheduler.connector
    ask = connector.get_num_new_matched_tokens

    def asked(request: Any, num_computed_tokens: int) -> Any:
        first = _asked.setdefault(request.request_id, time.perf_counter())
        answer = ask(request, num_computed_tokens)
        if answer[0] is not None:
            _held.append(time.perf_counter() - first)
            del _asked[request.request_id]
        return answer

    connector.get_num_new_matched_tokens = asked


def take_held(_engine: Any) -> list[float]:
    """In the scheduler's process: seconds that each request answered since the last call was held."""
    taken, _held[:] = list(_held), []
    return taken


class Bench:
    """Four engines and a daemon with an empty store of its own."""

    def __init__(self, setting: Setting, model: Path, say: Callable[[str], None]) -> None:
        self.setting, self.model, self.say = setting, model, say
        self.engines: dict[str, Engine] = {}
        self.figures = {variant: Figures() for variant in VARIANTS}
        self._seed = 1000

    def run(self, rounds: int, singles: int) -> dict[str, Figures]:
        with contextlib.ExitStack() as stack:
            daemon = stack.enter_context(Daemon(memory=self.setting.memory, staging=self.setting.staging))
            for variant in VARIANTS:
                self.say(f"starting the engine: {variant}")
                self.engines[variant] = stack.enter_context(Engine(self._spec(variant, daemon.socket)))
                if variant != BARE:
                    self.engines[variant].call("benchmarks.miss:watch")
            for number in range(rounds + 1):
                # The order turns, so that a slow first or last place meets everyone.
                order = [VARIANTS[:3][(number + place) % 3] for place in range(3)]
                for variant in order:
                    self._under_load(variant, number, rounds)
            for number in range(singles + 3):
                for place in range(len(VARIANTS)):
                    self._single_miss(VARIANTS[(number + place) % len(VARIANTS)], warm_up=number < 3)
            self._single_hits(singles)
        return self.figures

    def _spec(self, variant: str, socket: Path) -> EngineSpec:
        role = "kv_both" if variant == SAVES else "kv_consumer"
        extra = {"spin_us": 0, "idle_wait_us": 0} if variant == NO_SPIN else {}
        ours = connectors.ours(socket, role=role, wait_policy="adaptive", **extra)
        return EngineSpec(
            own_worker=False,
            model=self.model,
            dtype=PEERS.dtype,
            max_num_seqs=self.setting.max_num_seqs,
            num_gpu_blocks=self.setting.pool_blocks,
            kv_transfer=None if variant == BARE else ours,
        )

    def _new_prompts(self, count: int, tokens: int) -> list[list[int]]:
        self._seed += 1
        return make_prompts(count, tokens, vocab=PEERS.vocab, seed=self._seed)

    def _under_load(self, variant: str, number: int, rounds: int) -> None:
        setting, figures = self.setting, self.figures[variant]
        prompts = self._new_prompts(setting.prompts, setting.prompt_tokens)
        others = Interference()
        result = self.engines[variant].run(
            prompts, max_tokens=setting.output_tokens, concurrency=setting.outstanding, timeout_s=300
        )
        cores = others.cores()
        name = "warm-up" if number == 0 else f"round {number} of {rounds}"
        self.say(
            f"{name}: {variant:18} p50 {result.ttft_s(0.5):.3f}  total {result.total_s:.2f} s  others {cores:.2f} cores"
        )
        held = self._held(variant)
        if variant == SAVES and not self.engines[variant].reset_prefix_cache(reset_connector=True):
            self.say("WARNING: the store could not be emptied")
        if number > 0:
            figures.p50.append(result.ttft_s(0.5))
            figures.total.append(result.total_s)
            figures.others_cores.append(cores)
            figures.held_under_load += held
            figures.unexpected_hits += sum(map(bool, result.cached_tokens))

    def _held(self, variant: str) -> list[float]:
        return [] if variant == BARE else list(self.engines[variant].call("benchmarks.miss:take_held"))

    def _single(self, variant: str, prompt: Sequence[int]) -> tuple[float, list[float], int]:
        result = self.engines[variant].run([prompt], max_tokens=1)
        time.sleep(0.02)  # engine and daemon come to rest
        return result.ttft_s(0.5), self._held(variant), result.cached_tokens[0]

    def _single_miss(self, variant: str, *, warm_up: bool) -> None:
        (prompt,) = self._new_prompts(1, self.setting.single_tokens)
        seconds, held, hit = self._single(variant, prompt)
        if not warm_up:
            self.figures[variant].single_misses.append(seconds)
            self.figures[variant].held_misses += held
            self.figures[variant].unexpected_hits += hit > 0

    def _single_hits(self, count: int) -> None:
        """The same stored prompts, one after the other, on an idle engine with and without the look at the flag."""
        prompts = self._new_prompts(count, self.setting.single_tokens)
        self.engines[SAVES].run(prompts, max_tokens=1)
        self.engines[SAVES].call("benchmarks.miss:take_held")
        time.sleep(3)  # what was copied is put
        whole = (self.setting.single_tokens - 1) // 32 * 32
        for number, prompt in enumerate(prompts):
            for variant in (MISSES, NO_SPIN) if number % 2 else (NO_SPIN, MISSES):
                seconds, held, hit = self._single(variant, prompt)
                if hit == whole:
                    self.figures[variant].single_hits.append(seconds)
                    self.figures[variant].held_hits += held


def spread(values: Sequence[float], scale: float = 1.0, digits: int = 3) -> str:
    """Median (quartiles)."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return f"{middle * scale:.{digits}f} ({low * scale:.{digits}f} to {high * scale:.{digits}f})"


def report(figures: dict[str, Figures]) -> list[str]:
    """Lines: ratios to the engine without connector, round by round, and what a single request takes longer."""
    bare = figures[BARE]
    lines = ["median (quartiles)", ""]
    for variant in (MISSES, SAVES):
        each = figures[variant]
        p50 = [mine / theirs for mine, theirs in zip(each.p50, bare.p50, strict=True)]
        rate = [theirs / mine for mine, theirs in zip(each.total, bare.total, strict=True)]
        lines.append(
            f"under load, {variant}: TTFT p50 x {spread(p50)}, throughput x {spread(rate)}, "
            f"held {spread(each.held_under_load, 1e3)} ms"
        )
    lines.append("")
    lines.append(f"single request, {BARE}: {spread(bare.single_misses, 1e3, 2)} ms")
    for variant in (MISSES, NO_SPIN, SAVES):
        added = [m - t for m, t in zip(figures[variant].single_misses, bare.single_misses, strict=True)]
        held = figures[variant].held_misses
        lines.append(
            f"single request, {variant}: adds {spread(added, 1e3, 2)} ms, held {spread(held, 1e3)} ms, "
            f"{sum(each > 0.002 for each in held)} of {len(held)} longer than 2 ms"
        )
    lines.append("")
    for variant in (MISSES, NO_SPIN):
        if hits := figures[variant].single_hits:
            name = variant.replace("misses", "hit")
            held = figures[variant].held_hits
            lines.append(
                f"single {name}: {spread(hits, 1e3, 2)} ms, held {spread(held, 1e3)} ms, {len(hits)} full hits"
            )
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.miss", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds under load (default %(default)s)")
    parser.add_argument("--singles", type=int, default=60, help="single requests per variant (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write settings and all figures to this file")
    parser.add_argument("--work", type=Path, default=REPO / "build", help="where the checkpoint is kept")
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.singles < 1:
        parser.error(f"--rounds and --singles must be at least 1, not {options.rounds} and {options.singles}")
    exit_on_sigterm()
    setting, ran_on = Setting(), machine()

    def say(line: str) -> None:
        print(line, flush=True)

    say(f"machine: {json.dumps(ran_on)}")
    say(f"setting: {json.dumps(asdict(setting))}")
    figures = Bench(setting, make_checkpoint(options.work / "checkpoints", PEERS), say).run(
        options.rounds, options.singles
    )
    say("")
    for line in report(figures):
        say(line)
    wrong = sum(each.unexpected_hits for each in figures.values())
    if wrong:
        say(f"WARNING: {wrong} requests hit something although nothing was to be found")
    if options.json is not None:
        written: dict[str, Any] = {"machine": ran_on, "setting": asdict(setting)}
        written["variants"] = {name: asdict(each) for name, each in figures.items()}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(written, indent=2) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
