"""Shows the whole path in one command: a daemon with memory and disk, real engines, four ways to get the KV.

The same prompts are recomputed, loaded only when the scheduler asks, prefetched from arrival on, and taken from the
engine's own cache (the ideal). The store's memory is smaller than the data, so that loads come from disk.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from dataclasses import dataclass

from tests.lab import connectors, process
from tests.lab.checkpoint import Shape, make_checkpoint
from tests.lab.daemon import Daemon, Record
from tests.lab.engine import Engine, EngineError, EngineSpec
from tests.lab.passes import Pass
from tests.lab.prompts import make_prompts

# float32: recomputed and loaded tokens are then exactly equal. Recompute takes several times as long as loading.
MODEL = Shape(hidden=512, intermediate=1024, layers=8, heads=8, kv_heads=1, head_dim=64)
BLOCK = 32
PROMPTS = 24
PROMPT_TOKENS = 1000
OUTPUT_TOKENS = 16
OUTSTANDING = 12
MEMORY_MIB = 32
STAGING_MIB = 64
# So many prompts are stored at a time, with a pause in which the store moves them to disk.
FILL_AT_ONCE = 3
FILL_PAUSE_S = 3.0

HIT_TOKENS = (PROMPT_TOKENS - 1) // BLOCK * BLOCK
DATA_MIB = PROMPTS * (PROMPT_TOKENS // BLOCK) * BLOCK * MODEL.kv_bytes_per_token / 2**20
CHANCE = (
    "This shows that everything works, and what recomputing costs. What parts the other three rows is chance in one\n"
    "pass of so few requests, the more so beside other programs: `make bench-ttft` compares (docs/BENCHMARKS.md)."
)
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


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to get the KV, and its result."""

    name: str
    result: Pass
    records: list[Record]

    def bytes_from(self, medium: str) -> int:
        """Bytes read from "disk" or "memory" for this pass, as the daemon logged them."""
        return sum(int(each.get(f"bytes_{medium}") or 0) for each in self.records)


