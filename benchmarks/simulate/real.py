"""`make simulate-compare`: one load on the real engine, daemon and store, beside the simulation's prediction.

Calibration passes before the compared ones measure the simulation's parameters, one request at a time unless stated
otherwise.  Loads: a closed loop behind a full queue, and Poisson arrivals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.simulate.client import over_when_asked
from benchmarks.simulate.engine import EngineModel, full_attention
from benchmarks.simulate.link import MediumModel
from benchmarks.simulate.node import NodeModel
from benchmarks.simulate.run import Result, Scenario, simulate
from benchmarks.simulate.waiting import POLICIES
from benchmarks.simulate.workload import Load, fixed
from tests.lab import connectors
from tests.lab.checkpoint import PEERS, make_checkpoint
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.interference import Interference
from tests.lab.link import LimitedLink, available
from tests.lab.passes import Pass
from tests.lab.process import REPO, exit_on_sigterm
from tests.lab.prompts import make_prompts
from tests.lab.store import Store

BLOCK_TOKENS, SLOTS, POOL_BLOCKS, BATCHED_TOKENS = 32, 4, 200, 2048
PROMPT_TOKENS, SHORT_TOKENS, OUTPUT_TOKENS = 1500, 600, 32
BLOCK_BYTES = PEERS.kv_bytes_per_token * BLOCK_TOKENS
CHUNK_BYTES = 4 << 20
STAGING_BYTES, SAVE_SHARE = 128_000_000, 0.25
FETCH_THREADS = 1
LINK_MBIT = 1000.0
REPEATS = 5
LONG_OUTPUT_TOKENS = 400
FILL_PASSES = 4
# Calibration measures slow loads, too, which another policy may give up.
PATIENT = {"extra_args": {"kv_transfer_params": {"kvprefetch": {"wait_policy": "wait"}}}}


def hit_blocks(tokens: int) -> int:
    return (tokens - 1) // BLOCK_TOKENS


WHOLE_BLOCKS = hit_blocks(PROMPT_TOKENS)


@dataclass(slots=True)
class Measured:
    """Figures of the compared passes, one per round; seconds, and a fraction."""

    ttft_p50: list[float] = field(default_factory=list)
    ttft_p99: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)
    """Cores that other programs kept busy during a pass."""

    def last(self) -> str:
        """Return the figures of the last pass for people."""
        times = f"p50 {self.ttft_p50[-1]:.3f}  p99 {self.ttft_p99[-1]:.3f}  total {self.total[-1]:.2f} s"
        return f"{times}  hidden {self.hidden[-1]:.3f}  (others used {self.others_cores[-1]:.1f} cores)"


@dataclass(frozen=True, slots=True)
class Calibration:
    """The simulation's parameters of this machine. Seconds, bytes and tokens per second."""

    prefill_tokens_per_s: float
    step_s: float
    sequence_s: float
    admit_s: float
    message_s: float
    look_up_s: float
    call_latency_s: float
    link_bytes_per_s: float
    copy_bytes_per_s: float


