"""`make bench-serve`: a recorded trace through the HTTP server, by variant; one JSON as of `make bench`.

As root, for the limited link.

With the variant kvprefetch-sessions the requests name their sessions, so the daemon stages in the pauses.  Staging has
as much as the sessions hold, a quarter of it for saves.  The store has what was known before the slice; engines save
the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.bench import page, variants
from benchmarks.bench.__main__ import ENVIRONMENT, FORMAT, PUBLISHED, WORK, write
from benchmarks.bench.figures import token_differences
from benchmarks.bench.served import Daemon as Columns
from benchmarks.bench.served import Requests, Served
from benchmarks.bench.setting import MODEL, Setting
from benchmarks.machine import command, machine
from benchmarks.serve import trace
from benchmarks.serve.server import KEPT, PREFIX, Server, columns, replay
from benchmarks.serve.sessions import Line, of_requests, returning, staged_share
from benchmarks.serve.trace import QUESTIONS, SHARED, TRACES
from tests.lab import connectors, control, link, process
from tests.lab.checkpoint import make_checkpoint
from tests.lab.daemon import Daemon
from tests.lab.engine import EngineSpec
from tests.lab.interference import Interference, children_s, cpu_s
from tests.lab.link import LimitedLink
from tests.lab.passes import percentile
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.support.auditor import ask_daemon

NO_CONNECTOR = "no-connector"
VARIANTS = (variants.LOCAL, variants.OURS, variants.ON_DEMAND, "upstream-async")
BLOCK, LONGEST = 32, 4000  # tokens
PLACES = 4
ROOM = 3  # of the longest requests fit the pool: with one, it has the engine for itself
CAPACITY_REQUESTS = 60
START_MIN = {"conversation": 30.0, "agents": 8.0}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("trace", choices=TRACES)
    parser.add_argument(
        "--data",
        type=Path,
        default=SHARED,
        help=f"folder with {' and '.join(str(each[0]) for each in TRACES.values())}",
    )
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {NO_CONNECTOR},{','.join(variants.ALL)}")
    parser.add_argument("--requests", type=int, default=200, help="of the trace (default %(default)s)")
    parser.add_argument(
        "--start-min", type=float, help="minute of the trace that it begins with (default: each its own)"
    )
    parser.add_argument("--within-min", type=float, help="agents: sessions begin within so many minutes (default: any)")
    parser.add_argument("--load", type=float, default=0.7, help="share of what the engine can serve with all KV local")
    parser.add_argument("--fetch", type=float, default=0.15, help="time to fetch a token / time to compute it")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=18.0, help="no variant begins after so many")
    parser.add_argument("--out", type=Path, default=WORK, help="folder of the JSON (default build/bench)")
    parser.add_argument(
        "--publish", action="store_true", help=f"also write to {PUBLISHED.relative_to(process.REPO)}/DATE"
    )
    return parser


class Run:
    """One trace's run. `result` is whole at any moment: what was measured so far."""

    def __init__(self, options: argparse.Namespace, some: trace.Slice) -> None:
        self._options, self._slice, self._begun = options, some, time.monotonic()
        self._chosen = options.variants.split(",")
        self.live = variants.SESSIONS in self._chosen  # the store has what was known before, and engines save the rest
        self.sessions = [f"agent-{each.session}" for each in some.calls]
        longest = -(-max(each.input_tokens + each.output_tokens for each in some.calls) // BLOCK) + 1
        mean = statistics.fmean((each.input_tokens + each.output_tokens) / BLOCK for each in some.calls)
        self._model = make_checkpoint(process.REPO / "build" / "checkpoints", MODEL)
        self._folder = process.scratch("bench-serve")
        self._trace = trace.write_timed(some.calls, self._folder / "trace.jsonl")
        self._tokens: list[tuple[str, object, Mapping[int, list[int]]]] = []
        self._spec = EngineSpec(
            model=self._model,
            block_size=BLOCK,
            max_model_len=longest * BLOCK,
            max_num_seqs=PLACES,
            num_gpu_blocks=max(ROOM * longest, round((PLACES + 2) * mean)),
        )
        self._roomy = self._spec.but(num_gpu_blocks=sum(-(-each.input_tokens // BLOCK) + 9 for each in some.calls))
        self._prompts = self._expand(some.calls)
        self._stored = self._expand(
            [trace.Call(0.0, len(each) * some.chunk, 1, each) for each in some.stored(before=self.live)]
        )
        self.result: dict[str, Any] = {
            "rounds": {"wanted": options.rounds, "done": 0}, "left_out": {}, "problems": [], "points": [],
            "tokens": {"compared": 0, "different": {}},
        }  # fmt: skip

    def close(self) -> None:
        """Remove its folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self._begun:6.1f} s] {line}", flush=True)

    def _expand(self, calls: list[trace.Call]) -> list[list[int]]:
        """The prompts, made by the client's own code. They depend on Python's hash(str), so PYTHONHASHSEED is set."""
        from transformers import AutoTokenizer
        from vllm.benchmarks.datasets.datasets import TimedTrace

        path = trace.write_timed(calls, self._folder / "some.jsonl")
        labels = {
            f"timed_trace_label_{each}": each for each in ("timestamp", "input_length", "output_length", "hash_ids")
        }
        with contextlib.redirect_stdout(sys.stderr):
            made = TimedTrace(
                dataset_path=str(path), random_seed=0, timed_trace_chunk_hash_size=self._slice.chunk, **labels
            )
            samples = made.sample(AutoTokenizer.from_pretrained(self._model), len(calls))
        return [list(sample.prompt) for sample in samples]

    def run(self) -> None:
        some, options = self._slice, self._options
        inputs = statistics.fmean(each.input_tokens for each in some.calls)
        outputs = statistics.fmean(each.output_tokens for each in some.calls)
        self.say(
            f"{len(some.calls)} requests of {some.span_s:.0f} s, on average {inputs:.0f} tokens in, {outputs:.0f} out; "
            f"{some.hit_share:.0%} of the input known before; {some.dropped} longer ones left out"
        )
        wanted = some.stored_blocks(BLOCK, before=self.live)
        size = some.stored_blocks(BLOCK) * BLOCK * MODEL.kv_bytes_per_token
        with contextlib.ExitStack() as stack:
            self._link = stack.enter_context(LimitedLink(rate_mbit=10_000))
            self._store = stack.enter_context(Store(memory="2 GB", link=self._link))
            config, ip = self._store.config, self._store.host_ip
            self._spec = self._spec.but(mooncake_config=config, host_ip=ip)
            staging = f"{self._staging_bytes(size) >> 20}MiB"
            self._daemon = stack.enter_context(Daemon(mooncake_config=config, staging=staging))
            self.say(f"storing {len(self._stored)} prefixes, {size >> 20} MiB")
            with Server(self._spec.but(kv_transfer=connectors.upstream()), dict(os.environ)) as server:
                server.serve(self._stored, [1] * len(self._stored), 1)
                if (there := self._store.wait_keys(wanted, timeout_s=60)) < wanted:
                    self._problem(f"the store took {there} of {wanted} blocks")
            self._base = self._store.names
            capacity, compute_s = self._capacity()
            mbit = 8e-6 * MODEL.kv_bytes_per_token / (options.fetch * compute_s)
            self._link.limit(round(mbit, 3))
            pace = (len(some.calls) - 1) / (some.span_s * options.load * capacity)
            self.say(
                f"capacity {capacity:.2f} requests/s with all KV local, {1e6 * compute_s:.0f} us to compute a token: "
                f"link {mbit:.0f} Mbit/s, a pass takes {some.span_s * pace:.0f} s"
            )
            setting = Setting(
                arrivals="open", level=options.load, requests=len(some.calls), places=PLACES, link_mbit=mbit
            )
            self.result["trace"] = {
                "name": options.trace,
                "k": TRACES[options.trace][2],
                "chunk_tokens": some.chunk,
                "requests": len(some.calls),
                "left_out_as_longer": some.dropped,
                "start_min": options.start_min,
                "span_s": round(some.span_s, 1),
                "pace": pace,
                "mean_input_tokens": inputs,
                "mean_output_tokens": outputs,
                "hit_share": some.hit_share,
                "capacity_requests_s": capacity,
                "compute_us_per_token": 1e6 * compute_s,
                "fetch_share": options.fetch,
                "staging": staging,
                "pool_blocks": self._spec.num_gpu_blocks,
            }
            point = {"at": options.load, "setting": asdict(setting), "passes": list[dict[str, Any]]()}
            self.result["points"] = [point]
            for number in range(options.rounds):
                for variant in self._chosen[:: -1 if number % 2 else 1]:  # so that a drift of the machine meets all
                    if time.monotonic() - self._begun > 60 * options.minutes:
                        self._problem(
                            f"round {number + 1}: {variant} and what follows left out for want of time (--minutes)"
                        )
                        return
                    point["passes"].append({"round": number, "set": 0, **self._pass(variant, pace)})
                    self._compare()
                self.result["rounds"]["done"] = number + 1

    def _problem(self, line: str) -> None:
        self.result["problems"].append(line)
        self.say(f"WARNING: {line}")

    def _staging_bytes(self, stored_bytes: int) -> int:
        """As much as the sessions hold where these are compared, and room for the longest prompt in any case."""
        longest = 2 * self._spec.max_model_len * MODEL.kv_bytes_per_token
        return max(longest, stored_bytes) if self.live else max(64 << 20, stored_bytes // 2)

    @contextlib.contextmanager
    def _serving(self, variant: str) -> Iterator[Server]:
        """A new server, warmed up; for the ideal with all that the store has in its own cache."""
        spec = self._roomy if variant == variants.LOCAL else self._spec
        transfer = variants.transfer(variant, self._daemon.socket)
        if self.live and variants.ours(variant):
            self._restore()
            transfer = {**(transfer or {}), "kv_role": "kv_both"}
        with Server(spec.but(kv_transfer=transfer), dict(os.environ)) as server:
            if variant == variants.LOCAL:
                server.serve(self._stored, [1] * len(self._stored), 1)
            warm = make_prompts(PLACES, self._spec.max_model_len // 2, vocab=MODEL.vocab, seed=99)
            server.serve(warm, [8] * len(warm), PLACES)
            yield server

    def _restore(self) -> None:
        """Remove what the pass before saved."""
        control.remove(self._store.config, list(self._store.names - self._base))

    def _capacity(self) -> tuple[float, float]:
        """Measure requests a second with all KV local, and seconds to compute a token of a prompt."""
        few = self._prompts[:CAPACITY_REQUESTS]
        outputs = [each.output_tokens for each in self._slice.calls[:CAPACITY_REQUESTS]]
        with self._serving(variants.LOCAL) as server:
            alone = make_prompts(6, self._spec.max_model_len // 2, vocab=MODEL.vocab, seed=98)
            begun = time.monotonic()
            server.serve(alone, [1] * len(alone), 1)
            compute_s = (time.monotonic() - begun) / sum(map(len, alone))
            begun = time.monotonic()
            server.serve(few, outputs, 2 * PLACES)
            return len(few) / (time.monotonic() - begun), compute_s

    def _pass(self, variant: str, pace: float) -> dict[str, Any]:
        """Serve the trace once with a new server."""
        self.say(f"starting {variant}")
        with self._serving(variant) as server:
            lines, told = (len(self._daemon.records(f"{each}.done")) for each in ("request", "announcement"))
            helpers = [self._daemon.pid, self._store.master_pid, *self._store.node_pids]
            before = (cpu_s(server.pids), cpu_s(helpers), self._link.received_bytes)
            others, begun, client = Interference(), time.monotonic(), children_s()
            served, names, more = self._replayed(server, variant, pace)
            # The client ended, so the processor time that it took counts as others', and is taken from that.
            cores = max(0.0, others.cores() - (children_s() - client) / (time.monotonic() - begun))
            served.engine_cpu_s = round(cpu_s(server.pids) - before[0], 2)
            served.other_cpu_s = round(cpu_s(helpers) - before[1], 2)
            served.link_bytes = self._link.received_bytes - before[2]
            served.others_cores, served.load = round(cores, 2), round(os.getloadavg()[0], 2)
            if variants.ours(variant):
                served.daemon = self._of_daemon(lines)
            if self.live:
                ended = list(of_requests(names, self._daemon.records("request.done")[lines:]))
                announced = self._daemon.records("announcement.done")[told:]
                more["counts"] = {**more.get("counts", {}), **self._of_sessions(served.requests, ended, announced)}
        self._tokens.append((variant, 0, served.tokens))
        kept = {"variant": variant, **served.kept(), **more}
        if served.daemon is not None:
            kept["daemon"]["unused_bytes"] = self._unused_bytes
        times = [1e3 * each for each in served.requests.ttft_s]
        self.say(
            f"  {variant:22} TTFT mean {statistics.fmean(times):.0f} ms, p50 {percentile(times, 0.5):.0f}, "
            f"p99 {percentile(times, 0.99):.0f}; {len(times) / served.total_s:.2f} requests/s; "
            f"link {served.link_bytes / 1e6:.0f} MB; CPU {served.engine_cpu_s:.1f} + {served.other_cpu_s:.1f} s; "
            f"others used {served.others_cores:.1f} cores"
            + "".join(f", {name} {value}" for name, value in more.get("counts", {}).items())
        )
        return kept

    def _replayed(self, server: Server, variant: str, pace: float) -> tuple[Served, list[str], dict[str, Any]]:
        """Serve the trace; return what the pass gave, how requests are called, and what else the result keeps of it."""
        sessions = self.sessions if variant == variants.SESSIONS else []
        limit_s, out = 120 + 4 * self._slice.span_s * pace, self._folder / "out.json"
        told = replay(server, self._model, self._trace, self._slice.chunk, pace, out, limit_s, sessions)
        requests, answers = columns(told)
        served = Served(requests, total_s=round(told["duration"], 4), tokens=answers)
        names = [f"cmpl-{PREFIX}{number}" for number in range(len(self.sessions))]
        return served, names, {"vllm_bench": {name: told[name] for name in KEPT}}

    def _of_sessions(
        self, requests: Requests, ended: Sequence[tuple[int, Line]], announced: Sequence[Line]
    ) -> dict[str, float]:
        """Return the mean of turns that came back, the share of their blocks that was there, and bytes in vain."""
        times, block_bytes = requests.ttft_s, BLOCK * MODEL.kv_bytes_per_token
        back = [times[each] for each in returning(self._slice)]
        found = {"returning_s": round(statistics.fmean(back), 5)} if back else {}
        if (share := staged_share(ended, self._slice, BLOCK, block_bytes)) is not None:
            expired = sum(each["fetched_blocks"] for each in announced if each["outcome"] == "expired")
            found |= {"staged_share": share, "expired_bytes": block_bytes * expired}
        return found

    def _of_daemon(self, lines: int) -> Columns:
        found = Columns()
        self._daemon.wait_record("request.done", count=lines + len(self._slice.calls), timeout_s=5)
        for line in self._daemon.records("request.done")[lines:]:
            found.add(line)
        (engine,) = ask_daemon(self._daemon.socket).engines
        self._unused_bytes = (int(engine["blocks_wasted"]) + int(engine["slots_unused"])) * int(engine["block_bytes"])
        return found

    def _compare(self) -> None:
        compared, different = token_differences(self._tokens)
        self.result["tokens"] = {"compared": compared, "different": different}


def main(argv: list[str] | None = None) -> int:
    parser = arguments()
    options = parser.parse_args(argv)
    where, tokens_per_hash, k = TRACES[options.trace]
    path = options.data / where
    if not path.exists():
        print(f"bench-serve: no trace here: {path}: give its folder (--data)", file=sys.stderr)
        return 0
    if unknown := [
        each for each in options.variants.split(",") if each not in (NO_CONNECTOR, *VARIANTS, *variants.ALL)
    ]:
        parser.error(f"no such variant: {', '.join(unknown)}")
    if taken := {*variants.LMCACHE, variants.RECOMPUTED} & set(options.variants.split(",")):
        parser.error(f"not through the HTTP server: {', '.join(sorted(taken))}")
    if (why_not := link.available()) is not None:
        print(f"bench-serve needs a limited link: {why_not}", file=sys.stderr)
        return 1
    process.exit_on_sigterm()
    os.environ.update(ENVIRONMENT)
    within_s = options.within_min and 60 * options.within_min
    calls = trace.spread(trace.conversation(path)) if options.trace == "conversation" else trace.agents(path, within_s)
    if options.start_min is None:
        options.start_min = START_MIN[options.trace]
    start_s = 60 * options.start_min
    some = trace.scaled(
        calls, k=k, tokens_per_hash=tokens_per_hash, start_s=start_s, count=options.requests, longest=LONGEST
    )
    begun, at = time.monotonic(), datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    run = Run(options, some)
    piece = "sessions" if run.live else options.trace
    result: dict[str, Any] = {
        "format": FORMAT,
        "piece": piece,
        "question": QUESTIONS[piece],
        "axis": "rate of arrivals / capacity with all KV local",
        "logarithmic": False,
        "quick": False,
        "command": command("benchmarks.serve", sys.argv[1:] if argv is None else argv),
        "begun": at,
        "machine": machine(),
        "environment": ENVIRONMENT,
        "block_bytes": BLOCK * MODEL.kv_bytes_per_token,
        "failed": None,
    }
    try:
        run.run()
    except Exception as error:
        result["failed"] = f"{type(error).__name__}: {error}"
        print(result["failed"], file=sys.stderr)
    finally:
        run.close()
    result |= {"seconds": round(time.monotonic() - begun, 1), "load_at_end": round(os.getloadavg()[0], 2), **run.result}
    print("\n".join([*page.means(result), *page.reading(result)]), flush=True)
    print(f"{piece}: {write(result, options.out)}", flush=True)
    if options.publish and not result["failed"]:
        print(f"{piece}: {write(result, PUBLISHED / result['begun'][:10])}", flush=True)
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # prompts depend on it, and keys of vLLM's blocks
        argv = [sys.executable, "-m", "benchmarks.serve", *sys.argv[1:]]
        os.execve(sys.executable, argv, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
