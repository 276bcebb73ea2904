"""Real engines that load from device slots, with a GPU of host memory: tokens never change, whoever dies, and all is
given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.connectors import ours
from benchmarks.lab.daemon import Daemon
from benchmarks.lab.engine import Engine, EngineSpec
from benchmarks.lab.prompts import make_prompts
from tests.daemon.conftest import starter
from tests.daemon.fake_engine import wait_for
from tests.e2e.conftest import PATIENT, wait_attached, whole_blocks
from tests.support.auditor import Auditor, ask_daemon, device_memories
from tests.support.device_daemon import with_device

PROMPTS = make_prompts(40, 520, seed=71)  # 16 blocks each
HITS = [whole_blocks(prompt) for prompt in PROMPTS]
SLOTS = 32  # of 64 KiB in the smallest slab: two of the prompts


@pytest.fixture(scope="module")
def right(plain: Engine) -> list[list[int]]:
    return plain.run(PROMPTS, max_tokens=8).tokens


@pytest.fixture
def daemons(module_auditor: Auditor) -> Iterator[Callable[..., Daemon]]:
    """daemons(*extra): one with a GPU of 64 MiB, 2 MiB of it for staging."""

    def make(*extra: str) -> Daemon:
        options = ("--device-staging", "2MiB", "--device-margin", "0", *PATIENT, *extra)
        return with_device(Daemon(memory="256MiB", staging="64MiB", extra=options))

    yield from starter(make)


def spec_of(daemon: Daemon, model: Path, **extra: Any) -> EngineSpec:
    """Worker and scheduler in one process, so that a test can look into both."""
    kv_transfer = ours(daemon.socket, wait_timeout_ms=30_000, **extra) | {
        "kv_connector_module_path": "tests.e2e.device_connector"
    }
    return EngineSpec(model=model, kv_transfer=kv_transfer, own_worker=False)


def numbers(daemon: Daemon) -> dict[str, int | str]:
    return ask_daemon(daemon.socket).engines[0]


def idle(auditor: Auditor, daemon: Daemon) -> None:
    auditor.assert_idle(daemon.pid, daemon.socket, timeout_s=20)


def check_loads(daemon: Daemon, engine: Engine, auditor: Auditor, right: list[list[int]], least: int) -> None:
    """All prompts wait at once for a slab that holds two of them; some blocks are taken from it, and all are right.

    `least`: how many blocks at least are copied to the slab, and from it.
    """
    assert engine.run(PROMPTS, max_tokens=8).tokens == right, "saving"
    idle(auditor, daemon)
    assert engine.reset_prefix_cache()
    before = engine.call("tests.e2e.device_connector:worker_counters")
    second = engine.run(PROMPTS, max_tokens=8)
    assert second.tokens == right
    assert second.cached_tokens == HITS
    idle(auditor, daemon)
    counted, after = numbers(daemon), engine.call("tests.e2e.device_connector:worker_counters")
    assert counted["device_slots"] == SLOTS
    assert int(counted["promoted_blocks"]) >= least, "slots were used again and again"
    loaded = (after["load_device_bytes"] - before.get("load_device_bytes", 0)) // (64 << 10)
    assert loaded >= least, "blocks were copied out of the slab"
    assert abs(loaded - int(counted["device_blocks"])) <= loaded // 10, "the daemon knows roughly which"


def test_loads_from_device_slots_give_the_same_tokens_and_nothing_survives_a_kill(
    model: Path, right: list[list[int]], engines: Callable[..., Engine], module_auditor: Auditor,
    daemons: Callable[..., Daemon],
) -> None:  # fmt: skip
    daemon = daemons()
    engine = engines(spec_of(daemon, model))
    check_loads(daemon, engine, module_auditor, right, least=3 * SLOTS)
    # The daemon is killed under load: what was claimed is loaded from memory that stays mapped, the rest is recomputed.
    assert engine.reset_prefix_cache()
    engine.begin(PROMPTS, max_tokens=8)
    engine.wait_event("first_token")
    daemon.sigkill()
    assert engine.finish().tokens == right
    daemon.start()
    wait_attached(engine)
    assert engine.reset_prefix_cache()
    assert engine.run(PROMPTS, max_tokens=8).tokens == right, "saving again"
    idle(module_auditor, daemon)
    wait_for(lambda: engine.call("tests.e2e.device_connector:mapped") == 1, 20.0, "the dead daemon's memory unmapped")
    # The engine is killed under load: its mapping goes with it, and the daemon frees what it had mapped.
    assert engine.reset_prefix_cache()
    engine.begin(PROMPTS, max_tokens=8)
    engine.wait_event("first_token")
    assert device_memories(daemon.pid) == 1
    engine.kill()
    wait_for(lambda: device_memories(daemon.pid) == 0, 20.0, "the device memory given back")
    idle(module_auditor, daemon)
    engine.stop()
    assert daemon.sigterm(60) == 0


@pytest.mark.stress
@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ((), {"load_mode": "async"}),
        (("--device-owner", "engine"), {}),
        (("--device-owner", "engine"), {"load_mode": "async", "wait_policy": "adaptive"}),
    ],
)
def test_loads_from_device_slots_in_every_way(
    model: Path, right: list[list[int]], engines: Callable[..., Engine], module_auditor: Auditor,
    daemons: Callable[..., Daemon], options: tuple[str, ...], extra: dict[str, Any],
) -> None:  # fmt: skip
    daemon = daemons(*options)
    engine = engines(spec_of(daemon, model, **extra))
    if extra.get("wait_policy") == "adaptive":
        for _ in range(3):
            assert engine.run(PROMPTS, max_tokens=8).tokens == right
            idle(module_auditor, daemon)
            assert engine.reset_prefix_cache()
    else:
        # Asynchronous loads wait for no seat: they are claimed as soon as they are staged, most before their turn here.
        check_loads(daemon, engine, module_auditor, right, least=1 if "load_mode" in extra else 3 * SLOTS)
    engine.stop()
    wait_for(lambda: device_memories(daemon.pid) == 0, 20.0, "the device memory given back")
    assert daemon.sigterm(60) == 0
