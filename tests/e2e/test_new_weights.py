"""Engines whose weights change while they run: each loads KV of the weights that it has by now, whoever stored it.

vLLM resets before the update (`/pause`), others after it, and some forget to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.conftest import Site, hits, served
from tests.lab.checkpoint import TINY, TINY_TP2, Shape, make_checkpoint
from tests.lab.connectors import ours
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts
from tests.support.waiting import eventually

PROMPTS = make_prompts(4, 300, seed=12)
HITS, NONE = hits(PROMPTS), [0] * len(PROMPTS)
FIRST = make_prompts(1, 20, seed=13)
READABLE = "tests.e2e.new_weights:readable"


def checkpoints(folder: Path, shape: Shape) -> list[str]:
    return [str(make_checkpoint(folder, replace(shape, seed=seed))) for seed in (5, 6)]


def load(engine: Engine, checkpoint: str) -> None:
    engine.call("tests.e2e.new_weights:load", checkpoint)


def pause_and_load(engine: Engine, checkpoint: str) -> None:
    """`/pause`, the update, `/resume`; the next step says what the weights are."""
    assert engine.reset_prefix_cache(reset_connector=True)
    load(engine, checkpoint)
    step(engine)


def step(engine: Engine) -> None:
    engine.run(FIRST, max_tokens=1)
    eventually(lambda: engine.call("tests.e2e.new_weights:known"), 10.0, "weights that the daemon knows")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.stress)])
def test_engines_share_kv_of_equal_weights_alone(
    site: Site, engines: Callable[..., Engine], tmp_path: Path, ranks: int
) -> None:
    shape = TINY if ranks == 1 else TINY_TP2
    five, six = checkpoints(tmp_path, shape)
    start = make_checkpoint(tmp_path, shape)
    plain = EngineSpec(model=start, prepare=READABLE)
    reference, right = engines(plain), {}
    for checkpoint in (five, six):
        load(reference, checkpoint)
        assert reference.reset_prefix_cache()
        right[checkpoint] = reference.run(PROMPTS).tokens
    reference.stop()
    assert right[five] != right[six], "or it would not matter"
    spec = plain.but(kv_transfer=ours(site.daemon.socket, cache_prefix="trained"), tensor_parallel_size=ranks)
    one, other = site.engine(spec), site.engine(spec)
    pause_and_load(one, five)
    served(one.run(PROMPTS), right[five], NONE)
    site.fresh(one)
    load(other, five)
    assert other.reset_prefix_cache(reset_connector=True)
    step(other)
    served(other.run(PROMPTS), right[five], HITS)
    pause_and_load(other, six)
    served(other.run(PROMPTS), right[six], NONE)
    site.fresh(other)
    # Nobody resets our side: the first requests are hinted at, and answered with, KV of the old weights.
    load(one, six)
    served(one.run(PROMPTS), right[six])
    step(one)
    site.fresh(one)
    served(one.run(PROMPTS), right[six], HITS)
    pause_and_load(one, five)
    served(one.run(PROMPTS), right[five], HITS)
    for each in (one, other):
        each.stop()


def test_weights_that_cannot_be_read_are_shared_with_no_other_engine(site: Site, tmp_path: Path) -> None:
    """vLLM's CPU backend packs them. The log says so once, and each reset ends what was stored before."""
    five, six = checkpoints(tmp_path, TINY)
    engine = site.engine(extra={"cache_prefix": "packed"})
    found = []
    for checkpoint in (five, six, five):
        assert engine.reset_prefix_cache(reset_connector=True)
        engine.call("tests.e2e.new_weights:reload", checkpoint)
        step(engine)
        found.append(engine.run(PROMPTS).tokens)
        site.fresh(engine)
        served(engine.run(PROMPTS), found[-1], HITS)
    assert found[0] == found[2] != found[1]
    assert engine.log.read_text().count("weights cannot be compared") == 1
    engine.stop()
