"""The store keeps what engines use most, and gets back what it lost: a real engine, daemon and Mooncake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import PATIENT, At, Site, hits, served
from tests.lab import control
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine
from tests.lab.hybrid import make_gemma3
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.support.waiting import eventually

LEASE_MS = 1000
PROMPTS = make_prompts(3, 300, seed=91)
LONGER = [prompt + more for prompt, more in zip(PROMPTS, make_prompts(3, 100, seed=92), strict=True)]
AGAIN = ("--lease-ms", str(LEASE_MS), *PATIENT)


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with Store(memory="256 MB", lease_ms=LEASE_MS) as store:
        yield store


@pytest.fixture(scope="module")
def here(store: Store, at: At) -> Iterator[Site]:
    with Daemon(mooncake_config=store.config, staging="64MiB", extra=AGAIN) as daemon:
        yield at(daemon)


def lost_while_idle_and_used_again(
    here: Site, store: Store, engine: Engine, lost: Callable[[str], bool], again: list[list[int]]
) -> None:
    """One use of what the engine itself holds brings it back into the store, though the engine is idle after it."""
    others = store.names
    right = engine.run(PROMPTS).tokens
    here.assert_idle()
    before = store.names - others
    control.remove(store.config, sorted(filter(lost, before)))
    assert not store.names >= before
    assert min(engine.run(again).cached_tokens) >= hits(PROMPTS)[0], "all of it was local"
    eventually(lambda: store.names >= before, what="all values are stored again")
    here.fresh(engine)
    served(engine.run(PROMPTS), right, hits(PROMPTS))
    here.assert_idle()
    engine.stop()


@pytest.mark.parametrize("again", [PROMPTS, LONGER], ids=["all local", "hinted"])
def test_what_the_store_lost_is_stored_again_after_one_use(here: Site, store: Store, again: list[list[int]]) -> None:
    engine = here.engine(extra={"cache_prefix": f"lost-{len(again[0])}"})
    lost_while_idle_and_used_again(here, store, engine, lambda _: True, again)


@pytest.mark.stress
@pytest.mark.parametrize("group", [0, 1])
def test_of_two_groups_one_s_blocks_are_stored_again(here: Site, store: Store, tmp_path: Path, group: int) -> None:
    model = make_gemma3(tmp_path / "gemma3")
    engine = here.engine(model=model, extra={"cache_prefix": f"groups-{group}"})
    lost_while_idle_and_used_again(here, store, engine, lambda name: f"@group:{group}" in name, PROMPTS)


@pytest.mark.stress
def test_of_two_ranks_one_s_part_is_stored_again(here: Site, store: Store, tmp_path: Path) -> None:
    model = make_gemma3(tmp_path / "gemma3", kv_heads=2)
    engine = here.engine(model=model, extra={"cache_prefix": "ranks"}, tensor_parallel_size=2)
    lost_while_idle_and_used_again(here, store, engine, lambda name: "@tp_rank:1" in name, PROMPTS)
