"""States of linear attention (Qwen3-Next) beside full attention: what was computed after a load has the right bytes.

vLLM's CPU build runs such models in bfloat16 alone. Requests run one by one: a sum has the same order each time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BLOCK, Site, failed_loads_are_recomputed, hits, saved_then_loaded, served
from tests.lab import control
from tests.lab.connectors import ours, upstream
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.hybrid import make_qwen3_next
from tests.lab.passes import Pass
from tests.lab.prompts import make_prompts
from tests.lab.store import Store

pytestmark = pytest.mark.stress  # of the gallery; Mamba's states are in the default run

STATES, FULL = 0, 1  # groups: the first layer has a state
# Of these prompts no step has a block's end inside it.
STEP: Any = {"dtype": "bfloat16", "max_num_batched_tokens": BLOCK + 8}
PROMPTS = make_prompts(4, 300, seed=111)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_next(tmp_path_factory.mktemp("models") / "qwen3-next")


@pytest.fixture(scope="module")
def reference(qwen: Path, engines: Callable[..., Engine]) -> Engine:
    """The plain engine, whose tokens are right."""
    return engines(EngineSpec(model=qwen, **STEP))


@pytest.mark.shows("saved, then loaded: tokens equal", "full attention and linear attention")
def test_loaded_tokens_equal_recomputed_ones(site: Site, qwen: Path, reference: Engine) -> None:
    """With a foreign state in a load, all else being right, tokens differ."""
    engine = site.engine(model=qwen, extra={"cache_prefix": "linear"}, **STEP)
    saved_then_loaded(site, reference, engine, PROMPTS, foreign=(STATES,), concurrency=1)
    engine.stop()


@pytest.mark.shows("loads that fail", "full attention and linear attention")
@pytest.mark.shows("aborts", "full attention and linear attention")
@pytest.mark.shows("preemption", "full attention and linear attention")
def test_preempted_requests_load_again_and_failed_loads_are_recomputed(
    site: Site, qwen: Path, reference: Engine
) -> None:
    """The plain engine preempts requests after the same tokens: in bfloat16 a prefill and a decode may differ."""
    preempt: Any = {"requests": len(PROMPTS), "after_tokens": 8}
    assert reference.reset_prefix_cache()
    right = reference.run(PROMPTS, concurrency=1).tokens
    reference.call("tests.e2e.probes:preempt_next", **preempt)
    right_preempted = reference.run(PROMPTS, concurrency=1).tokens
    engine = site.engine(model=qwen, extra={"cache_prefix": "preempted linear"}, **STEP)
    engine.run(PROMPTS, concurrency=1)
    site.fresh(engine)
    engine.call("tests.e2e.probes:count_preemptions")
    engine.call("tests.e2e.probes:preempt_next", **preempt)
    served(engine.run(PROMPTS, concurrency=1), right_preempted)
    counters = engine.call("tests.e2e.probes:counters")
    assert engine.call("tests.e2e.probes:preemptions") == len(PROMPTS)
    assert (counters["loads"], counters["failed_loads"]) == (2 * len(PROMPTS), 0)
    failed_loads_are_recomputed(site, engine, PROMPTS, right, concurrency=1)
    engine.stop()


def saved(engine: Engine, prompts: list[list[int]], cluster: Store, keys: int) -> Pass:
    """Run prompts with an empty cache of the engine's own; the store then has so many keys."""
    assert engine.reset_prefix_cache()
    result = engine.run(prompts, concurrency=1)
    assert cluster.wait_keys(keys) == keys
    return result


@pytest.mark.shows("vLLM's own connector reads ours, and the reverse", "full attention and linear attention")
def test_what_is_computed_after_a_load_has_the_bytes_of_what_was_never_loaded(
    qwen: Path, reference: Engine, cluster: Store, shared: Daemon, engines: Callable[..., Engine]
) -> None:
    """Ours reads what vLLM's own connector wrote, and the reverse; both save the same keys with the same bytes."""
    mine = engines(EngineSpec(model=qwen, kv_transfer=ours(shared.socket, key_format="vllm"), **STEP))
    theirs = engines(EngineSpec(model=qwen, kv_transfer=upstream(), mooncake_config=cluster.config, **STEP))
    for seed, writer, reader in ((112, mine, theirs), (113, theirs, mine), (114, mine, mine)):
        short = make_prompts(2, 300, seed=seed)
        prompts = [prompt + more for prompt, more in zip(short, make_prompts(2, 300, seed=seed + 10), strict=True)]
        states, full = (
            [key for prompt in prompts for key in control.block_keys(qwen, prompt, group=group)]
            for group in (STATES, FULL)
        )
        right, before = reference.run(prompts, concurrency=1).tokens, cluster.keys
        # Of each prompt all full blocks and one state.
        served(saved(theirs, prompts, cluster, before + 2 * (600 // BLOCK + 1)), right, [0, 0])
        computed = control.read_digests(cluster.config, full)
        assert None not in computed
        control.remove(cluster.config, full + present(cluster, states))
        saved(writer, short, cluster, before + 2 * (300 // BLOCK + 1))
        served(saved(reader, prompts, cluster, before + 2 * (600 // BLOCK + 2)), right, hits(short))
        assert control.read_digests(cluster.config, full) == computed
        # The state that was saved after a load; what a block has beside it has no meaning, so tokens are compared.
        served(saved(writer, prompts, cluster, before + 2 * (600 // BLOCK + 2)), right, hits(prompts))
    theirs.stop()
    mine.stop()


def present(cluster: Store, keys: list[str]) -> list[str]:
    """Return the keys that the store has."""
    return [key for key, found in zip(keys, control.read_digests(cluster.config, keys), strict=True) if found]
