"""Engines of the bed that sleep while their KV is copied: who touches its memory then ends the engine."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from tests.e2e.conftest import Site
from tests.e2e.test_bed import SMALL, VOCAB, bed_connector
from tests.lab.bed import engine as bed
from tests.lab.bed import oracle
from tests.lab.engine import Engine
from tests.lab.prompts import make_prompts
from tests.lab.template import Template
from tests.support.waiting import eventually

COPY_S = 0.02
SLEEPS: dict[str, Any] = {"enable_sleep_mode": True}


async def slept(engine: Any, prompts: list[list[int]], times: int, seed: int) -> list[str]:
    """In the engine's process: sleep so often, on both levels, amid loads and saves; return what is wrong."""
    from vllm import SamplingParams

    source, faults = random.Random(seed), list[str]()

    async def ask(prompt: list[int], name: str, count: int) -> None:
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        tokens, ended = list[int](), ""
        async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
            tokens, ended = output.outputs[0].token_ids, output.outputs[0].finish_reason
        if list(tokens) != oracle.answer(prompt, len(tokens), VOCAB) or (ended == "length" and len(tokens) < count):
            faults.append(f"{name}: {ended} {tokens}")

    for number in range(times):
        old = source.sample(prompts, 3)
        await ask(old[0][:40], f"{number}-first", 1)  # whose step says which weights there are since the reset
        await asyncio.gather(*(ask(each, f"{number}-saved-{at}", 1) for at, each in enumerate(old)))
        await engine.reset_prefix_cache()
        new = make_prompts(2, 200, seed=source.randrange(1 << 30))
        asked = [asyncio.create_task(ask(each, f"{number}-{at}", 40)) for at, each in enumerate(old + new)]
        await asyncio.sleep(source.random() * 0.05)
        await engine.sleep(1 + number % 2)
        await engine.wake_up()
        await asyncio.gather(*asked)  # what came too late to be aborted is served now
    return faults


async def late(engine: Any, ranks: int) -> None:
    for rank in range(ranks):
        await engine.collective_rpc("bed_copies", args=(rank, COPY_S))


def sleeping(site: Site, template: Template, times: int, **options: Any) -> None:
    """Sleep so often on an engine whose copies end late; nothing is wrong, nothing is held, and some KV is loaded."""
    connector, prompts = bed_connector(site, "bed-sleeps"), make_prompts(8, 200)
    spec = bed.spec(connector=connector, num_gpu_blocks=100, extra=SLEEPS, **{**SMALL, **options})
    attached, before = len(site.daemon.records("engine.attached")), len(site.daemon.records("request.done"))
    with Engine(spec.but(child="tests.lab.bed.served"), template=template) as engine:
        eventually(lambda: len(site.daemon.records("engine.attached")) > attached, 30.0, "an attached engine")
        engine.call("tests.e2e.test_sleep:late", options.get("tensor_parallel", 1))
        assert engine.call("tests.e2e.test_sleep:slept", prompts, times, 1, timeout_s=900.0) == []
        assert all(rank["faults"] == [] and rank["checked_tokens"] for rank in bed.report(engine))
        site.assert_idle()
    outcomes = [line["outcome"] for line in site.daemon.records("request.done")[before:]]
    assert outcomes.count("loaded") >= times // 4


@pytest.mark.shows("sleep mode")
def test_copies_are_over_before_memory_goes(site: Site, template: Template) -> None:
    """Of levels 1 and 2, with loads and saves in flight on two ranks."""
    sleeping(site, template, 8, layout="two heads", tensor_parallel=2)


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_a_thousand_sleeps(site: Site, template: Template) -> None:
    sleeping(site, template, 1000)


def asleep(engine: Any, level: int) -> None:
    """In the engine's process: sleep at once, and wake up."""
    engine.sleep(level)
    time.sleep(0.2)
    engine.wake_up()


@pytest.mark.parametrize(("level", "executor"), [(1, {}), (2, {"distributed_executor_backend": "mp"})])
def test_nobody_touches_the_kv_of_an_engine_that_sleeps(site: Site, level: int, executor: dict[str, str]) -> None:
    """Awake, it saves and loads as before."""
    connector = bed_connector(site, f"bed-sleep-{level}")
    engine = site.engine(bed.spec(connector=connector, num_gpu_blocks=400, extra={**SLEEPS, **executor}))
    prompts = make_prompts(6, 600)
    for number, hit in enumerate((0, 0, 576)):  # asleep, vLLM resets what its connector knows, too
        served = engine.run(prompts, max_tokens=4)
        assert served.tokens == [oracle.answer(prompt, 4, VOCAB) for prompt in prompts]
        assert bed.report(engine)[0]["faults"] == []
        assert max(served.cached_tokens) == hit
        if number == 0:
            engine.call("tests.e2e.test_sleep:asleep", level)
        site.fresh(engine)
    engine.stop()
