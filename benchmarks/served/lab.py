"""The running parts of a piece of `make bench-served`: engines that are served, over the bed's worker."""

from __future__ import annotations

import bisect
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.bench import variants
from benchmarks.bench.lab import Lab
from benchmarks.bench.served import Served
from benchmarks.bench.setting import BLOCK, MODEL, Pace, Setting
from benchmarks.served.pieces import small
from kvprefetch.connector.words.config import ConnectorConfig
from tests.lab.bed import engine as bed
from tests.lab.bed.timeline import PRESETS
from tests.lab.engine import CHILD, Engine, EngineError, EngineSpec
from tests.lab.passes import percentile

CHILDREN = {"engine": "tests.lab.bed.served", "http": "tests.lab.bed.http"}
CLOCK = "tests.lab.bed.worker:clock"
# Staging holds so many of the prompts: passes fetch all of them again, in the same order.
STAGED = 1 / 4


def pace_of(setting: Setting) -> Pace:
    """What the preset says of this point; nothing is measured."""
    preset, outputs = small(PRESETS[setting.preset]), statistics.fmean(setting.outputs())
    linked = replace(preset, link_gbit=setting.rate_mbit(1.0) / 1000)
    whole = setting.prompt_tokens // BLOCK * BLOCK
    rest_ms = preset.prefill_ms(setting.prompt_tokens - min(whole, setting.prompt_tokens - 1))
    return Pace(
        place_s=1e-9 * outputs * preset.step_ns(0, setting.places) + 1e-3 * setting.places * rest_ms,
        step_s=1e-9 * preset.step_ns(0, 1),
        fetch_s=1e-3 * linked.fetch_ms(whole),
        proportions=linked.proportions(setting.hit_tokens),
    )


class PacedLab(Lab):
    """As Lab; the engines' steps take a modelled time."""

    sets = 1
    of_local = frozenset[str]()

    def staged(self, setting: Setting) -> int:
        return max(8, round(STAGED * setting.requests))

    def pace(self, setting: Setting) -> Pace:
        return pace_of(setting)

    def serve(self, variant: str, setting: Setting, pace: Pace, number: int) -> Served:
        (engine,) = self._engines[variant]
        bed.report(engine, reset=True)
        served = super().serve(variant, setting, pace, number)
        (found,) = bed.report(engine)
        served.counts = counted(found, setting, served)
        if found["faults"]:
            raise EngineError(f"{variant}: {len(found['faults'])} wrong blocks, the first: {found['faults'][0]}")
        return served

    def spec(self, settings: Sequence[Setting]) -> EngineSpec:
        plain = super().spec(settings)
        preset = small(PRESETS[settings[0].preset])
        made = bed.spec(model=self._model, preset=preset, every_step=False)
        return plain.but(extra=made.extra, env=made.env, prepare=made.prepare, child=CHILDREN[settings[0].through])

    def options(self, setting: Setting) -> dict[str, Any]:
        """The bound of a synchronous load is as small as the bed's KV: it stands for bytes of the preset's rank."""
        preset = PRESETS[setting.preset]
        share = preset.ranks * MODEL.kv_bytes_per_token / preset.kv_bytes_per_token
        return {"sync_load_max_bytes": round(share * ConnectorConfig.model_fields["sync_load_max_bytes"].default)}

    def engine(self, variant: str, settings: Sequence[Setting]) -> Engine:
        if not variants.bare(variant):
            return super().engine(variant, settings)
        spec = self.spec(settings)
        if variant == variants.RECOMPUTED:
            return Engine(spec.but(extra={**spec.extra, "enable_prefix_caching": False}), template=self._template)
        # All prompts, and what the answers leave behind until it is the oldest.
        every = {(each.prompt_tokens, each.hit, each.shared): each.requests * each.blocks for each in settings}
        return Engine(
            spec.but(num_gpu_blocks=spec.num_gpu_blocks + 3 * sum(every.values()) // 2), template=self._template
        )

    def filler(self, transfer: dict[str, Any], options: dict[str, Any]) -> Engine:
        spec = self.spec(self._settings).but(kv_transfer=transfer, **options)
        return Engine(spec.but(env=bed.spec(model=self._model).env, child=CHILD), template=self._template)

    def fill_local(self, setting: Setting, number: int) -> None:
        (engine,) = self._engines[variants.LOCAL]
        engine.call(CLOCK, False)
        super().fill_local(setting, number)
        engine.call(CLOCK, True)


def counted(found: dict[str, Any], setting: Setting, served: Served) -> dict[str, float]:
    """The figures of a pass that the client's times do not have; `found`: what the worker reported."""
    timeline, requests = found["timeline"], served.requests
    begun_s = [1e-9 * each for each in timeline["begun_ns"]]
    names = ((re.search(r"pass\d+-(\d+)", name), step) for name, step in timeline["admitted"].items())
    admitted = {int(name.group(1)): step for name, step in names if name is not None}
    waited = [
        admitted[name] - bisect.bisect_right(begun_s, served.begun_s + at)
        for name, at in zip(requests.prompt, requests.arrival_s, strict=True)
    ]
    return {
        "between_s": round(statistics.fmean(served.gaps_s), 6),
        "between_p99_s": round(percentile(served.gaps_s, 0.99), 6),
        "recomputed_tokens": statistics.fmean(max(0, setting.hit_tokens - each) for each in requests.cached_tokens),
        "steps_waited": round(statistics.fmean(waited), 3),
        "late_launches": round(100 * timeline["late_launches"] / timeline["steps"], 3),
        "idle_s": round(1e-9 * timeline["idle_ns"], 4),
        "wrong_blocks": len(found["faults"]),
        "oracle_share": round(1e-9 * found["oracle_ns"] / max(served.engine_cpu_s, 1e-3), 4),
    }