class Demo:
    """Runs the four modes and prints each step with the time since the start."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.prompts = make_prompts(PROMPTS, PROMPT_TOKENS, vocab=MODEL.vocab, seed=7)

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self._begun:5.1f} s] {line}", flush=True)

    def run(self) -> list[Mode]:
        """Measure the four modes."""
        model = make_checkpoint(process.REPO / "build" / "checkpoints", MODEL)
        plain = EngineSpec(model=model, num_gpu_blocks=2 * PROMPTS * PROMPT_TOKENS // BLOCK)
        with contextlib.ExitStack() as stack:
            work = process.scratch("demo")
            stack.callback(shutil.rmtree, work, ignore_errors=True)
            (work / "disk").mkdir()
            self.say(f"starting the daemon: {MEMORY_MIB} MiB of memory, and disk for {DATA_MIB:.0f} MiB of KV")
            daemon = stack.enter_context(
                Daemon(memory=f"{MEMORY_MIB}MiB", staging=f"{STAGING_MIB}MiB", disk=str(work / "disk"))
            )
            # A pool for four requests: with more, KV could be loaded ahead into free blocks, which load does not leave.
            tight = plain.but(num_gpu_blocks=4 * (PROMPT_TOKENS + OUTPUT_TOKENS + BLOCK) // BLOCK + 8)
            prefetch = self._engine(
                stack, "prefetch", tight.but(kv_transfer=connectors.ours(daemon.socket, wait_policy="adaptive"))
            )
            late = connectors.ours(daemon.socket, wait_policy="adaptive", hint_on_arrival=False)
            demand = self._engine(stack, "on demand", tight.but(kv_transfer=late))
            bare = self._engine(stack, "without connector", plain)

            self._fill(prefetch)
            modes = [self._measure("recomputed", bare, daemon, reset=True)]
            for warm_up in (True, False):
                for name, engine in (("on demand", demand), ("prefetched", prefetch)):
                    mode = self._measure(name, engine, daemon, reset=True, warm_up=warm_up)
                    if not warm_up:
                        modes.append(mode)
            self._measure("all local", bare, daemon, reset=False, warm_up=True)
            modes.append(self._measure("all local", bare, daemon, reset=False))
            self.say("stopping")
        return modes

    def _engine(self, stack: contextlib.ExitStack, name: str, spec: EngineSpec) -> Engine:
        self.say(f"starting a vLLM engine: {name}")
        return stack.enter_context(Engine(spec))

    def _fill(self, engine: Engine) -> None:
        for start in range(0, PROMPTS, FILL_AT_ONCE):
            self.say(f"filling the store: {start} of {PROMPTS} prompts")
            engine.run(self.prompts[start : start + FILL_AT_ONCE], max_tokens=1)
            time.sleep(FILL_PAUSE_S)

    def _measure(self, name: str, engine: Engine, daemon: Daemon, *, reset: bool, warm_up: bool = False) -> Mode:
        if reset and not engine.reset_prefix_cache():
            self.say(f"WARNING: the prefix cache could not be emptied before: {name}")
        uses_daemon = engine.spec.kv_transfer is not None
        before = len(daemon.records("request.done"))
        result = engine.run(self.prompts, max_tokens=OUTPUT_TOKENS, concurrency=OUTSTANDING, timeout_s=90)
        if uses_daemon:
            daemon.wait_record("request.done", count=before + PROMPTS, timeout_s=5)
        records = daemon.records("request.done")[before:] if uses_daemon else []
        what = f"{name} (warm-up)" if warm_up else name
        self.say(f"{what}: {PROMPTS} requests in {result.total_s:.2f} s, TTFT p50 {result.ttft_s(0.5):.3f} s")
        return Mode(name, result, records)


def table(modes: list[Mode]) -> list[str]:
    """Return a line for each mode, and compare its tokens with the recomputed ones."""
    reference = modes[0].result.tokens
    lines = [
        f"{'':12}{'TTFT p50':>10}{'TTFT p99':>10}{'total':>9}{'hit tokens':>12}{'equal tokens':>14}"
        f"{'from disk':>12}{'from memory':>13}"
    ]
    for mode in modes:
        result = mode.result
        hits = f"{sum(result.cached_tokens) / len(result.requests):.0f}/{PROMPT_TOKENS}"
        line = (
            f"{mode.name:12}{result.ttft_s(0.5):>8.3f} s{result.ttft_s(0.99):>8.3f} s{result.total_s:>7.2f} s{hits:>12}"
        )
        line += f"{'yes' if result.tokens == reference else 'NO':>14}"
        if mode.records:
            line += "".join(
                f"{mode.bytes_from(medium) / 2**20:>{width}.1f} MiB" for medium, width in (("disk", 8), ("memory", 9))
            )
        lines.append(line)
    return lines


def timeline(record: Record) -> list[str]:
    """Return one request's trace as lines, from the daemon's ``request.done`` line, in the order of time."""
    happened = [(float(at), name) for name in TIMES if (at := record.get(f"{name}_ms")) is not None]
    lines = ["     0.0 ms  it arrived in the engine, which pushed the hint"]
    lines += [f"{at:8.1f} ms  {WORDS[name]}" for at, name in sorted(happened)]
    if (hidden := record.get("hidden_fraction")) is not None:
        lines.append(f"{100 * float(hidden):8.1f} %   of look-up and transfer was hidden by the queue")
    return lines


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__).parse_args(argv)
    process.exit_on_sigterm()
    try:
        modes = Demo().run()
    except EngineError as error:
        print(f"demo: an engine failed: {error}", file=sys.stderr)
        return 1
    print()
    print("\n".join(table(modes)))
    prefetched = next(mode for mode in modes if mode.name == "prefetched")
    loaded = sorted((each for each in prefetched.records if each.get("loaded_ms")), key=lambda each: each["loaded_ms"])
    if loaded:
        middle = loaded[len(loaded) // 2]
        print(f"\nOne prefetched request ({middle.get('request_id')}):")
        print("\n".join(timeline(middle)))
    print()
    failed = False
    for mode in modes[1:]:
        if mode.result.tokens != modes[0].result.tokens:
            failed = True
            print(f"FAILED: {mode.name}: tokens differ from the recomputed ones")
        short = sum(hit != HIT_TOKENS for hit in mode.result.cached_tokens)
        if short:
            print(f"note: {mode.name}: {short} of {PROMPTS} requests had fewer than {HIT_TOKENS} hit tokens")
    print("All modes gave the same tokens." if not failed else "The modes did not give the same tokens.")
    print(CHANCE)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