class Bench:
    """The running parts and the prompts that the store holds."""

    def __init__(self, engine: Engine, daemon: Daemon, prompts: list[list[int]]) -> None:
        self.engine, self.daemon, self.prompts = engine, daemon, prompts
        self._fresh = random.Random(99)

    def one_by_one(self, prompts: Sequence[list[int]], *, local: bool = False, outputs: int = 1) -> list[Pass]:
        """Run each prompt alone; `local` leaves the engine's own prefix cache as it is."""
        passes = []
        for prompt in prompts:
            if not local:
                self.engine.reset_prefix_cache()
            passes.append(self.engine.run([prompt], max_tokens=outputs, sampling=PATIENT))
        return passes

    def fresh(self, tokens: int) -> list[int]:
        """Return a prompt that no request had before."""
        return [self._fresh.randrange(16, PEERS.vocab) for _ in range(tokens)]

    def log(self, event: str, since: int) -> list[dict[str, Any]]:
        return self.daemon.records(event)[since:]

    def count(self, event: str) -> int:
        return len(self.daemon.records(event))

    def calibrate(self) -> Calibration:
        """Measure the parameters, each as the median of a few passes."""
        for prompt in (self.fresh(PROMPT_TOKENS), self.fresh(SHORT_TOKENS)):
            self.one_by_one([prompt])  # warms up
        long = self._alone([self.fresh(PROMPT_TOKENS) for _ in range(REPEATS)])
        short = self._alone([self.fresh(SHORT_TOKENS) for _ in range(REPEATS)])
        prefill = (PROMPT_TOKENS - SHORT_TOKENS) / (long - short)
        tail_s = (PROMPT_TOKENS - WHOLE_BLOCKS * BLOCK_TOKENS) / prefill
        self.one_by_one(self.prompts[:1])
        local = self._alone(self.prompts[:1] * REPEATS, local=True)
        alone, four = self._decode_step(1), self._decode_step(SLOTS)
        sequence = max(0.0, (four - alone) / (SLOTS - 1))
        # Without the first prompt, which is in staging already.
        hits, done = self._hits(range(1, REPEATS + 1))
        rate, latency = fit_line(self._fetches_beside_decoding(range(REPEATS + 1, 3 * REPEATS + 1)))
        look_up = statistics.median((each["looked_up_ms"] - each["hint_seen_ms"]) / 1e3 for each in done)
        message = statistics.median(each["hint_seen_ms"] for each in done) / 1e3
        whole = [(each, hit) for each, hit in zip(done, hits, strict=True) if each["loaded_blocks"] == WHOLE_BLOCKS]
        copy = statistics.median(hit.ttft_s(0.5) - each["claimed_ms"] / 1e3 - local for each, hit in whole)
        return Calibration(
            prefill_tokens_per_s=prefill,
            step_s=alone - sequence,
            sequence_s=sequence,
            admit_s=max(0.0, local - tail_s - alone),
            message_s=message,
            look_up_s=look_up,
            call_latency_s=max(0.0, latency),
            link_bytes_per_s=rate,
            copy_bytes_per_s=WHOLE_BLOCKS * BLOCK_BYTES / max(copy, 1e-4),
        )

    def _alone(self, prompts: Sequence[list[int]], *, local: bool = False) -> float:
        """Return the median time to first token of requests alone."""
        return statistics.median(each.ttft_s(0.5) for each in self.one_by_one(prompts, local=local))

    def _hits(self, numbers: range) -> tuple[list[Pass], list[dict[str, Any]]]:
        """Run these prompts alone, loaded from the store; also return the daemon's lines about them."""
        before = self.count("request.done")
        passes = self.one_by_one([self.prompts[number] for number in numbers])
        self.daemon.wait_record("request.done", count=before + len(passes))
        return passes, self.log("request.done", before)

    def _fetches_beside_decoding(self, numbers: range) -> list[tuple[float, float]]:
        """Return (bytes, seconds) of fetches of two sizes, one at a time, while every slot of the engine decodes.

        Transfers take longer then if cores are scarce, and in the compared passes the engine is seldom idle.
        """
        self.engine.reset_prefix_cache()
        before, requests = self.count("fetch.done"), self.count("request.done")
        hits = [self.prompts[number][: SHORT_TOKENS if number % 2 else PROMPT_TOKENS] for number in numbers]
        prompts = [self.fresh(BLOCK_TOKENS) for _ in range(SLOTS)] + hits
        arrivals = [0.0] * SLOTS + [0.5 + 0.2 * number for number in range(len(hits))]
        self.engine.run(prompts, max_tokens=LONG_OUTPUT_TOKENS, arrivals_s=arrivals, sampling=PATIENT, timeout_s=180)
        self.daemon.wait_record("request.done", count=requests + len(hits))
        sizes = {hit_blocks(tokens) * BLOCK_BYTES for tokens in (PROMPT_TOKENS, SHORT_TOKENS)}
        calls = [(each["bytes"], each["duration_ms"] / 1e3) for each in self.log("fetch.done", before)]
        return [call for call in calls if call[0] in sizes]

    def _decode_step(self, sequences: int) -> float:
        """Return the seconds of a step that only decodes so many sequences."""
        prompts = [self.fresh(BLOCK_TOKENS) for _ in range(sequences)]
        result = self.engine.run(prompts, max_tokens=2 * OUTPUT_TOKENS)
        spans = [(each.finished_s or 0.0) - (each.first_token_s or 0.0) for each in result.requests]
        return statistics.median(spans) / (2 * OUTPUT_TOKENS - 1)

    def measure(self, into: Measured, **load: Any) -> None:
        """Run one compared pass: every prompt once, nothing local."""
        self.engine.reset_prefix_cache()
        before, others = self.count("request.done"), Interference()
        result = self.engine.run(self.prompts, max_tokens=OUTPUT_TOKENS, timeout_s=180, **load)
        into.others_cores.append(others.cores())
        self.daemon.wait_record("request.done", count=before + len(self.prompts))
        loaded = [each for each in self.log("request.done", before) if each["loaded_blocks"]]
        fetched = sum(each["bytes"] for each in loaded) // BLOCK_BYTES
        if fetched != (expected := len(self.prompts) * WHOLE_BLOCKS):
            print(f"WARNING: {fetched} of {expected} blocks were fetched for the {len(loaded)} requests that loaded")
        into.ttft_p50.append(result.ttft_s(0.5))
        into.ttft_p99.append(result.ttft_s(0.99))
        into.total.append(result.total_s)
        into.hidden.append(statistics.fmean(map(_hidden, loaded)) if loaded else float("nan"))


