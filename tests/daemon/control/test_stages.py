"""Between its first hello and its attachment an engine waits for one thing at a time, and both sides say for what."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvprefetch.daemon.control.access import Credentials
from kvprefetch.daemon.control.group import INCOMPLETE_NS, WARM_UP_NS, EngineGroup, Peer, Stage
from kvprefetch.daemon.telemetry.health import judge
from kvprefetch.shmring.wire.attach import Notice
from kvprefetch.shmring.wire.codec import receive_message
from tests.daemon.control.test_server import Served, SlowEpochs
from tests.lab.daemon import Daemon
from tests.support.command import kvprefetchd
from tests.support.engine_side import EngineSpec
from tests.support.fake_engine import FakeEngine, answer
from tests.support.waiting import eventually

SECOND = 1_000_000_000


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "d.sock", SlowEpochs())
    yield served
    served.close()


def warnings(logs: list[Any]) -> list[tuple[Any, ...]]:
    return [(log["event"], log.get("missing"), log.get("error")) for log in logs if log["log_level"] == "warning"]


def problems(served: Served) -> tuple[str, ...]:
    """What `health` says of this daemon."""
    shown = {"phase": "serving", "store_open": True, "store_answering": True, "waiting": served.shared.waiting}
    found = judge(shown, 0, 0)
    assert found.ready
    return found.problems


def test_two_halves_of_an_engine_that_never_meet_name_each_other(served: Served) -> None:
    """Its processes disagree about the start that they are of: then no group of them is ever complete."""
    engine = FakeEngine(served.path, attach=False)
    worker = engine.greet("worker")
    scheduler = engine.greet("scheduler", incarnation=uuid.uuid4().hex)
    stranger = engine.greet("worker", engine_id="another", incarnation=uuid.uuid4().hex)
    served.turn()
    with capture_logs() as logs:
        served.control.tick(SECOND)
        assert {each["waits_for"].partition(";")[0] for each in served.shared.waiting} == {
            Stage.SCHEDULER.value,
            "missing: rank 0",
        }
        assert problems(served) == ()
        served.control.tick(SECOND + INCOMPLETE_NS)
        [problem] = problems(served)
        served.control.tick(SECOND + WARM_UP_NS)
        served.control.tick(SECOND + 2 * WARM_UP_NS)
    assert "engine engine waits for missing: rank 0; of another start of this engine are here" in problem
    assert warnings(logs)[0] == ("engine.incomplete", "0", None)
    assert warnings(logs)[1:] == [("engine.incomplete", "scheduler", None)] * 2
    others = [log.get("others", "") for log in logs if log["log_level"] == "warning"]
    assert ["worker" in others[0], "scheduler" in others[1], others[2]] == [True, True, ""]
    assert "of another start of this engine are here, by pid: worker" in answer(scheduler, Notice).text
    text = answer(worker, Notice).text
    assert "missing: its scheduler, which comes once the engine is warm; of another start" in text
    assert "of another start" not in answer(stranger, Notice).text
    engine.close()


def test_memory_that_does_not_come_is_one_warning_in_both_logs(served: Served) -> None:
    engine = FakeEngine(served.path, attach=False)
    worker, scheduler = engine.greet_all()
    served.turn()
    with capture_logs() as logs:
        for now_ns in range(SECOND, 4 * INCOMPLETE_NS, INCOMPLETE_NS // 2):
            served.control.tick(now_ns)
    error = f"it waits for {Stage.MEMORY.value}"
    assert warnings(logs) == [("engine.waiting", None, error)]
    assert error in answer(scheduler, Notice).text
    assert error.removeprefix("it ") in problems(served)[0]
    worker.settimeout(0.1)
    with pytest.raises(TimeoutError):
        receive_message(worker)
    engine.close()


def test_each_stage_has_a_deadline_of_its_own() -> None:
    """A stage begins anew only when another one was in between: ranks that come and go do not put it off."""
    spec, ours = EngineSpec(ranks=2), socket.socketpair()
    group = EngineGroup((spec.engine_id, spec.incarnation), 2, 0)
    peers = [Peer(ours[0], Credentials(1, 0, frozenset()), allowed=True) for _ in range(3)]
    now_ns = SECOND
    for stage, step in (
        (Stage.SCHEDULER, lambda: group.join(peers[1], spec.hello("worker", 0))),
        (Stage.RANKS, lambda: group.join(peers[0], spec.hello("scheduler"))),
        (Stage.MEMORY, lambda: group.join(peers[2], spec.hello("worker", 1))),
        (Stage.DESCRIPTORS, lambda: vars(group).update(epoch=SimpleNamespace(), waits_to_be_handed=True)),
        (Stage.MAPPING, lambda: vars(group).update(waits_to_be_handed=False)),
    ):
        step()
        patience_ns = WARM_UP_NS if stage is Stage.SCHEDULER else INCOMPLETE_NS
        assert group.stage is stage
        assert [group.becomes_overdue(now_ns), group.becomes_overdue(now_ns + patience_ns - 1)] == [False, False]
        group.leave(peers[1])
        group.join(peers[1], spec.hello("worker", 0))
        assert [group.becomes_overdue(now_ns + patience_ns), group.becomes_overdue(now_ns + 2 * patience_ns)] == [
            True,
            False,
        ]
        now_ns += 3 * patience_ns
    peers[1].mapped = peers[0].mapped = SimpleNamespace()  # type: ignore[assignment]
    assert group.waits_for() == f"{Stage.MAPPING.value}: rank 1"
    peers[2].mapped = SimpleNamespace()  # type: ignore[assignment]
    assert group.mapped() is not None
    assert group.waits_for() == ""
    for sock in ours:
        sock.close()


@pytest.mark.store
def test_status_names_an_engine_that_is_not_attached_and_what_it_waits_for() -> None:
    with Daemon(staging="1MiB", memory="64MiB") as daemon:
        engine = FakeEngine(daemon.socket, engine_id="half", ranks=2, attach=False)
        engine.greet("worker", 1)
        engine.greet("scheduler")

        def shown() -> dict[str, Any] | None:
            said = json.loads(kvprefetchd("status", "--json", "--socket", daemon.socket).stdout)
            return next(iter(said["waiting"]), None)

        line = eventually(shown, 10, "the engine")
        assert (line["engine"], line["waits_for"], line["overdue"]) == ("half", "missing: rank 0", 0)
        text = kvprefetchd("status", "--socket", daemon.socket).stdout
        assert "not attached: engine half, pid" in text
        assert kvprefetchd("health", "--socket", daemon.socket).returncode == 0
        engine.close()
        eventually(lambda: shown() is None, 10, "the end of that")
        attached = FakeEngine(daemon.socket)
        assert shown() is None
        attached.close()
