"""Real engines load from device slots of a fake GPU: no death changes tokens, and all memory is given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.conftest import starter
from tests.e2e.conftest import PATIENT, At, Site, hits, served, wait_attached
from tests.lab.checkpoint import TINY_TP2, make_checkpoint
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts
from tests.support import fakecuda
from tests.support.auditor import Auditor, ask_daemon
from tests.support.waiting import eventually

pytestmark = fakecuda.needs_fake
PROMPT_BLOCKS = 16
PROMPTS = make_prompts(40, 520, seed=71)
HITS = hits(PROMPTS)
SLOTS = 32  # of 64 KiB in the smallest slab of a rank: two of the prompts


@pytest.fixture(scope="module")
def right(plain: Engine) -> list[list[int]]:
    return plain.run(PROMPTS, max_tokens=8).tokens


@pytest.fixture
def daemons(module_auditor: Auditor) -> Iterator[Callable[..., Daemon]]:
    """daemons(): one with 2 MiB of each GPU for staging."""

    def make() -> Daemon:
        options = ("--device-staging", "2MiB", "--device-margin", "0", *PATIENT)
        environment = fakecuda.machine().environment
        return Daemon(memory="256MiB", staging="64MiB", extra=options, env=environment)

    yield from starter(make)


def spec_of(site: Site, **extra: Any) -> EngineSpec:
    """Worker and scheduler in one process."""
    kv_transfer = ours(site.daemon.socket, wait_timeout_ms=30_000, **extra)
    kv_transfer |= {"kv_connector_module_path": "tests.e2e.device_connector"}
    return EngineSpec(model=site.model, kv_transfer=kv_transfer)


def numbers(daemon: Daemon) -> dict[str, int | str]:
    return ask_daemon(daemon.socket).engines[0]


def check_loads(site: Site, engine: Engine, right: list[list[int]], least: int) -> None:
    """All prompts wait at once for slabs that hold two of them; some blocks come from there, and all tokens are right.

    `right`: the tokens of the prompts that take part.  `least`: at least so many blocks reach each rank's slab and
    leave it.
    """
    prompts = PROMPTS[: len(right)]
    assert engine.run(prompts, max_tokens=8).tokens == right, "saving"
    site.assert_idle(20)
    assert engine.reset_prefix_cache()
    before = loaded_from_device(engine)
    served(engine.run(prompts, max_tokens=8), right, HITS[: len(right)])
    site.assert_idle(20)
    counted = numbers(site.daemon)
    assert counted["device_slots"] == SLOTS
    assert int(counted["promoted_blocks"]) >= least, "slots were used again and again"
    for was, now in zip(before, loaded_from_device(engine), strict=True):
        assert now - was >= least, "blocks were copied out of the slab"
        # The daemon counts a prompt by its table at the end; one prompt, or a tenth of the blocks, may differ.
        allowed = max(PROMPT_BLOCKS, (now - was) // 10)
        assert abs(now - was - int(counted["device_blocks"])) <= allowed, "the daemon knows roughly which"


def loaded_from_device(engine: Engine) -> list[int]:
    """Blocks that each rank loaded from device slots."""
    ranks = engine.call("tests.e2e.device_connector:worker_counters")
    return [counters.get("load_device_bytes", 0) // (64 << 10) for counters in ranks]


def kill_daemon_under_load(site: Site, engine: Engine, right: list[list[int]]) -> None:
    """Claimed blocks load from memory that stays mapped, others are recomputed; a new daemon serves as before."""
    prompts = PROMPTS[: len(right)]
    assert engine.reset_prefix_cache()
    engine.begin(prompts, max_tokens=8)
    engine.wait_event("first_token")
    site.daemon.sigkill()
    assert engine.finish().tokens == right
    site.daemon.start()
    wait_attached(engine)
    assert engine.reset_prefix_cache()
    assert engine.run(prompts, max_tokens=8).tokens == right, "saving again"
    site.assert_idle(20)
    eventually(
        lambda: set(engine.call("tests.e2e.device_connector:mapped")) == {1}, 20.0, "the dead daemon's memory unmapped"
    )


def kill_engine_under_load(
    site: Site, engine: Engine, prompts: list[list[int]], worker_rank: int | None = None
) -> None:
    """Its mappings go with it, and the daemon frees what it had mapped."""
    assert engine.reset_prefix_cache()
    engine.begin(prompts, max_tokens=8)
    engine.wait_event("first_token")
    assert fakecuda.held_by(site.daemon.pid) == engine.spec.tensor_parallel_size
    engine.kill(worker_rank=worker_rank)
    eventually(lambda: fakecuda.held_by(site.daemon.pid) == 0, 30.0, "the device memory given back")
    site.assert_idle(20)
    engine.stop()


def test_loads_from_device_slots_give_the_same_tokens_and_nothing_survives_a_kill(
    at: At, right: list[list[int]], daemons: Callable[..., Daemon]
) -> None:
    daemon = daemons()
    site = at(daemon)
    engine = site.engine(spec_of(site))
    check_loads(site, engine, right, least=3 * SLOTS)
    kill_daemon_under_load(site, engine, right)
    kill_engine_under_load(site, engine, PROMPTS)
    assert daemon.sigterm(60) == 0


@pytest.mark.shows("device cache")
def test_loads_from_device_slots_in_every_way(at: At, right: list[list[int]], daemons: Callable[..., Daemon]) -> None:
    daemon = daemons()
    site = at(daemon)
    engine = site.engine(spec_of(site, load_mode="async", wait_policy="adaptive"))
    for _ in range(3):
        assert engine.run(PROMPTS, max_tokens=8).tokens == right
        site.fresh(engine)
    engine.stop()
    eventually(lambda: fakecuda.held_by(daemon.pid) == 0, 20.0, "the device memory given back")
    assert daemon.sigterm(60) == 0


@pytest.mark.stress  # three engines of two ranks
def test_two_ranks_load_from_device_slots(
    at: At, engines: Callable[..., Engine], daemons: Callable[..., Daemon], tmp_path: Path
) -> None:
    """On a GPU each; then the daemon is killed, and a worker."""
    model = make_checkpoint(tmp_path, TINY_TP2)
    plain = engines(EngineSpec(model=model))
    right = plain.run(PROMPTS[:16], max_tokens=8).tokens
    plain.stop()
    daemon = daemons()
    site = at(daemon)
    env = {fakecuda.SPREAD: "1"}
    engine = engines(spec_of(site).but(model=model, tensor_parallel_size=2, env=env))
    check_loads(site, engine, right, least=2 * SLOTS)
    kill_daemon_under_load(site, engine, right)
    kill_engine_under_load(site, engine, PROMPTS[:16], worker_rank=1)
    assert daemon.sigterm(60) == 0
