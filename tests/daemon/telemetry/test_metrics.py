"""Metrics and health of a real daemon over HTTP, and what is shown when its loop or its store hangs."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvprefetch.daemon.telemetry import metrics
from kvprefetch.daemon.telemetry.counters import Counters, Histogram
from kvprefetch.daemon.telemetry.events import Ending
from kvprefetch.daemon.telemetry.logs import EventCounts
from kvprefetch.daemon.telemetry.metrics import CATALOGUE, Described, SnapshotCollector
from kvprefetch.daemon.telemetry.snapshot import Snapshot
from kvprefetch.daemon.telemetry.web import MAX_CLIENTS, MetricsServer
from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.stores import blocks
from tests.lab.daemon import Daemon
from tests.lab.process import free_ports, frozen
from tests.support import documents
from tests.support.auditor import ask_daemon
from tests.support.command import kvprefetchd, one_line
from tests.support.fake_engine import BLOCK_BYTES, FakeEngine
from tests.support.telemetry import get, snapshot_at
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
Serve = Callable[..., Daemon]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(port: int) -> Samples:
    status, text = get(port, "/metrics")
    assert status == 200, text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[metrics.PREFIX + name, tuple(sorted(labels.items()))]


def test_totals_follow_the_requests_and_never_fall_when_engines_leave(serve: Serve) -> None:
    (port,) = free_ports(1)
    daemon = serve(extra=("--metrics-port", str(port)))
    engine = FakeEngine(daemon.socket, engine_id="first", prefix="metrics")
    values = blocks("metrics", 6)
    assert engine.load(list(values)) is None
    engine.save(values)
    eventually(lambda: engine.credits.available() == 64, what="the save")
    assert engine.load(list(values)) == list(values.values())
    assert engine.load(list(values), local=2) == list(values.values())[2:]
    aborted = engine.hint(list(values), name="aborted")
    engine.settled(aborted)
    engine.cancel(aborted)
    held = engine.hint(list(values), name="held")
    engine.settled(held)

    def seen(**expected: float) -> Samples | None:
        samples = scrape(port)
        return samples if all(value(samples, name) == count for name, count in expected.items()) else None

    samples = eventually(lambda: seen(hints_total=5, saved_blocks_total=6), what="the next snapshot")
    for metric, own, expected in (
        ("requests_total", {"outcome": "miss"}, 1),
        ("requests_total", {"outcome": "loaded"}, 2),
        ("requests_total", {"outcome": "aborted"}, 1),
        ("miss_blocks_total", {}, 6),
        ("hit_blocks_total", {"tier": "memory"}, 6),
        ("hit_blocks_total", {"tier": "staging"}, 4 + 6 + 6),
        ("hit_blocks_total", {"tier": "disk"}, 0),
        ("loaded_blocks_total", {}, 10),
        ("fetched_bytes_total", {"tier": "memory"}, 6 * BLOCK_BYTES),  # fetched once, shared by all
        ("wasted_bytes_total", {"tier": "memory"}, 0),  # a request that ended left them for others
        ("engines", {}, 1),
        ("pending_requests", {"engine": "first"}, 1),
        ("staging_slots", {"engine": "first", "use": "pinned"}, 6),
        ("push_to_seen_seconds_count", {}, 5),
        ("look_up_seconds_count", {}, 4),
        ("fetch_seconds_count", {"tier": "disk"}, 0),
        ("leases", {"engine": "first"}, 0),
        ("exposed_wait_seconds_count", {"outcome": "loaded"}, 2),
        ("exposed_wait_seconds_count", {"outcome": "recomputed"}, 0),
        ("store_open", {}, 1),
        ("ready", {}, 1),
    ):
        assert value(samples, metric, **own) == expected, (metric, own)
    assert value(samples, "fetch_seconds_count", tier="memory") >= 1
    assert 0 <= value(samples, "engine_age_seconds", engine="first") < 300
    own = {"engine": "first", "model": "metrics", "pid": str(os.getpid()), "uid": str(os.getuid()), "mode": "on"}
    assert value(samples, "engine_info", **own) == 1
    engine.close()
    after = eventually(lambda: seen(engines=0), what="the engine's end")
    assert value(after, "requests_total", outcome="engine_gone") == 1
    assert not [name for name, labels in after if ("engine", "first") in labels]
    again = FakeEngine(daemon.socket, engine_id="second", prefix="metrics")
    part = again.hint(list(values))
    assert again.settled(part).count == 6
    assert again.move(part, FlagState.CLAIMED, count=4)
    assert again.move(part, FlagState.RELEASED)
    again.done(part, loaded=3, start=1)
    again.close()
    last = eventually(lambda: seen(hints_total=6, engines=0, loaded_blocks_total=13), what="the second engine")
    for earlier, later in ((samples, after), (after, last)):
        for (name, labels), count in earlier.items():
            if name.startswith(metrics.PREFIX) and name.endswith(("_total", "_count", "_bucket", "_sum")):
                assert later[name, labels] >= count, f"{name} {labels} fell"
    assert value(last, "fetched_bytes_total", tier="memory") == 12 * BLOCK_BYTES
    assert value(last, "wasted_bytes_total", tier="memory") == 3 * BLOCK_BYTES, "the first, and what is not claimed"


@pytest.mark.parametrize(("options", "limited"), [(("--wasted-share", "0.01"), 1), ((), 0)])
def test_an_aborted_request_passes_a_ceiling_of_one_per_cent_and_not_the_default(
    serve: Serve, options: tuple[str, ...], limited: int
) -> None:
    daemon = serve(extra=options)
    engine = FakeEngine(daemon.socket, prefix="ceiling")
    values = blocks("ceiling", 24)
    engine.save(values)
    eventually(lambda: engine.credits.available() == 64, what="the save")
    request = engine.hint(list(values))
    assert engine.settled(request).count == 24
    engine.cancel(request)
    unused = eventually(lambda: [each for each in ask_daemon(daemon.socket).engines if each["slots_unused"]], 10, "it")
    assert (unused[0]["slots_unused"], unused[0]["prefetch_limited"]) == (24, limited)


def test_a_flood_is_counted_in_full_and_health_is_good_until_the_end(serve: Serve) -> None:
    (port,) = free_ports(1)
    daemon = serve(extra=("--metrics-port", str(port)))
    engine = FakeEngine(daemon.socket)
    for _ in range(500):
        engine.push(77, b"what is this")
    eventually(lambda: value(scrape(port), "bad_records_total") == 500, what="the flood")
    assert value(scrape(port), "events_total", event="record.bad") == 500
    eventually(
        lambda: sum(1 + line.get("suppressed", 0) for line in daemon.records("record.bad")) == 500, what="the sum"
    )
    assert len(daemon.records("record.bad")) <= 4
    engine.close()
    eventually(lambda: get(port, "/readyz")[0] == 200, what="readiness")
    status, body = get(port, "/healthz")
    assert status == 200
    assert json.loads(body)["problems"] == []
    assert get(port, "/other")[0] == 404
    with socket.create_connection(("127.0.0.1", port)):  # a client that says nothing keeps nobody from a scrape
        assert get(port, "/metrics")[0] == 200
    assert daemon.sigterm(30) == 0
    with pytest.raises(OSError, match="refused"):
        get(port, "/healthz")


# A signal handler of Python runs on the main thread, which is the loop: it plants a loop that hangs, nothing else.
STALLING = """
import signal, sys, time
from kvprefetch.daemon.cli.main import main
signal.signal(signal.SIGUSR2, lambda *_: time.sleep(600))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.store
def test_a_hung_loop_is_seen_although_the_process_is_there(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    arguments = ["serve", "--socket", str(tmp_path / "s"), "--memory", "64MiB", "--metrics-port", str(port)]
    daemon = subprocess.Popen([sys.executable, "-c", STALLING, *arguments], stdout=subprocess.DEVNULL)
    try:

        def state(path: str) -> int:
            try:
                return get(port, path)[0]
            except OSError:
                return 0  # not started yet

        eventually(lambda: state("/readyz") == 200, 60, "readiness")
        daemon.send_signal(signal.SIGUSR2)
        eventually(lambda: state("/readyz") == 503, 30, "what a hung loop looks like")
        assert any("main loop hangs" in line for line in json.loads(get(port, "/readyz")[1])["problems"])
        assert value(scrape(port), "loop_age_seconds") > 1
        assert state("/healthz") == 200, "it may still come back"
        assert daemon.poll() is None
    finally:
        daemon.kill()
        daemon.wait()


def test_a_store_call_that_does_not_come_back_is_seen(serve: Serve) -> None:
    """The master is stopped, not gone: connections stay, and answers do not come."""
    (port,) = free_ports(1)
    daemon = serve(extra=("--metrics-port", str(port), "--rpc-timeout-ms", "60000"))
    engine = FakeEngine(daemon.socket)
    master = int(daemon.records("master.started")[0]["pid"])
    eventually(lambda: get(port, "/readyz")[0] == 200, what="readiness")
    with frozen(master):
        engine.hint(list(blocks("stuck", 2)), name="stuck")
        eventually(lambda: get(port, "/readyz")[0] == 503, 40, "the call that hangs")
        assert "the store does not answer" in get(port, "/readyz")[1]
        assert value(scrape(port), "store_answering") == 0
        eventually(lambda: "a question to the master does not" in get(port, "/readyz")[1], 40, "the call's age")
        assert value(scrape(port), "call_age_seconds", call="look_up") > 5
        assert get(port, "/healthz")[0] == 200, "it may still come back"
    eventually(lambda: get(port, "/readyz")[0] == 200, 30, "recovery")
    engine.close()


def test_a_port_in_use_is_one_line_and_69(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = kvprefetchd("serve", "--socket", tmp_path / "s", "--metrics-port", port)
    assert result.returncode == 69
    assert one_line(result.stderr)
    assert f"metrics_address='127.0.0.1' metrics_port={port}" in result.stderr


# --- without a daemon ---------------------------------------------------------------------------------------------


def test_two_engines_of_one_name_make_one_series() -> None:
    snapshot = snapshot_at(1, beat_s=1)
    snapshot.publish(0, [{"engine": "e", "requests": 3}] * 2, [], store_open=True)
    families = {family.name: family for family in SnapshotCollector(snapshot, EventCounts()).collect()}
    assert [(s.labels, s.value) for s in families["kvprefetchd_pending_requests"].samples] == [({"engine": "e"}, 6)]


def test_a_histogram_counts_each_value_under_its_bound() -> None:
    histogram, other = Histogram((0.1, 1.0)), Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(seconds)
    other.observe(0.2)
    histogram.add(other)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum_s == pytest.approx(7.85)


LINE = {
    "outcome": "loaded", "hint_blocks": 10, "local_blocks": 1, "found_blocks": 8, "loaded_blocks": 7,
    "taken_back": 2, "hint_seen_ms": 1.0, "looked_up_ms": 3.0, "last_byte_ms": 21.0, "asked_ms": 11.0,
    "claimed_ms": 22.0, "exposed_ms": 11.0, "unseen_ms": 1.0, "hidden_fraction": 0.45,
}  # fmt: skip
ABORTED = {"outcome": "aborted", "loaded_blocks": 0, "exposed_ms": 0.0, "unseen_ms": 0.0, "taken_back": 0}


def test_counters_take_a_request_in() -> None:
    counters, total = Counters(), Counters()
    counters.request_done(LINE)
    counters.request_done({**LINE, **ABORTED})
    for _ in range(2):
        total.add(counters)
    assert total.endings == {Ending.LOADED.value: 2, Ending.ABORTED.value: 2}
    assert (total.miss_blocks, total.loaded_blocks) == (8, 14)
    assert total.requests_taken_back == 2, "one in each, however often"
    assert (total.transfer_s, total.hidden_s) == pytest.approx((4 * 0.02, 4 * 0.02 * 0.45))
    for histogram, count, sum_s in (
        (total.exposed["loaded"], 2, 0.022),
        (total.exposed["other"], 2, 0.0),
        (total.ready_to_seen, 2, 0.002),
        (total.look_up, 4, 0.008),
    ):
        assert sum(histogram.counts) == count
        assert histogram.sum_s == pytest.approx(sum_s)
    assert counters.totals()["loaded_blocks"] == 7, "what was added stays as it was"


def test_every_metric_of_the_catalogue_is_exported_and_nothing_else() -> None:
    families = list(SnapshotCollector(snapshot_at(1, beat_s=1), EventCounts()).collect())
    assert [family.name for family in families] == [metrics.PREFIX + name for name in CATALOGUE]


@pytest.mark.parametrize("described", [Described("counter", "x"), Described("histogram", "x", of="nowhere")])
def test_a_metric_without_a_value_says_what_is_missing(described: Described, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape answers with the metric, the missing field and the place to add it."""
    (port,) = free_ports(1)
    server = MetricsServer("127.0.0.1", port, snapshot_at(1, beat_s=1), EventCounts())
    try:
        monkeypatch.setitem(CATALOGUE, "new_thing", described)
        status, text = get(port, "/metrics")
    finally:
        server.close()
    assert status == 500
    assert "metric new_thing has no value: add the field " + (described.of or "new_thing") + " to Counters" in text


def test_each_metric_of_an_engine_is_a_number_that_engines_have(shared_daemon: Daemon) -> None:
    """A gauge that no part of the epoch counts would be 0 for ever."""
    engine = FakeEngine(shared_daemon.socket)
    numbers = ask_daemon(shared_daemon.socket).engines[0]
    wanted = {
        f"{name}: add {number} to gauges() of the planner, the saver or the promotions": number
        for name, described in CATALOGUE.items()
        if "engine" in described.labels and "model" not in described.labels  # that one is computed
        for number in metrics.USES.get(name, {"": described.of or name}).values()
    }
    assert [what for what, number in wanted.items() if number not in numbers] == []
    engine.close()


def test_the_document_is_the_catalogue() -> None:
    text = (ROOT / "docs/METRICS.md").read_text()
    assert documents.metrics() in text, documents.command("metrics")


def test_a_server_without_clients_ends_at_once() -> None:
    (port,) = free_ports(1)
    began = time.monotonic()
    for _ in range(20):
        MetricsServer("127.0.0.1", port, Snapshot(), EventCounts()).close()
    assert time.monotonic() - began < 7, "Python's own shutdown takes half a second"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_clients_that_leave_or_say_nothing_cost_no_traceback_and_no_thread(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    server = MetricsServer(address[0], address[1], Snapshot(), EventCounts())
    before = threading.active_count()
    try:
        for _ in range(20):
            with socket.create_connection(address) as leaves:
                leaves.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # with a reset
                leaves.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        eventually(lambda: threading.active_count() == before, what="the end of their threads")
        came = time.monotonic()
        silent = [socket.create_connection(address) for _ in range(MAX_CLIENTS + 20)]
        assert time.monotonic() - came < 3, "nobody's packets were dropped, to be sent again after 1, 3, 7 seconds"
        assert silent[-1].recv(1) == b"", "beyond the bound"
        assert threading.active_count() <= before + MAX_CLIENTS
        for each in silent:
            each.close()
        eventually(lambda: threading.active_count() == before, what="the end of their threads")
        with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/metrics") as page:
            assert b"kvprefetchd_info" in page.read()
    finally:
        server.close()
    assert capfd.readouterr().err == ""
