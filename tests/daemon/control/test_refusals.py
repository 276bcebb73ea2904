"""An engine that the daemon refuses: one line in the log, however often it tries, and a place in every view of it."""

from __future__ import annotations

import json
from collections.abc import Callable

from kvprefetch.daemon.control.refusals import KEEP_NS, LISTED, MAX_TEXT, MOST, Refusals
from kvprefetch.shmring.wire.attach import Refused
from tests.lab.daemon import Daemon
from tests.support.auditor import ask_daemon
from tests.support.clock import Clock
from tests.support.command import kvprefetchd
from tests.support.fake_engine import FakeEngine, answer
from tests.support.waiting import eventually


def test_a_refused_engine_is_one_line_and_is_listed_with_its_reason(serve: Callable[..., Daemon]) -> None:
    """It tries again and again. `status`, `top` and its own `doctor --engine` name it until it is served."""
    daemon = serve(extra=("--max-engines", "1"))
    first = FakeEngine(daemon.socket, engine_id="first")
    at = ("--socket", str(daemon.socket))
    for _ in range(3):
        late = FakeEngine(daemon.socket, engine_id="late", ranks=2, attach=False)
        for sock in late.greet_all():
            assert answer(sock, Refused).error == "too many engines: max_engines=1"
        late.close()
    eventually(lambda: ask_daemon(daemon.socket).refused[0]["tries"] == 9, what="three tries of three processes")
    [line] = daemon.records("engine.refused")
    assert (line["engine"], line["error"]) == ("late", "too many engines: max_engines=1")
    assert daemon.records("peer.refused") == []
    eventually(lambda: "refused: engine late, pid " in kvprefetchd("status", *at).stdout, 30, "it in the picture")
    assert "refused: engine late, pid " in kvprefetchd("top", "--once", "--interval", "0.1", *at).stdout
    config = {"kv_connector": "KVPrefetchConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    for engine_id, found in (("late", True), ("first", False)):
        said = config | {"engine_id": engine_id, "kv_connector_extra_config": {"socket": str(daemon.socket)}}
        doctor = kvprefetchd("doctor", "--engine", "--json", "--kv-transfer-config", json.dumps(said)).stdout
        bad = [
            each["what"]
            for each in json.loads(doctor)["findings"]
            if (each["check"], each["level"]) == ("daemon", "bad")
        ]
        assert [what.startswith("the daemon refuses engine late, ") for what in bad] == [True] * found
    first.close()
    eventually(lambda: not ask_daemon(daemon.socket).engine_count, what="its end")
    served = FakeEngine(daemon.socket, engine_id="late")
    eventually(lambda: not ask_daemon(daemon.socket).refused, what="the end of the list")
    served.close()


def test_another_reason_is_news_and_the_same_one_is_not() -> None:
    refusals = Refusals(Clock())
    assert [refusals.add(7, 1, "e", error) for error in ("full", "full", "unequal", "full")] == [
        True,
        False,
        True,
        True,
    ]
    assert refusals.add(8, 1, "e", "full"), "another user's engine of the same name"
    refusals.attached(7, "e", [1])
    assert refusals.add(7, 1, "e", "full"), "it was served meanwhile"


def test_a_process_that_names_no_engine_is_forgotten_once_its_engine_attaches() -> None:
    refusals = Refusals(Clock())
    refusals.add(7, 1, "", "already attached")
    refusals.attached(7, "e", [1, 2])
    assert refusals.listed(None) == []


def test_an_engine_that_stops_trying_is_forgotten() -> None:
    clock = Clock()
    refusals = Refusals(clock)
    refusals.add(7, 1, "e", "full")
    clock.ns += KEEP_NS - 1
    refusals.tick()
    assert refusals.listed(7)
    clock.ns += 1
    refusals.tick()
    assert refusals.listed(7) == []


def test_a_user_sees_its_own_and_the_newest_within_bounds() -> None:
    """A status must fit a message, and a user who makes up engines takes no memory."""
    refusals = Refusals(Clock())
    for number in range(2 * MOST):
        refusals.add(number % 2, number, f"e{number}", "x" * 2 * MAX_TEXT)
    assert [each["engine"] for each in refusals.listed(1)] == [f"e{2 * MOST - 1 - 2 * i}" for i in range(LISTED)]
    assert len(refusals.listed(None)) == LISTED
    assert {len(str(each["error"])) for each in refusals.listed(None)} == {MAX_TEXT}
    assert refusals.add(0, 0, "e0", "x" * 2 * MAX_TEXT), "it was dropped"
