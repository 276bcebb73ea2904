"""Engines of the bed whose ranks hold unlike parts of a block: one another's block, a late stage, a killed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BLOCK, Site
from tests.e2e.test_bed import CASES, SMALL, VOCAB, bed_connector, case_options, dcp, disturbed, nothing_wrong
from tests.lab import connectors
from tests.lab.bed import engine as bed
from tests.lab.bed import oracle
from tests.lab.prompts import make_prompts
from tests.support.waiting import eventually

LATE_S = 0.2
UNLIKE = "stages with unlike heads"


@pytest.mark.parametrize(
    ("case", "token", "wrong", "head", "found"),
    [("two ranks", BLOCK, BLOCK, 1, f"token {BLOCK}, "), ("context", BLOCK + 8, BLOCK // 2, 0, f"token {BLOCK}, ")],
)
def test_another_ranks_block_is_found_in_its_first_step(
    site: Site, tmp_path: Path, case: str, token: int, wrong: int, head: int, found: str
) -> None:
    """By the rank that loaded it; the tokens of both are wrong."""
    connector = bed_connector(site, f"bed-ranks-{case}")
    engine = site.engine(bed.spec(connector=connector, **{**SMALL, **case_options(case, tmp_path)}))
    (prompt,) = prompts = make_prompts(1, 300)
    engine.run(prompts, max_tokens=4)
    site.fresh(engine)
    engine.call("tests.e2e.probes:load_the_first_ranks_block")
    served = engine.run(prompts, max_tokens=4)
    assert served.cached_tokens == [288]
    assert served.tokens[0][0] != oracle.answer(prompt, 1, VOCAB)[0]
    first, second = bed.report(engine)
    assert first["faults"] == []
    (fault,) = second["faults"]
    assert (fault["block"], fault["token"], fault["wrong_tokens"], fault["head"]) == (1, token, wrong, head)
    assert found in fault["found"]
    assert fault["found"].endswith("head 0")
    engine.stop()


def test_ranks_that_share_tokens_otherwise_have_other_bytes_for_one_key(site: Site) -> None:
    """Of vLLM's format, which does not say how: by our own format they share nothing (test_fingerprint.py)."""
    prompts, tokens = make_prompts(2, 300), []
    for interleave in (8, 16):
        options = {"key_format": "vllm", "cache_prefix": "bed-interleave"}
        transfer = connectors.ours(site.daemon.socket, **options)
        spec = bed.spec(connector=transfer, **{**SMALL, **CASES["context"], "extra": dcp(2, interleave)})
        engine = site.engine(spec)
        served = engine.run(prompts, max_tokens=4)
        tokens.append((served.cached_tokens, served.tokens == [oracle.answer(each, 4, VOCAB) for each in prompts]))
        site.fresh(engine)
        engine.stop()
    assert tokens == [([0, 0], True), ([288, 288], False)]


@pytest.mark.parametrize(
    ("case", "scheduling"), [(UNLIKE, "async"), (UNLIKE, "sync"), ("stages with windows", "async")]
)
def test_a_stage_may_be_late(site: Site, tmp_path: Path, case: str, scheduling: str) -> None:
    """The copies of the last stage end long after the first one's: nobody reads, puts or reuses a block before."""
    options = {**case_options(case, tmp_path), "scheduling": scheduling}
    engine = site.engine(bed.spec(connector=bed_connector(site, f"bed-late-{case}"), **{**SMALL, **options}))
    prompts = make_prompts(4, 300)
    engine.run(prompts, max_tokens=4)
    site.fresh(engine)
    engine.call("tests.e2e.test_ranks:late", 1, LATE_S)
    served = engine.run(prompts, max_tokens=4)
    assert min(served.cached_tokens) >= 256
    assert min(each.ttft_s for each in served.requests) > LATE_S
    nothing_wrong(engine, prompts, served.tokens)
    engine.call("tests.e2e.test_ranks:late", 1, LATE_S / 10)
    for _ in range(2):
        disturbed(engine, 24, seed=5)
        site.fresh(engine)
    counters = engine.call("tests.e2e.probes:counters")
    assert counters["loads"] > 10
    assert counters["failed_loads"] == 0
    engine.stop()


def late(engine: Any, rank: int, seconds: float) -> None:
    """In the scheduler's process: `Worker.bed_copies`."""
    engine.collective_rpc("bed_copies", args=(rank, seconds))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_stage_leaves_nothing_and_its_kv_to_the_next_engine(site: Site, tmp_path: Path, rank: int) -> None:
    """Of stages with unlike layers; it dies while both load and save."""
    transfer = connectors.ours(site.daemon.socket, key_format="vllm", cache_prefix=f"bed-killed-{rank}")
    spec = bed.spec(connector=transfer, **{**SMALL, **case_options(UNLIKE, tmp_path)})
    prompts, detached = make_prompts(8, 300), len(site.daemon.records("engine.detached"))
    doomed = site.engine(spec)
    doomed.run(prompts[:4], max_tokens=1)
    site.fresh(doomed)
    doomed.call("tests.e2e.test_ranks:late", 1 - rank, LATE_S)
    doomed.begin(prompts, max_tokens=100)
    doomed.wait_event("first_token")
    doomed.kill(worker_rank=rank)
    eventually(lambda: len(site.daemon.records("engine.detached")) > detached, 20, "the daemon's notice")
    doomed.stop()
    site.assert_idle()
    engine = site.engine(spec)
    served = engine.run(prompts, max_tokens=9)
    assert min(served.cached_tokens[:4]) >= 256
    nothing_wrong(engine, prompts, served.tokens)
    engine.stop()