def _hidden(record: dict[str, Any]) -> float:
    """Return the simulation's hidden fraction of a request that loaded."""
    ready = record["looked_up_ms"] if record["last_byte_ms"] is None else record["last_byte_ms"]
    asked = ready if record["visited_ms"] is None else record["visited_ms"]
    return over_when_asked(record["hint_seen_ms"], ready, asked, record["claimed_ms"])


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit (bytes per second, seconds at zero bytes) to the median seconds of the two sizes in `points`."""
    small, large = sorted({size for size, _ in points})
    low, high = (statistics.median(took for size, took in points if size == each) for each in (small, large))
    rate = (large - small) / max(high - low, 1e-9)
    return rate, low - small / rate


def scenario(calibration: Calibration) -> Scenario:
    """Return the real set-up's model."""
    store = MediumModel(calibration.link_bytes_per_s, calibration.call_latency_s)
    engine = EngineModel(
        max_num_seqs=SLOTS,
        max_num_batched_tokens=BATCHED_TOKENS,
        groups=full_attention(BLOCK_TOKENS),
        block_bytes=BLOCK_BYTES,
        pool_blocks=POOL_BLOCKS,
        prefill_tokens_per_s=calibration.prefill_tokens_per_s,
        step_s=calibration.step_s,
        sequence_s=calibration.sequence_s,
        admit_s=calibration.admit_s,
        copy_bytes_per_s=calibration.copy_bytes_per_s,
    )
    node = NodeModel(
        staging_blocks=int(STAGING_BYTES * (1 - SAVE_SHARE)) // BLOCK_BYTES,
        chunk_blocks=CHUNK_BYTES // BLOCK_BYTES,
        fetch_threads=FETCH_THREADS,
        disk_threads=0,
        memory=store,
        disk=store,
        look_up_s=calibration.look_up_s,
        message_s=calibration.message_s,
    )
    return Scenario("real", "the load of the compared passes", Load(), engine, node)


def predict(
    calibration: Calibration, policy: str, count: int, arrivals: Sequence[float] | None, outstanding: int
) -> Result:
    """Simulate one compared pass."""
    lengths = [(PROMPT_TOKENS, WHOLE_BLOCKS, OUTPUT_TOKENS)] * count
    requests = fixed(lengths, arrivals or [0.0] * count, BLOCK_TOKENS)
    return simulate(
        scenario(calibration), POLICIES[policy], requests=requests, outstanding=None if arrivals else outstanding
    )


