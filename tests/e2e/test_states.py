"""Tokens never change with a group of states (Mamba) beside full attention."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm

from tests.e2e.conftest import (
    BLOCK,
    PATIENT,
    At,
    Site,
    abort_every_other,
    each_reads_what_the_other_wrote,
    failed_loads_are_recomputed,
    hits,
    loaded_on_two_ranks,
    served,
)
from tests.e2e.deep import Pair, patient
from tests.lab import control
from tests.lab.connectors import ours, upstream
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.hybrid import WINDOW, make_granite
from tests.lab.process import frozen
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.support.auditor import Auditor
from tests.support.compiler import needs_cxx

pytestmark = pytest.mark.skipif(
    vllm.__version__.startswith("0.31."), reason="vLLM 0.31's CPU build does not run this model"
)

STATES, FULL = 0, 1  # groups: the first layer has a state
STATE_BYTES = 11_456  # of the 16 KiB of a layer's page
PROMPTS = make_prompts(6, 300, seed=91)
LONG = [prompt + more for prompt, more in zip(PROMPTS, make_prompts(6, 308, seed=92), strict=True)]
OTHERS = make_prompts(20, 300, seed=101)
# Of these prompts no step has a block's end inside it (see make_granite).
STEP: Any = {"max_num_batched_tokens": BLOCK + 8}
WITHOUT_CHECKPOINTS = "tests.lab.hybrid:without_checkpoints_inside_a_step"
# A transfer whose peer stood still may wait inside Mooncake for up to 60 s; its slots come back with it.
DEAD_PEER_S = 75.0


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_granite(tmp_path_factory.mktemp("models") / "granite")


@pytest.fixture(scope="module")
def reference(granite: Path, engines: Callable[..., Engine]) -> Engine:
    """The plain engine, whose tokens are right."""
    return engines(EngineSpec(model=granite, **STEP))


@pytest.mark.shows("saved, then loaded: tokens equal", "full attention and Mamba")
def test_loaded_tokens_equal_recomputed_ones(site: Site, granite: Path, reference: Engine) -> None:
    """Beside local hits too; with a foreign state in a load, all else being right, tokens differ."""
    right, right_long = reference.run(PROMPTS).tokens, reference.run(LONG).tokens
    engine = site.engine(model=granite, extra={"cache_prefix": "states"}, **STEP)
    served(engine.run(PROMPTS), right, [0] * len(PROMPTS))
    assert engine.run(LONG).tokens == right_long
    site.fresh(engine)
    served(engine.run(PROMPTS), right, hits(PROMPTS))
    served(engine.run(LONG), right_long, hits(LONG))
    counters = engine.call("tests.e2e.probes:counters")
    assert (counters["loads"], counters["failed_loads"]) == (2 * len(PROMPTS), 0)
    site.a_foreign_block_shows(engine, PROMPTS, right, STATES)
    site.assert_idle()
    engine.stop()


@pytest.mark.shows("saved, then loaded: tokens equal", "full attention, sliding windows and Mamba")
@pytest.mark.shows("vLLM's own connector reads ours, and the reverse", "full attention, sliding windows and Mamba")
def test_with_windows_too_loaded_tokens_are_right_and_each_connector_reads_what_the_other_wrote(
    cluster: Store,
    shared: Daemon,
    granite: Path,
    engines: Callable[..., Engine],
    module_auditor: Auditor,
) -> None:
    """Four groups of a layer each: two with states, one with a window of two blocks, one of full attention."""
    plain = EngineSpec(model=granite, prepare="tests.lab.hybrid:windows_among_states", **STEP)
    windowed = engines(plain)
    mine = engines(plain.but(kv_transfer=ours(shared.socket, key_format="vllm")))
    theirs = engines(plain.but(kv_transfer=upstream(), mooncake_config=cluster.config))
    stored, written = 300 // BLOCK + 2 + WINDOW // BLOCK, {0: STATE_BYTES, 1: STATE_BYTES, 2: None, 3: None}
    each_reads_what_the_other_wrote(cluster, windowed, mine, theirs, stored, 98, written)
    theirs.stop()
    right, right_long = windowed.run(PROMPTS).tokens, windowed.run(LONG).tokens
    assert mine.run(PROMPTS).tokens == right
    assert mine.run(LONG).tokens == right_long
    site = Site(shared, granite, module_auditor, engines)
    site.fresh(mine)
    served(mine.run(PROMPTS), right, hits(PROMPTS))
    served(mine.run(LONG), right_long, hits(LONG))  # beside local hits
    for entry in (0, 3, 4):  # of the first state, of the window, of full attention
        site.a_foreign_block_shows(mine, PROMPTS, right, entry)
    mine.stop()
    windowed.stop()


@pytest.mark.shows("values with a page that a disk lost", "full attention and Mamba")
def test_a_lost_page_of_a_state_is_found_and_zeros_of_its_padding_are_right(
    granite: Path, reference: Engine, engines: Callable[..., Engine], at: At, tmp_path: Path
) -> None:
    """Of the two states in a value STATE_BYTES each are written; the lost page is one of the second."""
    right = reference.run(PROMPTS).tokens
    with Daemon(memory="128MiB", staging="32MiB", disk=f"{tmp_path / 'disk'}:256MiB", extra=PATIENT) as daemon:
        site = at(daemon)
        spec = EngineSpec(model=granite, kv_transfer=ours(daemon.socket, key_format="vllm"), **STEP)
        engine = site.engine(spec)
        assert engine.run(PROMPTS).tokens == right
        site.assert_idle()
        engine.stop()
        assert daemon.sigterm(60) == 0
        name = control.block_keys(granite, PROMPTS[2], group=STATES)[300 // BLOCK - 1].encode()
        [meta] = [each for each in (tmp_path / "disk").glob("*.meta") if name in each.read_bytes()]
        with meta.with_suffix(".bucket").open("r+b") as file:  # of one value
            size, value = file.seek(0, os.SEEK_END), 2 * 16384
            file.seek(size - value + 16384 + 4096)
            assert any(file.read(4096))
            file.seek(size - value + 16384 + 4096)
            file.write(bytes(4096))
        daemon.start()
        engine = site.engine(spec)
        expected = hits(PROMPTS)
        expected[2] = 0
        served(engine.run(PROMPTS), right, expected)
        assert sum(line["blocks"] for line in daemon.records("store.corrupt")) == 1
        site.assert_idle()
        engine.stop()
        assert daemon.sigterm(60) == 0


@pytest.mark.stress  # as test_groups, whose preempted requests are in the default run
@pytest.mark.shows("aborts", "full attention and Mamba")
@pytest.mark.shows("preemption", "full attention and Mamba")
def test_under_preemption_and_with_aborted_requests(site: Site, granite: Path, reference: Engine) -> None:
    prompts = [prompt[:204] for prompt in PROMPTS]
    first = reference.run(prompts, max_tokens=100)
    engine = site.engine(
        model=granite,
        extra={"cache_prefix": "preempted states"},
        prepare=WITHOUT_CHECKPOINTS,  # a preempted request's last step may have a block's end inside it
        num_gpu_blocks=28,
        max_model_len=384,
    )
    engine.call("tests.e2e.probes:count_preemptions")
    assert engine.run(prompts, max_tokens=100).tokens == first.tokens
    for steps in range(3):
        site.fresh(engine)
        abort_every_other(engine, prompts, first.tokens, steps, max_tokens=100)
    assert engine.call("tests.e2e.probes:preemptions") > 0
    site.fresh(engine)
    served(engine.run(prompts, max_tokens=100), first.tokens)
    counters = engine.call("tests.e2e.probes:counters")
    assert counters["loads"] >= len(prompts)
    assert counters["failed_loads"] == 0
    site.assert_idle()
    engine.stop()


@pytest.mark.stress  # as test_groups, in the default run
@pytest.mark.shows("loads that fail", "full attention and Mamba")
def test_requests_whose_loads_failed_are_recomputed(site: Site, granite: Path, reference: Engine) -> None:
    right = reference.run(PROMPTS).tokens
    engine = site.engine(model=granite, extra={"cache_prefix": "failing"}, **STEP)
    failed_loads_are_recomputed(site, engine, PROMPTS, right)
    engine.stop()


@pytest.mark.stress
@pytest.mark.shows("store that hangs or dies", "full attention and Mamba")
def test_a_store_that_hangs_or_dies_costs_no_tokens(
    granite: Path, reference: Engine, engines: Callable[..., Engine], module_auditor: Auditor
) -> None:
    right, small = reference.run(PROMPTS).tokens, ("--save-share", "0.5")
    with (
        Store(memory="256 MB") as store,
        Daemon(mooncake_config=store.config, staging="8MiB", extra=small) as daemon,
    ):
        transfer = patient(daemon, 1.0)
        pair = Pair(engines(EngineSpec(model=granite, kv_transfer=transfer, **STEP)), daemon, module_auditor, 1.0)
        assert pair.run(PROMPTS).tokens == right
        stored = len(PROMPTS) * (300 // BLOCK + 1)
        assert store.wait_keys(stored) == stored
        served(pair.run(PROMPTS), right, hits(PROMPTS))
        for _ in range(2):
            pair.run(OTHERS)  # which take the staging area
        with frozen(store.node_pid):
            pair.begin(PROMPTS)
            during = pair.collect()
        assert during.tokens == right
        assert sum(during.cached_tokens) < sum(hits(PROMPTS)), "the store was needed"
        pair.assert_idle(DEAD_PEER_S)
        pair.begin(PROMPTS)
        pair.engine.wait_event("first_token")
        os.kill(store.node_pid, signal.SIGKILL)
        assert pair.collect().tokens == right
        pair.assert_idle(DEAD_PEER_S)
        pair.engine.stop()


@pytest.mark.stress
def test_prompts_that_part_inside_others(site: Site, granite: Path, reference: Engine) -> None:
    """Where two prompts part there is no state yet: the second computes it, and the third goes on from there."""
    begin = make_prompts(1, 192, seed=93)[0]
    prompts = [begin + rest for rest in make_prompts(4, 108, seed=94)]
    right = [reference.run([prompt]).tokens[0] for prompt in prompts]
    engine = site.engine(model=granite, extra={"cache_prefix": "parting"}, **STEP)
    for prompt, tokens in zip(prompts, right, strict=True):
        served(engine.run([prompt]), [tokens], [0])  # with an empty cache of its own no engine knows where prompts part
        site.fresh(engine)
    for prompt, tokens in zip(prompts[:2], right[:2], strict=True):  # now the second one meets the first one's blocks
        served(engine.run([prompt]), [tokens], [288])
    others = [begin + rest for rest in make_prompts(2, 108, seed=95)]
    parted, gone_on = (served(engine.run([each]), reference.run([each]).tokens) for each in others)
    assert (parted.cached_tokens, gone_on.cached_tokens) == ([0], [192])
    site.fresh(engine)
    last = begin + make_prompts(1, 108, seed=96)[0]
    served(engine.run([last]), reference.run([last]).tokens, [192])
    site.assert_idle()
    engine.stop()


@pytest.mark.stress
@pytest.mark.shows("two tensor-parallel ranks", "full attention and Mamba")
@needs_cxx
def test_on_two_ranks_that_hold_the_same_head_and_unlike_states(
    site: Site, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    loaded_on_two_ranks(site, engines, make_granite(tmp_path / "granite", kv_heads=1), PROMPTS, **STEP)


@pytest.mark.stress
@pytest.mark.shows("vLLM's own connector reads ours, and the reverse", "full attention and Mamba")
def test_each_connector_reads_what_the_other_wrote(
    granite: Path, cluster: Store, reference: Engine, shared: Daemon, engines: Callable[..., Engine]
) -> None:
    """Both store the same keys with the same bytes: of full attention all blocks, of the states the last one."""
    mine = engines(EngineSpec(model=granite, kv_transfer=ours(shared.socket, key_format="vllm"), **STEP))
    theirs = engines(EngineSpec(model=granite, kv_transfer=upstream(), mooncake_config=cluster.config, **STEP))
    each_reads_what_the_other_wrote(cluster, reference, mine, theirs, 300 // BLOCK + 1, seed=97)
    theirs.stop()
    mine.stop()


@pytest.mark.stress
def test_without_a_lost_state_the_next_shorter_prefix_with_one_is_loaded(
    granite: Path, cluster: Store, shared: Daemon, engines: Callable[..., Engine], module_auditor: Auditor
) -> None:
    """States are kept every two blocks, and before the prompt's end."""
    site = Site(shared, granite, module_auditor, engines)
    transfer = ours(shared.socket, key_format="vllm", cache_prefix="lost")
    spec = EngineSpec(model=granite, kv_transfer=transfer, extra={"prefix_cache_retention_interval": 2 * BLOCK}, **STEP)
    engine = site.engine(spec)
    prompts = make_prompts(2, 300, seed=100)
    tokens = engine.run(prompts).tokens
    site.fresh(engine)
    served(engine.run(prompts), tokens, hits(prompts))
    for group, block, left in ((STATES, 8, 8), (FULL, 5, 4), (STATES, 3, 2)):
        control.remove(cluster.config, [f"lost@{control.block_keys(granite, prompts[0], group=group)[block]}"])
        site.assert_idle()
        engine.stop()
        engine = site.engine(spec)  # with staging of its own, where nothing is yet
        assert engine.run(prompts[:1], max_tokens=1).cached_tokens == [left * BLOCK]
        if group == FULL:
            control.remove(cluster.config, [f"lost@{control.block_keys(granite, prompts[0], group=group)[block]}"])
        served(engine.run(prompts), tokens)
    site.assert_idle()
    engine.stop()
