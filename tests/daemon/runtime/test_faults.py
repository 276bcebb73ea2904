"""A fault of the daemon's own, for one engine: that engine attaches anew, the others do not notice, the log says it."""

from __future__ import annotations

from collections.abc import Callable

from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.stores import blocks, request_line
from tests.lab.daemon import Daemon
from tests.support.auditor import Auditor
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

# A value from shared memory that no check has seen.
UNCHECKED = """
from kvprefetch.shmring.wire import records

def unchecked(payload, decode=records.decode_hint):
    hint = decode(payload)
    return hint._replace(local_blocks=1 << 31) if hint.request_id == "bad" else hint

records.decode_hint = unchecked
"""


def test_a_value_that_no_check_has_seen_ends_its_engine_s_epoch_alone(
    patched: Callable[..., Daemon], auditor: Auditor
) -> None:
    daemon = patched(UNCHECKED)
    daemon.faulty = True
    good, values = FakeEngine(daemon.socket, engine_id="good", prefix="fault"), blocks("fault", 4)
    good.save(values)
    eventually(lambda: good.load(list(values)), what="a hit")
    bad = FakeEngine(daemon.socket, engine_id="bad", prefix="fault")
    claimed = bad.hint(list(values), name="claimed")
    bad.settled(claimed)
    assert bad.move(claimed, FlagState.CLAIMED)
    bad.hint(list(values), name="bad")
    bad.bell.ring()
    assert bad.scheduler.recv(1) == b"", "the daemon closes the connection"
    assert request_line(daemon, "claimed")["outcome"] == "daemon_fault"
    [fault] = daemon.records("engine.fault")
    assert fault["engine"] == "bad"
    assert "Error" in fault["error"]
    assert "in take" in fault["traceback"]
    assert daemon.records("engine.corrupt") == []
    bad.close()
    assert good.load(list(values)) == list(values.values())
    again = FakeEngine(daemon.socket, engine_id="bad", prefix="fault")
    assert again.load(list(values)) == list(values.values())
    auditor.assert_idle(daemon.pid, daemon.socket)
