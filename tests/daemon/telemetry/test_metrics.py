"""Metrics and health of a real daemon over HTTP."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvprefetch.daemon.telemetry import metrics
from kvprefetch.daemon.telemetry.counters import Counters
from kvprefetch.daemon.telemetry.events import Ending
from kvprefetch.daemon.telemetry.metrics import CATALOGUE, Metrics
from kvprefetch.daemon.telemetry.web import MAX_CLIENTS
from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.stores import blocks
from tests.lab.daemon import Daemon
from tests.lab.process import free_ports
from tests.support import documents
from tests.support.auditor import ask_daemon
from tests.support.fake_engine import BLOCK_BYTES, FakeEngine
from tests.support.telemetry import get, picture, sample, served
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
# The numbers of an engine that metrics show.
ENGINE_NUMBERS = [
    number
    for name, described in CATALOGUE.items()
    if "engine" in described.labels and "model" not in described.labels
    for number in metrics.USES.get(name, {"": described.of or name}).values()
]
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


def key(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return metrics.PREFIX + name, tuple(sorted(labels.items()))


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[key(name, **labels)]


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

    rows: list[tuple[str, dict[str, str], int]] = [
        ("requests_total", {"outcome": "miss"}, 1),
        ("requests_total", {"outcome": "loaded"}, 2),
        ("requests_total", {"outcome": "aborted"}, 1),
        ("miss_blocks_total", {}, 6),
        ("hit_blocks_total", {"medium": "memory"}, 6),
        ("hit_blocks_total", {"medium": "staging"}, 4 + 6 + 6),
        ("hit_blocks_total", {"medium": "disk"}, 0),
        ("loaded_blocks_total", {}, 10),
        ("fetched_bytes_total", {"medium": "memory"}, 6 * BLOCK_BYTES),  # fetched once, shared by all
        ("wasted_bytes_total", {"medium": "memory"}, 0),  # a request that ended left them for others
        ("engines", {}, 1),
        ("pending_requests", {"engine": "first"}, 1),
        ("staging_slots", {"engine": "first", "use": "pinned"}, 6),
        ("push_to_seen_seconds_count", {}, 5),
        ("look_up_seconds_count", {}, 4),
        ("fetch_seconds_count", {"medium": "disk"}, 0),
        ("leases", {"engine": "first"}, 0),
        ("exposed_wait_seconds_count", {"outcome": "loaded"}, 2),
        ("exposed_wait_seconds_count", {"outcome": "recomputed"}, 0),
        ("store_open", {}, 1),
        ("ready", {}, 1),
    ]

    def unlike() -> list[tuple[str, dict[str, str], int]]:
        samples = scrape(port)
        return [row for row in rows if samples.get(key(row[0], **row[1])) != row[2]]

    eventually(lambda: not unlike(), what=unlike)
    samples = scrape(port)
    assert value(samples, "fetch_seconds_count", medium="memory") >= 1
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
    assert value(last, "fetched_bytes_total", medium="memory") == 12 * BLOCK_BYTES
    wasted = lambda: value(scrape(port), "wasted_bytes_total", medium="memory")  # noqa: E731
    eventually(lambda: wasted() == 3 * BLOCK_BYTES, what="the first, and what is not claimed")


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
    assert json.loads(get(port, "/status.json")[1])["pid"] == daemon.pid
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/readyz", method="HEAD")
    with urllib.request.urlopen(asked, timeout=10) as answer:
        assert (answer.status, int(answer.headers["Content-Length"]) > 0, answer.read()) == (200, True, b"")
    status, body = get(port, "/healthz")
    assert status == 200
    assert json.loads(body)["problems"] == []
    assert get(port, "/other")[0] == 404
    with socket.create_connection(("127.0.0.1", port)):  # a client that says nothing keeps nobody from a scrape
        assert get(port, "/metrics")[0] == 200
    assert daemon.sigterm(30) == 0
    with pytest.raises(OSError, match="refused"):
        get(port, "/healthz")


# --- without a daemon ---------------------------------------------------------------------------------------------


def test_two_engines_of_one_name_make_one_series_and_none_once_they_are_gone() -> None:
    made = Metrics()
    numbers = dict.fromkeys(ENGINE_NUMBERS, 3)
    made.show_engines([{"engine": "e", "model": "m", **numbers}] * 2)
    assert sample(made, "pending_requests", engine="e") == 6
    assert sample(made, "staging_slots", engine="e", use="free") == 6
    made.show_engines([])
    assert 'engine="e"' not in made.text().decode()


def test_a_scrape_never_fails_while_engines_come_and_go() -> None:
    """The loop changes the series, the server's thread reads them."""
    made, over = Metrics(), threading.Event()

    def change() -> None:
        number = 0
        while not over.is_set():
            number += 1
            names = range(number % 50)
            made.show_engines({"engine": f"e{name}", **dict.fromkeys(ENGINE_NUMBERS, 1)} for name in names)
            made.made["fetch_seconds"].labels("memory").observe(0.1)

    loop = threading.Thread(target=change)
    loop.start()
    try:
        for number in range(30):
            made.show_health(picture(calls={"fetch": 1.0} if number % 2 else {}).health())
            list(text_string_to_metric_families(made.text().decode()))
    finally:
        over.set()
        loop.join()


