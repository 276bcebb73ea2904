"""Engines and daemons that come, go, stop and are killed: the engine serves every request, and nothing stays behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import BLOCK, wait_attached, whole_blocks
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineSpec
from tests.lab.passes import Abort
from tests.lab.prompts import make_prompts
from tests.support.auditor import Auditor
from tests.support.waiting import eventually

PROMPTS = make_prompts(8, 300, seed=31)
HITS = [whole_blocks(prompt) for prompt in PROMPTS]
FILES = sum(HITS) // BLOCK


@pytest.fixture(scope="module")
def right(plain: Engine) -> list[list[int]]:
    return plain.run(PROMPTS).tokens


def test_the_daemon_may_come_late_stop_and_come_back(
    model: Path, right: list[list[int]], engines: Callable[..., Engine], module_auditor: Auditor, tmp_path: Path
) -> None:
    disk = f"{tmp_path / 'disk'}:256MiB"
    daemon = Daemon(memory="64MiB", staging="32MiB", disk=disk)
    engine = engines(EngineSpec(model=model, kv_transfer=ours(daemon.socket)), attached=False)
    assert engine.run(PROMPTS).tokens == right, "no daemon yet"
    with daemon:
        wait_attached(engine)
        assert engine.reset_prefix_cache()
        assert engine.run(PROMPTS).tokens == right, "saving"
        module_auditor.assert_idle(daemon.pid, daemon.socket)
        assert engine.reset_prefix_cache()
        second = engine.run(PROMPTS)
        assert second.tokens == right
        assert second.cached_tokens == HITS
        for end in ("sigterm", "sigkill"):
            if end == "sigkill":
                # What has reached the disk is kept (docs/durability.md).
                eventually(lambda: len(list((tmp_path / "disk").rglob("*.meta"))) == FILES, what="the files")
            assert engine.reset_prefix_cache()
            engine.begin(PROMPTS, max_tokens=64, concurrency=2)
            engine.wait_event("first_token")
            getattr(daemon, end)()
            disturbed = engine.finish()
            assert [tokens[:32] for tokens in disturbed.tokens] == right, end
            assert {request.finish_reason for request in disturbed.requests} == {"length"}
            daemon.start()
            wait_attached(engine)
            assert engine.reset_prefix_cache()
            again = engine.run(PROMPTS)
            assert again.tokens == right, end
            assert again.cached_tokens == HITS, f"the disk tier has it all after {end}"
        module_auditor.assert_idle(daemon.pid, daemon.socket)
        for _ in range(3):
            daemon.sigkill()
            daemon.start()
            wait_attached(engine)
        eventually(lambda: staging_mapped(engine) <= 2, what="an idle engine with one ended staging at most")
        engine.stop()


def staging_mapped(engine: Engine) -> int:
    """How many daemons' staging the engine's processes have mapped."""
    files = set()
    for pid in {engine.scheduler_pid, *engine.worker_pids}:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            area, _, _, _, inode, *name = line.split()
            begin, end = (int(address, 16) for address in area.split("-"))
            if name[:1] == ["/memfd:kvprefetch"] and end - begin > 16 << 20:
                files.add(inode)
    return len(files)


def test_aborts_at_every_stage_leave_nothing_pinned(
    model: Path, right: list[list[int]], engines: Callable[..., Engine], module_auditor: Auditor
) -> None:
    with Daemon(memory="64MiB", staging="16MiB") as daemon:
        for load_mode in ("sync", "async"):
            engine = engines(EngineSpec(model=model, kv_transfer=ours(daemon.socket, load_mode=load_mode)))
            engine.run(PROMPTS)
            module_auditor.assert_idle(daemon.pid, daemon.socket)
            for steps in range(6):
                assert engine.reset_prefix_cache()
                aborts = [Abort(index, after_steps=steps + index) for index in range(0, len(PROMPTS), 2)]
                partly = engine.run(PROMPTS, aborts=aborts)
                for request in partly.requests[1::2]:
                    assert request.tokens == right[request.index]
                module_auditor.assert_idle(daemon.pid, daemon.socket)
            engine.stop()


@pytest.mark.parametrize("victim", ["scheduler", "worker"])
def test_a_killed_engine_leaves_nothing_and_others_go_on(
    model: Path, right: list[list[int]], engines: Callable[..., Engine], module_auditor: Auditor, victim: str
) -> None:
    with Daemon(memory="64MiB", staging="16MiB") as daemon:
        survivor = engines(EngineSpec(model=model, kv_transfer=ours(daemon.socket)))
        survivor.run(PROMPTS)
        doomed = engines(EngineSpec(model=model, kv_transfer=ours(daemon.socket)))
        doomed.begin(PROMPTS, max_tokens=200)
        doomed.wait_event("first_token")
        doomed.kill(worker_rank=0 if victim == "worker" else None)
        eventually(lambda: daemon.records("engine.detached"), 20, "the daemon's notice")
        assert survivor.reset_prefix_cache()
        second = survivor.run(PROMPTS)
        assert second.tokens == right
        assert second.cached_tokens == HITS
        module_auditor.assert_idle(daemon.pid, daemon.socket)
        doomed.stop()
        survivor.stop()
        assert daemon.sigterm(30) == 0


def test_a_frozen_daemon_holds_no_request_past_the_deadline(
    model: Path, right: list[list[int]], engines: Callable[..., Engine], module_auditor: Auditor
) -> None:
    with Daemon(memory="64MiB", staging="16MiB") as daemon:
        engine = engines(EngineSpec(model=model, kv_transfer=ours(daemon.socket, wait_timeout_ms=1000)))
        engine.run(PROMPTS)
        module_auditor.assert_idle(daemon.pid, daemon.socket)
        assert engine.reset_prefix_cache()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            frozen = engine.run(PROMPTS, timeout_s=60)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert frozen.tokens == right
        assert frozen.total_s < 30
        module_auditor.assert_idle(daemon.pid, daemon.socket)
        engine.stop()
