"""Real engines over the bed's worker: no alarm where nothing is wrong, and each wrong block is one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.conftest import Site, hits
from tests.lab import process
from tests.lab.bed import engine as bed
from tests.lab.bed import oracle
from tests.lab.engine import Engine
from tests.lab.passes import Abort
from tests.lab.prompts import make_prompts
from tests.lab.template import Template

VOCAB = 2048
BOTH = [(runner, scheduling) for runner in ("v2", "v1") for scheduling in ("async", "sync")]


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


def disturbed(engine: Engine, requests: int, seed: int) -> None:
    """Serve requests that share prefixes, are preempted, come in chunks, are aborted."""
    source, prompts = random.Random(seed), shared(requests, seed)
    lengths = [source.randrange(1, 60) for _ in prompts]
    aborts = [Abort(index, source.randrange(30)) for index in range(0, requests, 7)]
    served = engine.run(prompts, max_tokens=lengths, concurrency=12, aborts=aborts)
    nothing_wrong(engine, prompts, served.tokens)
    for request, length in zip(served.requests, lengths, strict=True):
        assert request.finish_reason == "abort" or len(request.tokens) == length


@pytest.mark.parametrize("caching", [True, False], ids=["prefixes cached", "no prefix cache"])
@pytest.mark.parametrize(("runner", "scheduling"), BOTH)
def test_without_a_connector_there_is_no_alarm(template: Template, runner: str, scheduling: str, caching: bool) -> None:
    """Shared prefixes, preemption, chunked prefill, aborts: both runners, both schedulings, steps of no time."""
    size: dict[str, Any] = {"num_gpu_blocks": 40, "max_model_len": 512, "max_num_batched_tokens": 128}
    extra = {"enable_prefix_caching": caching}
    options = {"runner": runner, "scheduling": scheduling, "extra": extra, "max_num_seqs": 8, **size}
    with bed.engine(template=template, **options) as engine:
        engine.call("tests.e2e.probes:count_preemptions")
        disturbed(engine, 60, seed=1)
        assert engine.call("tests.e2e.probes:preemptions") > 0


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


def bed_connector(site: Site, prefix: str) -> dict[str, Any]:
    found = site.spec(extra={"cache_prefix": prefix}).kv_transfer
    assert found is not None
    return found


def test_a_served_engine_has_the_clock_of_its_preset() -> None:
    """AsyncLLM, its core in a process of its own: steps take the modelled 50 ms, and tokens are right."""
    child = subprocess.run(
        process.bound_to_parent([sys.executable, "-m", "tests.e2e.bed_child"]),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=process.REPO,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    assert found["asynchronous"]
    assert found["right"] == [True] * 4
    (rank,) = found["ranks"]
    assert rank["faults"] == []
    assert rank["timeline"]["steps"] == rank["steps"]
    assert min(found["took_s"]) >= 10 * 0.05