def test_what_another_part_counts_is_taken_over_and_does_not_fall() -> None:
    made = Metrics()
    for total, shown in ((5, 5), (7, 7), (2, 7), (3, 8)):  # it began anew in between
        made.reach_all({"log_dropped_lines": total})
        assert sample(made, "log_dropped_lines_total") == shown


LINE = {
    "outcome": "loaded", "hint_blocks": 10, "local_blocks": 1, "found_blocks": 8, "loaded_blocks": 7,
    "taken_back": 2, "adopted_ms": 30.0, "hint_seen_ms": 1.0, "looked_up_ms": 3.0, "last_byte_ms": 21.0,
    "visited_ms": 11.0,
    "claimed_ms": 22.0, "exposed_ms": 11.0, "unseen_ms": 1.0, "hidden_fraction": 0.45,
}  # fmt: skip
ABORTED = {"outcome": "aborted", "loaded_blocks": 0, "exposed_ms": 0.0, "unseen_ms": 0.0, "taken_back": 0}


def test_counters_take_a_request_in() -> None:
    made = Metrics()
    first, second = Counters(made), Counters(made)
    for each in (first, second):
        each.request_done(LINE)
        each.publish()
        each.request_done({**LINE, **ABORTED})
        each.publish()
    assert made.totals("requests")[Ending.LOADED.value] == made.totals("requests")[Ending.ABORTED.value] == 2
    assert (made.totals("miss_blocks"), made.totals("loaded_blocks")) == ({"": 8}, {"": 14})
    assert made.totals("requests_taken_back") == {"": 2}, "one in each, however often"
    assert made.totals("transfer_seconds")[""] == pytest.approx(4 * 0.02)
    assert made.totals("hidden_seconds")[""] == pytest.approx(4 * 0.02 * 0.45)
    for name, labels, count, sum_s in (
        ("exposed_wait_seconds", {"outcome": "loaded"}, 2, 0.022),
        ("exposed_wait_seconds", {"outcome": "other"}, 2, 0.0),
        ("ready_to_seen_seconds", {}, 2, 0.002),
        ("look_up_seconds", {}, 4, 0.008),
        ("early_seconds", {}, 4, 0.12),
    ):
        assert sample(made, f"{name}_count", **labels) == count
        assert sample(made, f"{name}_sum", **labels) == pytest.approx(sum_s)
    assert first.totals()["loaded_blocks"] == 7, "each engine has its own for the status"


def test_a_former_name_has_the_value_of_the_new_one() -> None:
    """Dashboards and rules of the release before go on for one release."""
    made = Metrics()
    made.add("failed_saves", 3)
    made.show("save_slots_quarantined", {("e",): 2})
    assert sample(made, "lost_saves_total") == sample(made, "failed_saves_total") == 3
    assert sample(made, "save_slots_lost", engine="e") == 2


def test_every_metric_of_the_catalogue_is_exported_with_each_value_of_its_label_and_nothing_else() -> None:
    """A rate over the first count needs the zero before it."""
    families = {each.name: each for each in text_string_to_metric_families(Metrics().text().decode())}
    former = {metrics.PREFIX + name for name in metrics.FORMER}
    ours = [name for name in families if name.startswith(metrics.PREFIX) and name not in former]
    assert ours == [metrics.PREFIX + name for name in CATALOGUE]
    assert {each.labels["outcome"] for each in families["kvprefetchd_requests"].samples} == {e.value for e in Ending}
    assert {each.labels["medium"] for each in families["kvprefetchd_hit_blocks"].samples} == {
        "staging",
        "memory",
        "disk",
    }


def test_each_metric_of_an_engine_is_a_number_that_engines_have(shared_daemon: Daemon) -> None:
    """A gauge that no part of the epoch counts would be 0 for ever."""
    FakeEngine(shared_daemon.socket)
    numbers = ask_daemon(shared_daemon.socket).engines[0]
    absent = [number for number in ENGINE_NUMBERS if number not in numbers]
    assert absent == [], "add it to gauges() of the planner, the saver or the promotions"


def test_the_document_is_the_catalogue() -> None:
    text = (ROOT / "docs/METRICS.md").read_text()
    assert documents.metrics() in text, documents.command("metrics")


def test_clients_that_leave_or_say_nothing_cost_no_traceback_and_no_thread(capfd: pytest.CaptureFixture[str]) -> None:
    with served() as port:
        address, before = ("127.0.0.1", port), threading.active_count()
        for _ in range(20):
            with socket.create_connection(address) as leaves:
                leaves.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # with a reset
                leaves.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        came = time.monotonic()
        silent = [socket.create_connection(address) for _ in range(MAX_CLIENTS + 20)]
        assert time.monotonic() - came < 3, "nobody's packets were dropped, to be sent again after 1, 3, 7 seconds"
        assert silent[0].recv(1) == b"", "beyond the bound"
        assert get(port, "/metrics")[0] == 200
        assert threading.active_count() == before
        for each in silent:
            each.close()
    assert capfd.readouterr().err == ""


def test_requests_behind_the_first_one_of_a_connection_cost_nothing() -> None:
    """A client that never reads its answers holds neither a thread nor their bytes."""
    with served() as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n" * 50)
        client.settimeout(10)
        answers = b"".join(iter(lambda: client.recv(65536), b""))
    assert answers.count(b"HTTP/1.1 200 OK") == 1
