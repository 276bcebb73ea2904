"""The running parts of a piece: the far store, an engine or more for each variant, and one pass through them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import variants
from benchmarks.bench.far import Far
from benchmarks.bench.served import Daemon, Served, merged
from benchmarks.bench.setting import BLOCK, MODEL, SETS, SHORT_TOKENS, Pace, Setting, plan, prompts, stored
from tests.lab import process
from tests.lab.checkpoint import make_checkpoint
from tests.lab.engine import Engine, EngineError, EngineSpec
from tests.lab.interference import Interference, cpu_s, ours
from tests.lab.passes import Pass
from tests.lab.prompts import make_prompts
from tests.lab.template import Template

Say = Callable[[str], None]
# Requests and output tokens that measure the machine's pace.
PACE_REQUESTS, PACE_TOKENS, WARM_UP = 10, 60, 4
PASS_S = 240
WITHOUT = "the engine goes on without it"  # the connector logs it where one of its hooks raises


class Lab:
    """Serves the points of a piece whose store is equally far; a context manager.

    `settings`: all these points. A point's engines run inside `engines`.
    """

    sets = SETS
    """Of prompts, which passes take in turn."""
    of_local = frozenset({variants.RECOMPUTED})
    """Variants that the engine of `local` serves, too."""

    def __init__(
        self, settings: Sequence[Setting], chosen: Sequence[str], say: Say, lmcache_python: Path | None = None
    ) -> None:
        self.variants = list(chosen)
        self._model = make_checkpoint(process.REPO / "build" / "checkpoints", MODEL)
        self._settings, self._say, self._python = list(settings), say, lmcache_python
        self._engines: dict[str, list[Engine]] = {}
        self._paces: dict[tuple[object, ...], tuple[float, float]] = {}
        # The ideal's cache would have what a pass computed, were it not emptied and filled before each.
        self._partial = any(each.hit < 1 for each in settings)

    def __enter__(self) -> Lab:
        with contextlib.ExitStack() as stack:
            self._template = stack.enter_context(Template(EngineSpec(model=self._model).environment()))
            self._far = Far(
                self._settings[0].far,
                max(each.fetched_bytes * self.staged(each) for each in self._settings),
                self._say,
                self._python if not set(variants.LMCACHE).isdisjoint(self.variants) else None,
            )
            stack.enter_context(self._far)
            self._far.fill(self._warm_up() + self._stored(self._settings), self.filler)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def staged(self, setting: Setting) -> int:
        """Return for how many of the prompts staging has room."""
        return max(8, setting.requests)

    @property
    def limited_link(self) -> bool:
        return self._far.link is not None

    @contextlib.contextmanager
    def engines(self, settings: Sequence[Setting]) -> Iterator[None]:
        """Start the engines of points that differ in their load alone, and warm them up."""
        with contextlib.ExitStack() as stack:
            self._engines = {}
            count = settings[0].engines
            known = len(self._far.daemon.records("engine.attached"))
            for variant in [variants.LOCAL, *self.variants]:
                if variant in self._engines:
                    continue
                if variant in self.of_local:
                    self._engines[variant] = self._engines[variants.LOCAL]
                    continue
                self._say(f"starting {'an engine' if count == 1 else f'{count} engines'}: {variant}")
                self._engines[variant] = [stack.enter_context(self.engine(variant, settings)) for _ in range(count)]
            attached = sum(len(several) for variant, several in self._engines.items() if variants.ours(variant))
            wanted = known + attached
            if attached and self._far.daemon.wait_record("engine.attached", count=wanted, timeout_s=30) is None:
                raise EngineError("an engine did not attach: " + " ".join(self._far.daemon.lines[-20:]))
            self._far.away(max(each.rate_mbit(1.0) for each in settings))
            if not self._partial:
                for setting in settings:
                    for number in range(self.sets):
                        self.fill_local(setting, number)
            for several in self._engines.values():
                for engine in several:  # the first requests are slower: code and memory are cold
                    engine.run(self._warm_up(), max_tokens=8, concurrency=settings[0].places, timeout_s=PASS_S)
            yield

    def pace(self, setting: Setting) -> Pace:
        """Measure what the point's load needs with all KV local, once for points with equal requests."""
        key = (setting.prompt_tokens, setting.output_tokens, setting.places)
        if key not in self._paces:
            engine, few = self._engines[variants.LOCAL][0], min(PACE_REQUESTS, setting.requests)
            some = prompts(setting, 0)[:few]
            engine.run(some, max_tokens=1, concurrency=setting.places, timeout_s=PASS_S)
            outputs = setting.outputs()[:few]
            result = engine.run(some, max_tokens=outputs, concurrency=setting.places, timeout_s=PASS_S)
            alone = engine.run(self._short(), max_tokens=PACE_TOKENS).requests[0]
            decoding_s = (alone.finished_s or 0.0) - (alone.first_token_s or 0.0)
            self._paces[key] = (setting.places * result.total_s / few, decoding_s / (PACE_TOKENS - 1))
        place_s, step_s = self._paces[key]
        return Pace(place_s, step_s, 8e-6 * setting.whole_bytes / setting.rate_mbit(place_s))

    def serve(self, variant: str, setting: Setting, pace: Pace, number: int) -> Served:
        """Serve the prompts of set `number` once, from an empty prefix cache but for the ideal."""
        number %= self.sets
        engines, asked = self._engines[variant], plan(setting, pace, number)
        self._far.away(setting.rate_mbit(pace.place_s))
        if not variants.bare(variant) or self._partial:
            for engine in engines:
                if not engine.reset_prefix_cache():
                    self._say(f"WARNING: the prefix cache could not be emptied before: {variant}")
        if variant == variants.LOCAL and self._partial:
            self.fill_local(setting, number)
        sampling = {"skip_reading_prefix_cache": True} if variant == variants.RECOMPUTED else {}
        lines = len(self._far.daemon.records("request.done"))
        others, before = Interference(), self._used(engines)
        parts = [asked.of_engine(at, len(engines)) for at in range(len(engines))]
        for engine, part in zip(engines, parts, strict=True):
            engine.begin(
                part.prompts,
                max_tokens=part.outputs,
                concurrency=part.users,
                arrivals_s=part.arrivals_s,
                pauses_s=part.pauses_s,
                sampling=sampling,
                timeout_s=PASS_S,
                events=False,
            )
        results: list[Pass] = [engine.finish(timeout_s=PASS_S + 10) for engine in engines]
        served = merged(list(zip(parts, results, strict=True)))
        served.others_cores = round(others.cores(), 2)
        engine_s, all_s, link_bytes = (now - then for now, then in zip(self._used(engines), before, strict=True))
        served.engine_cpu_s, served.other_cpu_s = round(engine_s, 2), round(all_s - engine_s, 2)
        served.link_bytes = int(link_bytes) if self.limited_link else None
        served.load = round(os.getloadavg()[0], 2)
        if variants.ours(variant):
            if WITHOUT in "".join(engine.log.read_text(errors="replace") for engine in engines):
                raise EngineError(f"{variant}: a hook of the connector failed; rebuild the extension (make lint)")
            served.daemon = Daemon()
            self._far.daemon.wait_record("request.done", count=lines + setting.requests, timeout_s=5)
            served.lines = self._far.daemon.records("request.done")[lines:]
            for line in served.lines:
                served.daemon.add(line)
        return served

    def _used(self, engines: Sequence[Engine]) -> tuple[float, float, float]:
        """So far: CPU seconds of these engines, of all our processes, and bytes received over the link."""
        link = self._far.link
        received = 0.0 if link is None else float(link.received_bytes)
        return cpu_s([pid for each in engines for pid in each.pids]), cpu_s(ours()), received

    def _stored(self, settings: Sequence[Setting]) -> list[list[int]]:
        """All that the store has of these points' prompts, each once."""
        every = [prompt for setting in settings for number in range(self.sets) for prompt in stored(setting, number)]
        return [list(each) for each in dict.fromkeys(map(tuple, every))]

    def _warm_up(self) -> list[list[int]]:
        return make_prompts(WARM_UP, self._settings[0].prompt_tokens, vocab=MODEL.vocab, seed=99)

    @staticmethod
    def _short() -> list[list[int]]:
        return make_prompts(1, SHORT_TOKENS, vocab=MODEL.vocab, seed=98)

    def fill_local(self, setting: Setting, number: int) -> None:
        """Compute with the ideal's engine what the store has of the prompts of set `number`."""
        if some := stored(setting, number):
            for engine in self._engines[variants.LOCAL]:
                engine.run(some, max_tokens=1, concurrency=1, timeout_s=PASS_S)

    def spec(self, settings: Sequence[Setting]) -> EngineSpec:
        """All alike but for the connector, and the ideal's roomy pool."""
        blocks = max(each.blocks for each in settings)
        return EngineSpec(
            model=self._model,
            block_size=BLOCK,
            max_model_len=blocks * BLOCK,
            max_num_batched_tokens=max(2048, blocks * BLOCK),
            max_num_seqs=settings[0].places,
            num_gpu_blocks=(settings[0].places + settings[0].spare) * blocks,
            **self._far.engine_options,
        )

    def engine(self, variant: str, settings: Sequence[Setting]) -> Engine:
        """Return an engine of this variant, not yet started."""
        spec = self.spec(settings)
        if variants.bare(variant):
            # All that may be asked of it, and as much again for what is recomputed meanwhile.
            every = 2 * SETS * sum(each.requests * each.blocks for each in settings)
            return Engine(spec.but(num_gpu_blocks=max(every, 8 * spec.max_model_len // BLOCK)), template=self._template)
        if variant in variants.LMCACHE:
            assert self._far.server is not None
            assert self._python is not None
            transfer = self._far.server.connector(eager=variant == "lmcache-eager")
            return Engine(spec.but(kv_transfer=transfer, python=self._python))
        transfer_config = variants.transfer(variant, self._far.daemon.socket, **self.options(settings[0]))
        return Engine(spec.but(kv_transfer=transfer_config), template=self._template)

    def options(self, setting: Setting) -> dict[str, Any]:
        """Return options of our connector that belong to the setting."""
        return {}

    def filler(self, transfer: dict[str, Any], options: dict[str, Any]) -> Engine:
        """Return an engine that stores all prompts; `options`: more fields of its spec."""
        spec = self.spec(self._settings).but(kv_transfer=transfer, **options)
        return Engine(spec, template=self._template)
