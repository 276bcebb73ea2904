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
    answers,
    each_reads_what_the_other_wrote,
    failed_loads_are_recomputed,
    hits,
    loaded_on_two_ranks,
    preempted_and_aborted,
    saved_then_loaded,
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

pytestmark = pytest.mark.skipif(
    vllm.__version__.startswith("0.31."), reason="vLLM 0.31's CPU build does not run this model"
)

STATES = 0  # the group: the first layer has a state
STATE_BYTES = 11_456  # of the 16 KiB of a layer's page
PROMPTS = make_prompts(4, 300, seed=91)
LONG = [prompt + more for prompt, more in zip(PROMPTS, make_prompts(4, 308, seed=92), strict=True)]
OTHERS = make_prompts(20, 300, seed=101)
# Of these prompts no step has a block's end inside it (see make_granite).
STEP: Any = {"max_num_batched_tokens": BLOCK + 8}
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
    engine = site.engine(model=granite, extra={"cache_prefix": "states"}, **STEP)
    saved_then_loaded(site, reference, engine, PROMPTS, LONG, (STATES,))
    assert engine.call("tests.e2e.probes:counters")["failed_loads"] == 0
    engine.stop()


@pytest.mark.stress  # of the gallery; the default run has states, and windows
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
    each_reads_what_the_other_wrote(cluster, windowed, mine, theirs, stored, 121, written)
    theirs.stop()
    site = Site(shared, granite, module_auditor, engines)
    # Entries of the first state, of the window, of full attention.
    saved_then_loaded(site, windowed, mine, PROMPTS, LONG, (0, 3, 4))
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


@pytest.mark.shows("aborts", "full attention and Mamba")
@pytest.mark.shows("preemption", "full attention and Mamba")
def test_under_preemption_and_with_aborted_requests(site: Site) -> None:
    preempted_and_aborted(site, [prompt[:204] for prompt in PROMPTS], 100, "states")


@pytest.mark.shows("loads that fail", "full attention and Mamba")
def test_requests_whose_loads_failed_are_recomputed(site: Site) -> None:
    engine = site.bed(layout="states", extra={"cache_prefix": "failing"})
    failed_loads_are_recomputed(site, engine, PROMPTS, answers(PROMPTS))
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


@pytest.mark.shows("two tensor-parallel ranks", "full attention and Mamba")
def test_on_two_ranks_that_hold_the_same_head_and_unlike_states(site: Site) -> None:
    loaded_on_two_ranks(site, PROMPTS, "states")


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
