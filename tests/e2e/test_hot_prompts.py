"""The store keeps what engines use most, and gets back what it lost: a real engine, daemon and Mooncake."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import PATIENT, At, Site, hits, served
from tests.lab import control
from tests.lab.connectors import upstream
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
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
    engine = here.bed(extra={"cache_prefix": f"lost-{len(again[0])}"})
    lost_while_idle_and_used_again(here, store, engine, lambda _: True, again)


@pytest.mark.stress
@pytest.mark.parametrize("group", [0, 1])
def test_of_two_groups_one_s_blocks_are_stored_again(here: Site, store: Store, group: int) -> None:
    engine = here.bed(layout="windows", extra={"cache_prefix": f"groups-{group}"})
    lost_while_idle_and_used_again(here, store, engine, lambda name: f"@group:{group}" in name, PROMPTS)


@pytest.mark.stress
def test_of_two_ranks_one_s_part_is_stored_again(here: Site, store: Store) -> None:
    engine = here.bed(layout="two heads", extra={"cache_prefix": "ranks"}, tensor_parallel=2)
    lost_while_idle_and_used_again(here, store, engine, lambda name: "@tp_rank:1" in name, PROMPTS)


@pytest.mark.stress
@pytest.mark.parametrize("staged", [False, True])
def test_a_prefix_that_all_requests_use_stays_in_a_store_too_small_for_the_rest(at: At, staged: bool) -> None:
    """Whether it stays in the engine's own cache, or comes from staging each time."""
    [prefix] = make_prompts(1, 640, seed=93)
    questions, fillers = make_prompts(49, 352, seed=94), make_prompts(6, 1024, seed=95)
    with (
        Store(memory="32 MB", lease_ms=LEASE_MS) as store,
        Daemon(mooncake_config=store.config, staging="128MB", extra=AGAIN) as daemon,
    ):
        site = at(daemon)
        engine = site.engine(max_model_len=4096, max_num_batched_tokens=4096, num_gpu_blocks=2048)
        for number, question in enumerate(questions[:-1]):
            engine.run([prefix + question], max_tokens=1)
            if staged:
                assert engine.reset_prefix_cache()
            if number % 8 == 7:
                time.sleep(LEASE_MS / 1000 + 0.2)
                engine.run([fillers[number // 8]], max_tokens=1)
        assert store.metric("master_evicted_key_count") > 0
        engine.stop()
        engine = site.engine(max_model_len=4096, max_num_batched_tokens=4096)
        assert engine.run([prefix + questions[-1]], max_tokens=1).cached_tokens == [640]
        engine.stop()


@pytest.mark.stress
@pytest.mark.timeout(900)
def test_conversations_that_stay_local_outlive_others_prompts_as_long_as_with_upstream(
    at: At, model: Path, engines: Callable[..., Engine]
) -> None:
    """Six of eight turns: 36 MiB in a store of 64 MB beside 96 MiB of prompts that come once; then another engine."""
    conversations, turn = make_prompts(6, 8 * 384, seed=98), 384
    others = iter(make_prompts(48, 1024, seed=99))

    def cached(start: Callable[[], Engine]) -> int:
        engine = start()
        for end in range(turn, 8 * turn + 1, turn):
            for talk in conversations:
                assert engine.run([talk[:end]], max_tokens=1).cached_tokens[0] >= end - 2 * turn, "all of it is local"
            for _ in range(6):
                engine.run([next(others)], max_tokens=1)
                time.sleep(LEASE_MS / 4000)
        engine.stop()
        engine = start()
        found = sum(sum(engine.run([[*talk, 20]], max_tokens=1).cached_tokens) for talk in conversations)
        engine.stop()
        return found

    sizes: dict[str, Any] = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "num_gpu_blocks": 2304}
    found = dict[str, int]()
    with Store(memory="64 MB", lease_ms=LEASE_MS) as store:
        spec = EngineSpec(model=model, kv_transfer=upstream(), mooncake_config=store.config).but(**sizes)
        found["upstream"] = cached(lambda: engines(spec))
        assert store.metric("master_evicted_key_count") > 0
    others = iter(make_prompts(48, 1024, seed=99))
    with (
        Store(memory="64 MB", lease_ms=LEASE_MS) as store,
        Daemon(mooncake_config=store.config, staging="128MB", extra=AGAIN) as daemon,
    ):
        site = at(daemon)
        found["ours"] = cached(lambda: site.engine(**sizes))
        assert store.metric("master_evicted_key_count") > 0
    print(found)
    assert found["ours"] >= found["upstream"]


@pytest.mark.stress
def test_a_store_too_small_for_what_is_used_all_the_time_still_takes_puts(at: At) -> None:
    """The leases of what engines hold end once a put finds no room."""
    hot, new = make_prompts(6, 1024, seed=96), make_prompts(4, 256, seed=97)
    with (
        Store(memory="16 MB", lease_ms=LEASE_MS) as store,
        Daemon(mooncake_config=store.config, staging="64MB", extra=AGAIN) as daemon,
    ):
        site = at(daemon)
        engine = site.engine(max_model_len=4096, max_num_batched_tokens=4096, num_gpu_blocks=1024)
        for prompt in new:
            engine.run(hot, max_tokens=1)
            ends = {key.rpartition("@")[2] for key in control.block_keys(site.model, prompt)}
            engine.run([prompt], max_tokens=1)
            deadline = time.monotonic() + 20
            while not ends & {name.rpartition("@")[2] for name in store.names}:
                assert time.monotonic() < deadline, "no block of the new prompt was stored"
                engine.run(hot, max_tokens=1)
        engine.stop()
