"""Groups outside vLLM's prefix cache, as models of GPUs have them, on the bed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import Site
from tests.e2e.test_bed import CASES, NGRAM, SMALL, bed_connector, disturbed, nothing_wrong
from tests.lab import connectors
from tests.lab.bed import engine as bed
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.lab.template import Template
from tests.support.waiting import poll

OUTSIDE = ["bounded replay", "ring", "states and a ring"]
DRAFTING = [(case, drafts) for case in OUTSIDE for drafts in (False, True) if "states" not in case or not drafts]


def outside(site: Site, case: str, drafts: bool, **extra: Any) -> EngineSpec:
    options = {**SMALL, **CASES[case]}
    if drafts:
        options |= {"scheduling": "sync", "extra": {"speculative_config": NGRAM}}
    return bed.spec(connector=bed_connector(site, f"bed-{case}-{drafts}", **extra), **options)


@pytest.mark.parametrize(("case", "drafts"), DRAFTING)
@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=pytest.mark.stress)])
def test_groups_outside_the_prefix_cache_are_computed_and_the_others_loaded(
    site: Site, case: str, drafts: bool, rounds: int
) -> None:
    """250 requests, and resets in between: no row is wrong, whatever is preempted, aborted or cut into chunks."""
    engine = site.engine(outside(site, case, drafts))
    engine.call("tests.e2e.probes:count_preemptions")
    for number in range(rounds):
        disturbed(engine, 90, seed=number)
        site.fresh(engine)
        disturbed(engine, 90, seed=number)
        assert engine.reset_prefix_cache(reset_connector=True)
        disturbed(engine, 70, seed=number)
    counters = engine.call("tests.e2e.probes:counters")
    assert counters["loads"] > 30
    assert counters["failed_loads"] == 0
    assert engine.call("tests.e2e.probes:preemptions") > 0
    engine.stop()


@pytest.mark.parametrize("case", OUTSIDE)
def test_hits_beside_groups_outside_the_prefix_cache_are_upstreams(site: Site, template: Template, case: str) -> None:
    """Of prompts that are stored, in part or not at all, and where some of it is local."""
    stored = make_prompts(6, 400)
    asked = [each[: 40 * number + 150] + make_prompts(1, 60, seed=9)[0] for number, each in enumerate(stored)]
    spec = outside(site, case, drafts=False)

    def hits(engine: Engine, settle: Callable[[], object]) -> list[list[int]]:
        engine.run(stored, max_tokens=1)
        settle()
        assert engine.reset_prefix_cache()
        served = [engine.run([prompt], max_tokens=4) for prompt in (*asked, *stored)]
        for prompt, each in zip((*asked, *stored), served, strict=True):
            nothing_wrong(engine, [prompt], each.tokens)
        return [each.cached_tokens for each in served]

    keys = len(stored) * 6
    with Store() as store:
        theirs = spec.but(kv_transfer=connectors.upstream(), mooncake_config=store.config)
        with Engine(theirs, template=template) as engine:
            upstreams = hits(engine, lambda: poll(lambda: store.keys == keys, 30.0))
            assert store.keys >= keys
    engine = site.engine(spec)
    assert hits(engine, site.assert_idle) == upstreams
    assert [384] in upstreams
    engine.stop()
