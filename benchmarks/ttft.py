"""Time to first token behind a saturated queue: kvprefetch against recompute, other connectors, and the ideal.

Every variant is an engine of its own, all alive at once; passes alternate between them so that a slow moment of the
machine meets all. The ideal is the same slots with a roomy KV pool and everything in the engine's own prefix cache.
One engine process differs from the next by more than rounds within it do: `--starts` runs all that several times over.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import arguments
from benchmarks.machine import machine
from tests.lab import connectors, lmcache
from tests.lab.checkpoint import PEERS, make_checkpoint
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec, KVTransfer
from tests.lab.interference import Interference, cpu_s, ours
from tests.lab.link import LimitedLink, available
from tests.lab.lmcache import LMCache
from tests.lab.passes import Pass
from tests.lab.process import exit_on_sigterm
from tests.lab.prompts import make_prompts
from tests.lab.store import Store

VARIANTS = ("local", "recompute", "upstream-sync", "upstream-async", "ours")
# Only with an interpreter that has LMCache.
LMCACHE = ("lmcache", "lmcache-eager")
IDEAL = "local"
# What loads nothing.
COMPUTING = (IDEAL, "recompute")
MEASURES = ("p50", "p99", "total")
# Interrupts and the kernel's own threads stay below this on a quiet machine.
DISTURBED_CORES = 0.2


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run; the defaults are the published comparison."""

    prompts: int = 64
    prompt_tokens: int = 1500
    output_tokens: int = 32
    output_spread: int = 16
    outstanding: int = 16
    max_num_seqs: int = 4
    block_size: int = 32
    pool_blocks: int = 200
    roomy_pool_blocks: int = 4096
    max_num_batched_tokens: int = 2048
    link_mbit: float = 1000
    staging: str = "128MB"

    def output_lengths(self) -> list[int]:
        """Output tokens of each prompt: `output_tokens` give or take up to `output_spread`, seeded.

        Were all alike, an engine whose first requests start together would end and start requests together to the end,
        with their prefills in one step: a quarter of the steps that any engine needs whose requests arrive apart.
        """
        source = random.Random(0)
        low, high = self.output_tokens - self.output_spread, self.output_tokens + self.output_spread
        return [source.randint(low, high) for _ in range(self.prompts)]

    @property
    def hit_tokens(self) -> int:
        """Tokens of a prompt that can be loaded: full blocks, and at least one token stays to be computed."""
        return (self.prompt_tokens - 1) // self.block_size * self.block_size

    @property
    def hit_blocks(self) -> int:
        """The same in blocks."""
        return self.hit_tokens // self.block_size


@dataclass(slots=True)
class Figures:
    """Per round, in seconds."""

    start: list[int] = field(default_factory=list)
    """Number of the start, from 1, whose engines ran the round."""
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    wrong_hits: int = 0
    """Requests with another number of cached tokens than the variant should have."""
    hit_tokens: set[int] = field(default_factory=set)
    others_cores: list[float] = field(default_factory=list)
    """Cores that other programs kept busy."""
    link_mb: list[float] = field(default_factory=list)
    """Megabytes that came over the link; empty without one."""
    steps: list[int] = field(default_factory=list)
    engine_cpu_s: list[float] = field(default_factory=list)
    """CPU of the engine; scheduler and worker share a process."""
    other_cpu_s: list[float] = field(default_factory=list)
    """CPU of everything else that the benchmark runs: daemon, servers, stores."""

    def add(self, start: int, result: Pass, expected_hit: int, others_cores: float) -> None:
        self.start.append(start)
        self.p50.append(result.ttft_s(0.5))
        self.p99.append(result.ttft_s(0.99))
        self.total.append(result.total_s)
        self.others_cores.append(others_cores)
        self.steps.append(result.steps)
        self.hit_tokens |= set(result.cached_tokens)
        self.wrong_hits += sum(hit != expected_hit for hit in result.cached_tokens)

    def of_starts(self, measure: str) -> dict[int, float]:
        """Median over each start's rounds, by the start's number."""
        rounds = list(zip(self.start, getattr(self, measure), strict=True))
        return {
            start: statistics.median(value for at, value in rounds if at == start) for start in sorted(set(self.start))
        }


