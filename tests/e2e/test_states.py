"""Tokens never change with a group of states (Mamba) beside full attention."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import (
    BLOCK,
    PATIENT,
    RUNS_GRANITE,
    At,
    Site,
    answers,
    failed_loads_are_recomputed,
    hits,
    loaded_on_two_ranks,
    preempted_and_aborted,
    saved_then_loaded,
    served,
)
from tests.e2e.deep import Pair, patient
from tests.lab import control
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.hybrid import make_granite
from tests.lab.process import frozen
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.support.auditor import Auditor

pytestmark = RUNS_GRANITE

STATES = 0  # the group: the first layer has a state
PROMPTS = make_prompts(4, 300, seed=91)
LONG = [prompt + more for prompt, more in zip(PROMPTS, make_prompts(4, 308, seed=92), strict=True)]
OTHERS = make_prompts(20, 300, seed=101)
# Of these prompts no step has a block's end inside it (see make_granite).
STEP: Any = {"max_num_batched_tokens": BLOCK + 8}
# Of the bed: Mamba's states, and those of Qwen3-Next.
LAYOUTS: dict[str, Any] = {"states": {}, "linear states": {"dtype": "bfloat16"}}
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


@pytest.mark.shows("values with a page that a disk lost", "full attention and Mamba")
def test_a_lost_page_of_a_state_is_found_and_zeros_of_its_padding_are_right(
    granite: Path, reference: Engine, engines: Callable[..., Engine], at: At, tmp_path: Path
) -> None:
    """Of the two states in a value 11,456 bytes of 16 KiB each are written; the lost page is one of the second."""
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
@pytest.mark.shows("aborts", "full attention and linear attention")
@pytest.mark.shows("preemption", "full attention and linear attention")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_preemption_and_with_aborted_requests(site: Site, layout: str) -> None:
    preempted_and_aborted(site, [prompt[:204] for prompt in PROMPTS], 100, layout, **LAYOUTS[layout])


@pytest.mark.shows("loads that fail", "full attention and Mamba")
@pytest.mark.shows("loads that fail", "full attention and linear attention")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_whose_loads_failed_are_recomputed(site: Site, layout: str) -> None:
    engine = site.bed(layout=layout, extra={"cache_prefix": f"failing {layout}"}, **LAYOUTS[layout])
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