def compared(name: str, predicted: Result, measured: Measured) -> list[str]:
    """Return lines of predicted figures, measured ones (median, range), and their ratios."""
    rows = (
        ("hidden fraction", predicted.hidden_fraction, measured.hidden),
        ("TTFT p50, s", predicted.ttft_s(0.5), measured.ttft_p50),
        ("TTFT p99, s", predicted.ttft_s(0.99), measured.ttft_p99),
        ("total, s", predicted.end_ns / 1e9, measured.total),
    )
    lines = [f"{name:18}{'predicted':>10}{'measured (min-max)':>26}{'predicted/measured':>20}"]
    for label, value, values in rows:
        middle = statistics.median(values)
        spread = f"{middle:.3f} ({min(values):.3f}-{max(values):.3f})"
        lines.append(f"  {label:16}{value:>10.3f}{spread:>26}{value / middle if middle else float('nan'):>20.2f}")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate.real", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="compared passes of each load (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=48, help="requests of a pass (default %(default)s)")
    parser.add_argument("--outstanding", type=int, default=16, help="of the closed loop (default %(default)s)")
    parser.add_argument("--rate", type=float, default=6.0, help="Poisson arrivals per second (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything to this file")
    parser.add_argument("--work", type=Path, default=REPO / "build", help="where the checkpoint is kept")
    options = parser.parse_args(argv)
    exit_on_sigterm()
    print(f"machine: {json.dumps(machine())}", flush=True)
    clock = random.Random(5)
    arrivals = [0.0]
    while len(arrivals) < options.prompts:
        arrivals.append(arrivals[-1] + clock.expovariate(options.rate))
    loads: dict[str, dict[str, Any]] = {
        "closed loop": {"concurrency": options.outstanding},
        "poisson": {"arrivals_s": arrivals},
    }
    measured = {name: Measured() for name in loads}
    with contextlib.ExitStack() as stack:
        link = None
        if (why_not := available()) is None:
            link = stack.enter_context(LimitedLink(rate_mbit=LINK_MBIT))
        else:
            print(f"WARNING: no limited link ({why_not}): the store is on loopback")
        store = stack.enter_context(Store(link=link))
        extra = f"--log-level debug --chunk {CHUNK_BYTES} --fetch-threads {FETCH_THREADS} --save-share {SAVE_SHARE}"
        daemon = stack.enter_context(
            Daemon(mooncake_config=store.config, staging=str(STAGING_BYTES), extra=(*extra.split(),))
        )
        spec = EngineSpec(
            model=make_checkpoint(options.work / "checkpoints", PEERS),
            dtype=PEERS.dtype,
            block_size=BLOCK_TOKENS,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=BATCHED_TOKENS,
            num_gpu_blocks=POOL_BLOCKS,
            kv_transfer=connectors.ours(daemon.socket, wait_timeout_ms=5000),
            host_ip=store.host_ip,
        )
        engine = stack.enter_context(Engine(spec))
        prompts = make_prompts(options.prompts, PROMPT_TOKENS, vocab=PEERS.vocab)
        bench = Bench(engine, daemon, prompts)
        print("filling the store", flush=True)
        expected = options.prompts * WHOLE_BLOCKS
        for _ in range(FILL_PASSES):  # the next pass makes up for saves that found no slot
            engine.reset_prefix_cache()
            engine.run(prompts, max_tokens=1, concurrency=1, timeout_s=180)
            if store.wait_keys(expected, timeout_s=5.0) >= expected:
                break
        else:
            print(f"the store holds {store.keys} of {expected} blocks after {FILL_PASSES} passes", file=sys.stderr)
            return 1
        calibration = bench.calibrate()
        print(f"calibration: {json.dumps({key: round(value, 6) for key, value in asdict(calibration).items()})}")
        for number in range(options.rounds + 1):
            for name, load in loads.items():
                into = Measured() if number == 0 else measured[name]  # the first round warms up
                bench.measure(into, **load)
                print(f"round {number}: {name:12} {into.last()}", flush=True)
    predicted = {
        "closed loop": predict(calibration, "adaptive", options.prompts, None, options.outstanding),
        "poisson": predict(calibration, "adaptive", options.prompts, arrivals, options.outstanding),
    }
    for name, result in predicted.items():
        print("\n" + "\n".join(compared(name, result, measured[name])))
    if options.json is not None:
        figures = {name: asdict(each) for name, each in measured.items()}
        report = {"machine": machine(), "calibration": asdict(calibration), "measured": figures}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
