"""Real engines over the bed's worker: no alarm where nothing is wrong, and each wrong block is one."""

from __future__ import annotations

import contextlib
import random
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BLOCK, RUNS_GRANITE, Site, hits
from tests.lab import connectors
from tests.lab.adapter import make_adapter
from tests.lab.bed import engine as bed
from tests.lab.bed import oracle
from tests.lab.bed.timeline import PRESETS
from tests.lab.engine import Engine, EngineSpec
from tests.lab.hybrid import make_eagle
from tests.lab.passes import Abort
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.lab.template import Template
from tests.support.waiting import eventually

VOCAB = 2048
BOTH = [(runner, scheduling) for runner in ("v2", "v1") for scheduling in ("async", "sync")]
SMALL: dict[str, Any] = {"max_model_len": 512, "max_num_batched_tokens": 128, "max_num_seqs": 8}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
DRAFTED = "EAGLE with windows"
MIXED = "fp8 beside bfloat16"
MULTI = "below MultiConnector"
UNITED = "windows in the group of full attention"
IN_CHUNKS = "windows among chunks"
IN_STATES = "windows among states"
SOME = "context of some groups"


def dcp(size: int, interleave: int = 1) -> dict[str, int]:
    return {"decode_context_parallel_size": size, "cp_kv_cache_interleave_size": interleave}


# What CPUs can not run, or not with this scheduling: a KV pool so small that requests are preempted.
CASES: dict[str, dict[str, Any]] = {
    "MLA": {"layout": "mla", "block_size": 64, "num_gpu_blocks": 24},
    "fp8": {"layout": "fp8", "block_size": 64, "num_gpu_blocks": 24},
    "MLA in fp8, with an indexer": {"layout": "mla indexer", "block_size": 64, "num_gpu_blocks": 24},
    "compressed": {"layout": "compressed", "block_size": 256, "num_gpu_blocks": 700},
    "bounded replay": {"layout": "bounded replay", "block_size": 64, "num_gpu_blocks": 100},
    "ring": {"layout": "ring", "block_size": 64, "num_gpu_blocks": 40},
    "states and a ring": {"layout": "states and a ring", "num_gpu_blocks": 80},
    "windows": {"layout": "windows", "num_gpu_blocks": 60},
    "chunks": {"layout": "chunks", "num_gpu_blocks": 60},
    IN_CHUNKS: {
        "layout": "chunks in two of three layers",
        "prepare": "tests.lab.hybrid:windows_among_chunks",
        "num_gpu_blocks": 80,
    },
    "unlike heads": {"layout": "unlike heads", "num_gpu_blocks": 60},
    UNITED: {"layout": "windows", "num_gpu_blocks": 60, "extra": {"disable_hybrid_kv_cache_manager": True}},
    MIXED: {"dtype": "bfloat16", "extra": {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "2"]}},
    "states": {"layout": "states", "num_gpu_blocks": 60},
    IN_STATES: {"layout": "states", "prepare": "tests.lab.hybrid:windows_among_states", "num_gpu_blocks": 100},
    "linear states": {"layout": "linear states", "num_gpu_blocks": 60, "dtype": "bfloat16"},
    "drafts": {"scheduling": "sync", "runner": "v1", "extra": {"speculative_config": NGRAM}},
    "EAGLE": {"drafter": True},
    "EAGLE with V1": {"drafter": True, "runner": "v1"},
    DRAFTED: {"drafter": True, "layout": "windows", "num_gpu_blocks": 80},
    "two ranks": {"layout": "two heads", "tensor_parallel": 2},
    "context": {"tensor_parallel": 2, "block_size": 16, "extra": dcp(2, 8), "num_gpu_blocks": 60},
    "context, MLA": {"layout": "mla", "tensor_parallel": 2, "block_size": 64, "extra": dcp(2)},
    SOME: {"layout": "mla draft", "tensor_parallel": 2, "block_size": 64, "extra": dcp(2, 64)},
    "prefill context": {"layout": "mla", "block_size": 64, "extra": {"prefill_context_parallel_size": 2}},
    "both contexts": {
        "layout": "mla",
        "tensor_parallel": 2,
        "block_size": 64,
        "extra": {"prefill_context_parallel_size": 2, **dcp(2, 16)},
    },
    "two stages": {"pipeline_parallel": 2},
    "stages with windows": {"layout": "windows", "pipeline_parallel": 2, "num_gpu_blocks": 60},
    "stages with unlike heads": {"layout": "unlike heads", "pipeline_parallel": 2, "num_gpu_blocks": 60},
    MULTI: {},
    "two stages with V1": {"pipeline_parallel": 2, "runner": "v1", "scheduling": "sync"},
}
SHOWING = {
    IN_CHUNKS: [pytest.mark.shows("saved, then loaded: tokens equal", "full attention, sliding windows and chunks")],
    "states": [RUNS_GRANITE],
    IN_STATES: [
        RUNS_GRANITE,
        pytest.mark.shows("saved, then loaded: tokens equal", "full attention, sliding windows and Mamba"),
    ],
    UNITED: [pytest.mark.shows("`--disable-hybrid-kv-cache-manager`", "full attention and sliding windows")],
    MIXED: [pytest.mark.shows("FP8 KV")],
    "drafts": [pytest.mark.shows("n-gram drafts")],
    "EAGLE": [pytest.mark.shows("EAGLE drafts")],
    DRAFTED: [pytest.mark.shows("EAGLE drafts", "full attention and sliding windows")],
    "context": [pytest.mark.shows("decode context parallelism")],
    "context, MLA": [pytest.mark.shows("decode context parallelism", "MLA")],
    "prefill context": [pytest.mark.shows("prefill context parallelism", "MLA")],
}


