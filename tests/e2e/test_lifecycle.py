"""Engines and daemons come, go, stop and are killed: the engine serves every request, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import BLOCK, At, abort_every_other, answers, hits, served, wait_attached
from tests.lab.bed import engine as bed
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine
from tests.lab.prompts import make_prompts
from tests.support.auditor import SOCKETS, Auditor, ask_daemon
from tests.support.waiting import eventually

PROMPTS = make_prompts(8, 300, seed=31)
HITS = hits(PROMPTS)
RIGHT = answers(PROMPTS)
FILES = sum(HITS) // BLOCK


@pytest.mark.shows("daemon that stops, hangs and comes back")
def test_the_daemon_may_come_late_stop_and_come_back(at: At, tmp_path: Path) -> None:
    disk = f"{tmp_path / 'disk'}:256MiB"
    daemon = Daemon(memory="64MiB", staging="32MiB", disk=disk)
    site = at(daemon)
    engine = site.engines(bed.spec(connector=ours(daemon.socket, key_format="vllm")), attached=False)
    assert engine.run(PROMPTS).tokens == RIGHT, "no daemon yet"
    with daemon:
        wait_attached(engine)
        assert engine.reset_prefix_cache()
        assert engine.run(PROMPTS).tokens == RIGHT, "saving"
        site.fresh(engine)
        served(engine.run(PROMPTS), RIGHT, HITS)
        for end in ("sigterm", "sigkill"):
            if end == "sigkill":
                # What has reached the disk is kept (docs/OPERATIONS.md).
                eventually(lambda: len(list((tmp_path / "disk").rglob("*.meta"))) == FILES, what="the files")
            assert engine.reset_prefix_cache()
            engine.begin(PROMPTS, max_tokens=256, concurrency=2)
            engine.wait_event("first_token")
            getattr(daemon, end)()
            disturbed = engine.finish()
            assert disturbed.tokens == answers(PROMPTS, 256), end
            assert {request.finish_reason for request in disturbed.requests} == {"length"}
            daemon.start()
            wait_attached(engine)
            assert engine.reset_prefix_cache()
            served(engine.run(PROMPTS), RIGHT, HITS)
        site.assert_idle()
        eventually(lambda: staging_mapped(engine) <= 2, what="an idle engine with one ended staging at most")
        engine.stop()


def staging_mapped(engine: Engine) -> int:
    """Count the staging areas that the engine's processes have mapped."""
    files = set()
    for pid in {engine.scheduler_pid, *engine.worker_pids}:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            area, _, _, _, inode, *name = line.split()
            begin, end = (int(address, 16) for address in area.split("-"))
            if name[:1] == ["/memfd:kvprefetch"] and end - begin > 16 << 20:
                files.add(inode)
    return len(files)


@pytest.mark.shows("aborts")
def test_aborts_at_every_stage_leave_nothing_pinned(at: At) -> None:
    with Daemon(memory="64MiB", staging="16MiB") as daemon:
        site = at(daemon)
        for load_mode in ("sync", "async"):
            engine = site.bed(extra={"load_mode": load_mode})
            engine.run(PROMPTS)
            site.assert_idle()
            for steps in range(4):
                assert engine.reset_prefix_cache()
                abort_every_other(engine, PROMPTS, RIGHT, steps)
                site.assert_idle()
            engine.stop()


@pytest.mark.shows("killed engines and workers")
def test_a_killed_engine_leaves_nothing_and_others_go_on(at: At) -> None:
    """tests/e2e/test_faults.py kills a worker, and stops a daemon."""
    with Daemon(memory="64MiB", staging="16MiB") as daemon:
        site = at(daemon)
        survivor = site.bed()
        survivor.run(PROMPTS)
        site.assert_idle()
        doomed = site.bed(own_worker=True)
        doomed.begin(PROMPTS, max_tokens=200)
        doomed.wait_event("first_token")
        doomed.kill()
        eventually(lambda: daemon.records("engine.detached"), 20, "the daemon's notice")
        assert survivor.reset_prefix_cache()
        served(survivor.run(PROMPTS), RIGHT, HITS)
        site.assert_idle()
        doomed.stop()
        survivor.stop()
        assert daemon.sigterm(30) == 0


def test_engines_start_their_daemon_and_it_ends_with_the_last_one(engines: Callable[..., Engine]) -> None:
    """The second finds the first one's, and its KV there; a crash of either leaves the other serving, and no trace."""
    with tempfile.TemporaryDirectory(prefix="kvl-") as folder:
        socket = Path(folder) / "d.sock"
        SOCKETS.add(socket)
        options = {"memory": "64MiB", "staging": "16MiB", "call_timeout_ms": 60_000, "exit_idle_s": 2, "disk": "none"}
        spec = bed.spec(connector=ours(socket, start_daemon=options, key_format="vllm"))

        def answering() -> int:
            with contextlib.suppress(OSError):
                return ask_daemon(socket).pid
            return 0

        auditor, first = Auditor(), engines(spec, attached=False)
        first.run(PROMPTS)  # an engine's start waits for the daemon that it starts
        assert "no daemon listens: starting one" in (said := first.log.read_text())
        assert "looks again" not in said, "nothing is wrong at such a start"
        daemon = answering()
        auditor.assert_idle(daemon, socket, 60)
        second = engines(spec)
        assert answering() == daemon
        first.kill()
        eventually(lambda: len(ask_daemon(socket).engines) == 1, 20, "the end of the first")
        served(second.run(PROMPTS), RIGHT, HITS)
        assert "first save: " in first.log.read_text()
        assert re.search(r"first prefix from the store: \d+ of \d+ tokens", second.log.read_text())
        os.kill(daemon, signal.SIGKILL)
        assert second.reset_prefix_cache()
        served(second.run(PROMPTS), RIGHT)
        eventually(lambda: answering() not in (0, daemon), 60, "another daemon")
        wait_attached(second, 60)
        first.stop()
        second.stop()
        auditor.assert_nothing_left(timeout_s=30)
        assert os.listdir(folder) == []