class Bench:
    """The parts that are alive during one start."""

    def __init__(
        self, setting: Setting, model: Path, say: Callable[[str], None], lmcache_python: Path | None = None
    ) -> None:
        self.setting = setting
        self.model = model
        self.say = say
        self.prompts = make_prompts(setting.prompts, setting.prompt_tokens, vocab=PEERS.vocab)
        self.engines: dict[str, Engine] = {}
        self.tokens: dict[str, list[list[int]]] = {}
        self.lmcache_python = lmcache_python
        self.link: LimitedLink | None = None
        self.daemon: Daemon | None = None

    def spec(self, variant: str, store: Store, transfer: KVTransfer | None) -> EngineSpec:
        """The engine of a variant: all alike but for the connector, and the ideal's roomy pool."""
        setting = self.setting
        spec = EngineSpec(
            own_worker=False,
            model=self.model,
            dtype=PEERS.dtype,
            block_size=setting.block_size,
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.max_num_batched_tokens,
            num_gpu_blocks=setting.roomy_pool_blocks if variant == IDEAL else setting.pool_blocks,
            kv_transfer=transfer,
            mooncake_config=store.config,
            host_ip=store.host_ip,
        )
        return spec if variant not in LMCACHE or self.lmcache_python is None else spec.but(python=self.lmcache_python)

    @contextlib.contextmanager
    def started(self, variants: list[str]) -> Iterator[None]:
        """Start everything, and fill the store."""
        with contextlib.ExitStack() as stack:
            self.link = self._limited_link(stack)
            store = stack.enter_context(Store(link=self.link))
            transfers = {
                "upstream-sync": connectors.upstream(),
                "upstream-async": connectors.upstream(lookup_async=True),
            }
            if "ours" in variants:
                daemon = Daemon(mooncake_config=store.config, staging=self.setting.staging)
                self.daemon = stack.enter_context(daemon)
                transfers["ours"] = connectors.ours(daemon.socket, wait_policy="adaptive", key_format="vllm")
            server = None
            if self.lmcache_python is not None and not set(LMCACHE).isdisjoint(variants):
                server = stack.enter_context(LMCache(self.lmcache_python, link=self.link))
                transfers |= {variant: server.connector(eager=variant == "lmcache-eager") for variant in LMCACHE}
            # The store is filled by upstream's connector: what ours loads is then also what another wrote.
            filler = next((each for each in variants if each.startswith("upstream")), "upstream-sync")
            for variant in dict.fromkeys([*variants, filler]):
                self.say(f"starting the engine: {variant}")
                self.engines[variant] = stack.enter_context(Engine(self.spec(variant, store, transfers.get(variant))))
            self._fill(filler, store.wait_keys, self.setting.hit_blocks)
            if server is not None:
                filler = next(each for each in variants if each in LMCACHE)
                self._fill(filler, server.wait_objects, self.setting.hit_tokens // lmcache.CHUNK_TOKENS)
                server.empty_memory()
            yield

    def run(self, variants: list[str], rounds: int, figures: dict[str, Figures], start: int) -> None:
        """Measure ``rounds`` rounds after one that warms up, and add them to the variants' figures."""
        with self.started(variants):
            for number in range(rounds + 1):
                for variant in variants:
                    others, before = Interference(), self._used(variant)
                    result = self.serve(variant)
                    others_cores = others.cores()
                    engine_s, all_s, link_mb = (a - b for a, b in zip(self._used(variant), before, strict=True))
                    self.tokens[variant] = result.tokens
                    name = "warm-up" if number == 0 else f"round {number} of {rounds}"
                    self.say(
                        f"{name}: {variant:15} p50 {result.ttft_s(0.5):.3f}  p99 {result.ttft_s(0.99):.3f}  "
                        f"total {result.total_s:.2f} s{_disturbed(others_cores)}"
                    )
                    if number > 0:
                        expected_hit = 0 if variant == "recompute" else self.setting.hit_tokens
                        figures[variant].add(start, result, expected_hit, others_cores)
                        figures[variant].engine_cpu_s.append(round(engine_s, 2))
                        figures[variant].other_cpu_s.append(round(all_s - engine_s, 2))
                        if self.link is not None:
                            figures[variant].link_mb.append(round(link_mb, 1))

    def _limited_link(self, stack: contextlib.ExitStack) -> LimitedLink | None:
        why_not = available()
        if why_not is not None:
            self.say(f"WARNING: no limited link ({why_not}): the store is on loopback, loads cost less than stated")
            return None
        return stack.enter_context(LimitedLink(rate_mbit=self.setting.link_mbit))

    def _used(self, variant: str) -> tuple[float, float, float]:
        """So far: CPU seconds of the variant's engine, of all our processes, and megabytes received over the link."""
        engine_s = cpu_s([self.engines[variant].scheduler_pid])
        return engine_s, cpu_s(ours()), 0.0 if self.link is None else self.link.received_bytes / 1e6

    def _fill(self, filler: str, wait: Callable[[int], int], values_per_prompt: int) -> None:
        """One prompt after the other: computed in a batch of their own, all stores hold the same bytes of them."""
        self.say(f"filling the store with {self.setting.prompts} prompts, by {filler}")
        self.engines[filler].run(self.prompts, max_tokens=1, concurrency=1, timeout_s=180)
        expected = self.setting.prompts * values_per_prompt
        stored = wait(expected)
        if stored != expected:
            self.say(f"WARNING: the store holds {stored} values instead of {expected}")

    def serve(self, variant: str) -> Pass:
        """One pass of all prompts, from an empty prefix cache but for the ideal."""
        engine = self.engines[variant]
        if variant != IDEAL and not engine.reset_prefix_cache():
            self.say(f"WARNING: the prefix cache of {variant} could not be emptied")
        return engine.run(
            self.prompts,
            max_tokens=self.setting.output_lengths(),
            concurrency=self.setting.outstanding,
            timeout_s=180,
        )


def _disturbed(others_cores: float) -> str:
    return f"  (others used {others_cores:.1f} cores)" if others_cores > DISTURBED_CORES else ""


def turned(variants: list[str], start: int) -> list[str]:
    """The variants in the order of this start, from 1 on: every second start has them the other way round."""
    return variants if start % 2 else variants[::-1]


def ratios(figures: dict[str, Figures], variant: str, measure: str) -> dict[int, float]:
    """Of each start, the median over its rounds as a multiple of the ideal's; empty without the ideal."""
    ideal = figures[IDEAL].of_starts(measure) if IDEAL in figures else {}
    mine = figures[variant].of_starts(measure)
    return {start: value / ideal[start] for start, value in mine.items() if start in ideal}


def table(figures: dict[str, Figures]) -> list[str]:
    """Lines: per variant median (min–max) of each measure over the rounds, of its ratio to the ideal over starts."""
    lines = [f"{'':15}" + "".join(f"{measure + ', s (min-max)':>26}{'/ideal':>8}" for measure in MEASURES)]
    of_starts = [f"{'':15}" + "".join(f"{measure + '/ideal (min-max)':>26}" for measure in MEASURES) + "  of starts"]
    for variant, each in figures.items():
        line = of_start = f"{variant:15}"
        for measure in MEASURES:
            values, found = getattr(each, measure), [*ratios(figures, variant, measure).values()]
            middle, ratio = statistics.median(values), f"{statistics.median(found):.2f}" if found else "-"
            line += f"{f'{middle:.3f} ({min(values):.3f}-{max(values):.3f})':>26}{ratio:>8}"
            of_start += f"{f'{ratio} ({min(found):.2f}-{max(found):.2f})' if found else ratio:>26}"
        lines.append(line)
        of_starts.append(f"{of_start}{len(set(each.start)):>11}")
    several = any(len(set(each.start)) > 1 for each in figures.values())
    return [*lines, "", *of_starts] if several else lines


def costs(figures: dict[str, Figures]) -> list[str]:
    """Lines: per variant medians over the rounds of what a pass took."""
    lines = [f"{'per pass':15}{'steps':>8}{'CPU of the engine, s':>24}{'of all else, s':>18}{'over the link, MB':>20}"]
    for variant, each in figures.items():
        middle = [statistics.median(values) for values in (each.steps, each.engine_cpu_s, each.other_cpu_s)]
        received = f"{statistics.median(each.link_mb):.0f}" if each.link_mb else "-"
        lines.append(f"{variant:15}{middle[0]:>8.0f}{middle[1]:>24.2f}{middle[2]:>18.2f}{received:>20}")
    return lines


def agreement(starts: list[dict[str, list[list[int]]]]) -> list[str]:
    """Lines that compare the loading variants' tokens in each start: they read the same bytes, so they must agree."""
    same: Counter[tuple[str, str]] = Counter()
    compared: Counter[tuple[str, str]] = Counter()
    for tokens in starts:
        loading = sorted((variant for variant in tokens if variant not in COMPUTING), key=list(starts[0]).index)
        for variant in loading[1:]:
            pair = variant, loading[0]
            same[pair] += sum(mine == other for mine, other in zip(*(tokens[each] for each in pair), strict=True))
            compared[pair] += len(tokens[variant])
    return [
        f"tokens of {variant} equal those of {other} in {same[variant, other]} of {count} requests"
        for (variant, other), count in compared.items()
    ]


def main(argv: list[str] | None = None) -> int:
    parser = arguments.parser("ttft", __doc__, VARIANTS + LMCACHE, rounds=5)
    parser.add_argument(
        "--prompts", type=int, default=Setting().prompts, help="number of prompts (default %(default)s)"
    )
    parser.add_argument(
        "--output-spread",
        type=int,
        default=Setting().output_spread,
        help="outputs are up to so many tokens longer or shorter than their mean; 0: all alike (default %(default)s)",
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        metavar="N",
        help="start everything N times, in turns the other way round, with --rounds rounds each (default %(default)s)",
    )
    options = parser.parse_args(argv)
    exit_on_sigterm()
    variants = arguments.variants_of(parser, options, VARIANTS, LMCACHE)
    if not 0 <= options.output_spread < Setting().output_tokens:
        parser.error(f"--output-spread must be from 0 to {Setting().output_tokens - 1}, not {options.output_spread}")
    if options.starts < 1:
        parser.error(f"--starts must be at least 1, not {options.starts}")

    setting, ran_on = Setting(prompts=options.prompts, output_spread=options.output_spread), machine()

    def say(line: str) -> None:
        print(line, flush=True)

    say(f"machine: {json.dumps(ran_on)}")
    if ran_on["load_at_start"] > 0.5 * ran_on["cores"]:
        say("WARNING: this machine is busy with something else; figures will be high and spread")
    say(f"setting: {json.dumps(asdict(setting))}")
    checkpoint = make_checkpoint(options.work / "checkpoints", PEERS)
    figures = {variant: Figures() for variant in variants}
    tokens, limited = [], True
    for start in range(1, options.starts + 1):
        order = turned(variants, start)
        if options.starts > 1:
            say(f"start {start} of {options.starts}: {' '.join(order)}")
        bench = Bench(setting, checkpoint, say, options.lmcache_python)
        bench.run(order, options.rounds, figures, start)
        tokens.append(bench.tokens)
        limited = limited and bench.link is not None
    say("")
    for line in [*table(figures), "", *costs(figures), "", *agreement(tokens)]:
        say(line)
    bad = False
    hit_mb = setting.prompts * setting.hit_tokens * PEERS.kv_bytes_per_token / 1e6
    for variant, each in figures.items():
        if each.wrong_hits:
            bad = True
            say(f"WARNING: {variant}: {each.wrong_hits} requests without the expected hit; hits seen {each.hit_tokens}")
        if variant not in COMPUTING and each.link_mb and min(each.link_mb) < hit_mb:
            bad = True
            say(f"WARNING: {variant}: not all of {hit_mb:.0f} MB came over the link in each pass: {each.link_mb}")
    for variant, each in figures.items():
        disturbed = sum(cores > DISTURBED_CORES for cores in each.others_cores)
        if disturbed:
            say(f"WARNING: {variant}: other programs disturbed {disturbed} of {len(each.start)} rounds")
    if options.json is not None:
        report = {
            "machine": ran_on,
            "setting": asdict(setting),
            "limited_link": limited,
            "rounds": options.rounds,
            "starts": options.starts,
            "ratios": {
                name: {each: list(ratios(figures, name, each).values()) for each in MEASURES} for name in figures
            },
            "variants": {
                name: {**asdict(each), "hit_tokens": sorted(each.hit_tokens)} for name, each in figures.items()
            },
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
