"""The end of a daemon that has no engine, as one that engines start; tests/e2e/test_lifecycle.py has such engines."""

from __future__ import annotations

from collections.abc import Callable

from kvprefetch.daemon.runtime.service import FIRST_NS, Idle
from tests.lab.daemon import Daemon
from tests.support.fake_engine import FakeEngine

S = 1_000_000_000


def test_without_an_engine_it_ends_after_a_while_and_at_first_after_a_minute() -> None:
    idle = Idle(10, 0)
    assert not idle.over(FIRST_NS - 1, engines=False)
    assert idle.over(FIRST_NS, engines=False)
    assert not idle.over(61 * S, engines=True)
    assert not idle.over(71 * S - 1, engines=False)
    assert idle.over(71 * S, engines=False)
    assert Idle(600, 0).over(599 * S, engines=False) is False


def test_it_ends_in_order_once_its_last_engine_has_ended(serve: Callable[..., Daemon]) -> None:
    daemon = serve(extra=("--exit-idle-s", "1"))
    engines = [FakeEngine(daemon.socket, engine_id=name) for name in "ab"]
    engines[0].close()
    assert daemon.wait_record("daemon.idle", timeout_s=3) is None
    engines[1].close()
    assert daemon.wait_exit() == 0
    assert [line["idle_s"] for line in daemon.records("daemon.idle")] == [1]
    assert daemon.records("daemon.stopped")
    assert not daemon.socket.exists()