def nothing_wrong(engine: Engine, prompts: list[list[int]], tokens: list[list[int]]) -> None:
    for prompt, got in zip(prompts, tokens, strict=True):
        assert got == oracle.answer(prompt, len(got), VOCAB)
    for rank in bed.report(engine):
        assert rank["faults"] == []
        assert rank["checked_tokens"] > 0


def shared(count: int, seed: int, longest: int = 300) -> list[list[int]]:
    """Prompts of all lengths; most begin as another one does."""
    source, found = random.Random(seed), make_prompts(1, longest, seed=seed)
    while len(found) < count:
        begun = source.choice(found)[: source.randrange(longest)] if source.random() < 0.8 else []
        more = source.randrange(max(1, 40 - len(begun)), longest - len(begun) + 1)
        found.append(begun + make_prompts(1, more, seed=source.randrange(1 << 30))[0])
    return found


def disturbed(engine: Engine, requests: int, seed: int, longest: int = 300) -> None:
    """Serve requests that share prefixes, are preempted, come in chunks, are aborted."""
    source, prompts = random.Random(seed), shared(requests, seed, longest)
    lengths = [source.randrange(1, longest // 5) for _ in prompts]
    aborts = [Abort(index, source.randrange(30)) for index in range(0, requests, 7)]
    served = engine.run(prompts, max_tokens=lengths, concurrency=12, aborts=aborts)
    nothing_wrong(engine, prompts, served.tokens)
    for request, length in zip(served.requests, lengths, strict=True):
        assert request.finish_reason == "abort" or len(request.tokens) == length


def preempting(template: Template, requests: int = 60, longest: int = 300, passes: int = 1, **options: Any) -> int:
    """Run the passes on an engine of these options; return how many requests were preempted."""
    with bed.engine(template=template, **{"num_gpu_blocks": 40, **SMALL, **options}) as engine:
        engine.call("tests.e2e.probes:count_preemptions")
        for number in range(passes):
            disturbed(engine, requests, seed=number, longest=longest)
        return int(engine.call("tests.e2e.probes:preemptions"))


@pytest.mark.parametrize(
    ("runner", "scheduling", "caching"), [(*each, number % 3 == 0) for number, each in enumerate(BOTH)]
)
def test_without_a_connector_there_is_no_alarm(template: Template, runner: str, scheduling: str, caching: bool) -> None:
    """Shared prefixes, preemption, chunked prefill, aborts: both runners, both schedulings, steps of no time."""
    extra = {"enable_prefix_caching": caching}
    assert preempting(template, runner=runner, scheduling=scheduling, extra=extra) > 0


@pytest.mark.stress
@pytest.mark.parametrize("caching", [True, False], ids=["prefixes cached", "no prefix cache"])
@pytest.mark.parametrize(("runner", "scheduling"), BOTH)
def test_a_hundred_thousand_requests_give_no_alarm(
    template: Template, runner: str, scheduling: str, caching: bool
) -> None:
    """12,500 of each kind."""
    options = {"runner": runner, "scheduling": scheduling, "extra": {"enable_prefix_caching": caching}}
    assert preempting(template, 1250, 120, 10, num_gpu_blocks=16, max_model_len=256, **options) > 100


def case_options(case: str, folder: Path) -> dict[str, Any]:
    options = {"num_gpu_blocks": 40, **CASES[case]}
    if options.pop("drafter", False):
        drafter = {"method": "eagle", "model": str(make_eagle(folder / "eagle")), "num_speculative_tokens": 3}
        options["extra"] = {"speculative_config": drafter}
    return options


@pytest.mark.stress
@pytest.mark.parametrize("case", CASES)
def test_no_layout_gives_an_alarm(template: Template, tmp_path: Path, case: str) -> None:
    """Nor drafts that are rejected, nor ranks and stages, among the same disturbances."""
    preempting(template, 40, **case_options(case, tmp_path))


@pytest.mark.parametrize(
    "case",
    [
        *sorted(CASES.keys() - SHOWING.keys()),
        *(pytest.param(case, marks=marks) for case, marks in SHOWING.items()),
    ],
)
def test_every_layout_is_loaded_as_it_was_saved(site: Site, tmp_path: Path, case: str) -> None:
    """With a real daemon and a real store: each block, layer, head and token, also among disturbed requests."""
    options = case_options(case, tmp_path)
    connector = bed_connector(site, f"bed-{case}")
    if case == MULTI:
        connector = connectors.multi(connector)
    engine = site.engine(bed.spec(connector=connector, **{**SMALL, **options}))
    prompts = make_prompts(4, 400)
    nothing_wrong(engine, prompts, engine.run(prompts, max_tokens=9).tokens)
    site.fresh(engine)
    again = engine.run(prompts, max_tokens=9)
    nothing_wrong(engine, prompts, again.tokens)
    assert min(again.cached_tokens) >= 256
    site.fresh(engine)
    disturbed(engine, 24, seed=3)
    site.fresh(engine)
    disturbed(engine, 24, seed=3)
    counters = engine.call("tests.e2e.probes:counters")
    assert counters["loads"] > 10
    assert counters["failed_loads"] == 0
    engine.stop()


@pytest.mark.parametrize(("runner", "scheduling"), BOTH)
def test_the_connector_loads_what_it_saved(site: Site, runner: str, scheduling: str) -> None:
    """With a real daemon and a real store no block is wrong; a block of another prompt is found in its first step."""
    connector = bed_connector(site, f"bed-{runner}-{scheduling}")
    engine = site.engine(bed.spec(runner=runner, scheduling=scheduling, connector=connector, num_gpu_blocks=96))
    prompts = make_prompts(6, 300)
    first = engine.run(prompts, max_tokens=20)
    nothing_wrong(engine, prompts, first.tokens)
    site.fresh(engine)
    again = engine.run(prompts, max_tokens=20)
    assert again.cached_tokens == hits(prompts)
    nothing_wrong(engine, prompts, again.tokens)
    site.a_foreign_block_shows(engine, prompts, again.tokens, max_tokens=20)
    (rank,) = bed.report(engine)
    assert [(each["block"], each["token"], each["wrong_tokens"]) for each in rank["faults"]] == [(1, 32, 32)] * 5
    assert all("KV of request" in each["found"] and "token 32" in each["found"] for each in rank["faults"])
    engine.stop()


def test_each_planted_fault_of_a_load_is_found_in_its_first_step(site: Site) -> None:
    """So its first token is wrong.  The prompt before differs in its first block alone, and had the same GPU blocks."""
    connector = bed_connector(site, "bed-planted", load_mode="sync")
    engine = site.engine(bed.spec(scheduling="sync", connector=connector, num_gpu_blocks=14, max_model_len=320))
    prompt = make_prompts(1, 300)[0]
    other = make_prompts(1, BLOCK, seed=1)[0] + prompt[BLOCK:]
    for each in (other, prompt):
        engine.run([each], max_tokens=4)
        site.fresh(engine)
    for how, blocks in (("last tokens", [1]), ("swapped", [0, 1]), ("late", [*range(9)]), ("half", [1])):
        bed.report(engine, reset=True)
        if how == "last tokens":
            engine.call("tests.e2e.probes:load_a_foreign_block", 1)
        engine.run([other], max_tokens=4)
        if how != "last tokens":
            engine.call("tests.e2e.probes:spoil_loads", how)
        site.fresh(engine)
        served = engine.run([prompt], max_tokens=4)
        assert served.cached_tokens == [288]
        assert served.tokens[0][0] != oracle.answer(prompt, 1, VOCAB)[0], how
        faults = [(each["block"], each["token"], each["wrong_tokens"]) for each in bed.report(engine)[0]["faults"]]
        assert faults == [(block, BLOCK * block, BLOCK) for block in blocks], how
        engine.call("tests.e2e.probes:spoil_loads", "not at all")
        site.fresh(engine)
    engine.stop()


def test_vllms_own_runner_calls_the_same_hooks(template: Template) -> None:
    """With V1, which CPUs run: the same hooks in the same order, layer by layer, over the same requests."""
    hooks = {"kv_connector": "HooksConnector", "kv_connector_module_path": "tests.e2e.hooks_connector"}
    transfer = {**hooks, "kv_role": "kv_both"}
    found = []
    over = bed.spec(runner="v1", scheduling="sync", connector=transfer, num_gpu_blocks=40, **SMALL)
    real = EngineSpec(model=over.model, kv_transfer=transfer, num_gpu_blocks=40, **SMALL)
    for spec in (over, real):
        with Engine(spec, template=template) as engine:
            engine.run(make_prompts(6, 300), max_tokens=5, aborts=[Abort(2, 3)])
            found.append(engine.call("tests.e2e.hooks_connector:calls"))
    assert found[0] == found[1]
    assert found[0].count("wait_for_layer_load model.layers.3.self_attn.attn") > 10


def test_a_served_engine_hints_while_a_step_runs_and_loads_in_the_next(site: Site, template: Template) -> None:
    """Requests come at any instant of a step of 50 ms; the scheduler has each when that step is over."""
    spec = bed.spec(preset=PRESETS["50-10"], connector=bed_connector(site, "bed-early"), num_gpu_blocks=400)
    prompts = make_prompts(12, 300)
    outputs, arrivals_s = [60] + [2] * 11, [0.0] + [0.3 + 0.17 * number for number in range(11)]
    attached = len(site.daemon.records("engine.attached"))
    with Engine(spec.but(child="tests.lab.bed.served"), template=template) as engine:
        eventually(lambda: len(site.daemon.records("engine.attached")) > attached, 30.0, "an attached engine")
        engine.run(prompts, max_tokens=1)
        site.fresh(engine)
        before = len(site.daemon.records("request.done"))  # other engines' requests have such names, too
        served = engine.run(prompts, max_tokens=outputs, arrivals_s=arrivals_s)
        assert served.cached_tokens == hits(prompts)
        nothing_wrong(engine, prompts, served.tokens)
    names = tuple(each.request_id for each in served.requests)
    done = site.daemon.records("request.done")[before:]
    lines = [line for line in done if line["request_id"].startswith(names)]
    early = [line["adopted_ms"] for line in lines if line["adopted_ms"] is not None]
    assert len(early) >= len(prompts)
    assert 5 < statistics.median(early) < 50


def test_adapters_have_each_their_own_kv(site: Site, tmp_path: Path) -> None:
    """vLLM reads the adapters' files, as only of those that were read KV is shared; the device knows their names."""
    adapters = {"one": 1, "two": 2, "": 0}
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    engine = site.engine(bed.spec(connector=bed_connector(site, "bed-lora"), num_gpu_blocks=400, extra=lora))
    prompts = make_prompts(4, 300)
    for hit in (0, 288):
        for name, number in adapters.items():
            options = {"lora": [name, number, make_adapter(tmp_path / name, number)]} if name else {}
            if name and not hit:
                engine.run(prompts[:1], max_tokens=1, request_options=options)  # a step in which vLLM reads the adapter
                assert engine.reset_prefix_cache()
            served = engine.run(prompts, max_tokens=4, request_options=options)
            assert served.cached_tokens == [hit] * 4
            wanted = [oracle.answer(prompt, 4, VOCAB, before=oracle.key_of(name)) for prompt in prompts]
            assert served.tokens == wanted
        site.fresh(engine)
    assert bed.report(engine)[0]["faults"] == []
    engine.stop()


@pytest.mark.parametrize("mode", ["sync", "async", "upstream"])
def test_a_load_takes_the_time_of_its_copy(site: Site, template: Template, mode: str) -> None:
    """A synchronous one makes its step longer, an asynchronous one only its request's wait: of both connectors."""
    preset = replace(PRESETS["10-35"], copy_gbs=0.001)  # 288 tokens take longer than a second
    connector = bed_connector(site, f"bed-copy-{mode}", load_mode=mode)
    with contextlib.ExitStack() as stack:
        if mode == "upstream":
            store, connector = stack.enter_context(Store()), connectors.upstream(lookup_async=True)
        spec = bed.spec(preset=preset, connector=connector, num_gpu_blocks=64, max_model_len=1024)
        if mode == "upstream":
            spec = spec.but(mooncake_config=store.config)
        engine = stack.enter_context(Engine(spec, template=template)) if mode == "upstream" else site.engine(spec)
        prompts = make_prompts(2, 300)
        engine.run(prompts[:1], max_tokens=1)
        if mode == "upstream":
            assert store.wait_keys(9) == 9
        else:
            site.assert_idle()
        assert engine.reset_prefix_cache()
        bed.report(engine, reset=True)
        served = engine.run(
            prompts, max_tokens=[2, 100], arrivals_s=[0.2, 0.0]
        )  # a synchronous load needs a step before
        assert served.cached_tokens == [288, 0]
        nothing_wrong(engine, prompts, served.tokens)
        timeline = bed.report(engine)[0]["timeline"]
        beside, before = timeline["beside_ns"] / 1e9, timeline["copy_ns"] / 1e9
        assert (beside > 0.2, before > 0.2) == (True, mode == "sync")
        assert served.requests[0].ttft_s > beside
        steps = [b - a for a, b in pairwise(timeline["begun_ns"])]
        assert (max(steps) > 0.2e9) == (mode == "sync")
        engine.stop()


def bed_connector(site: Site, prefix: str, **extra: str) -> dict[str, Any]:
    found = site.spec(extra={"cache_prefix": prefix, **extra}).kv_transfer
    assert found is not None
    return found
