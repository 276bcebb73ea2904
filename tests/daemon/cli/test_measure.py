"""`kvprefetchd doctor --measure`: a real daemon, a cluster of two nodes, a folder, and each of them missing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.daemon.cli import measure
from kvprefetch.daemon.config.model import DaemonConfig
from kvprefetch.daemon.store.load import loaded
from tests.daemon.stores import absent_cluster
from tests.lab.daemon import Daemon
from tests.lab.store import Store
from tests.support.command import kvprefetchd

SMALL = ("--staging", "64MiB", "--memory", "64MiB", "--metrics-port", "0", "--measure", "0.1", "--json")


def measured(*arguments: object, status: int) -> tuple[dict[str, Any], list[str]]:
    """Rows by what was measured, and what failed."""
    result = kvprefetchd("doctor", *SMALL, *arguments)
    assert result.returncode == status, result.stdout + result.stderr
    answer = json.loads(result.stdout)
    return {row["what"]: row for row in answer["measured"]}, answer["problems"]


@pytest.mark.parametrize(("count", "p50", "p99"), [(1, 1, 1), (2, 1, 2), (100, 50, 99), (1000, 500, 990)])
def test_percentiles_are_those_of_the_times(count: int, p50: int, p99: int) -> None:
    """The nearest rank; the rates are all calls and bytes in all of the time."""
    row = measure.summary({"what": "x", "ms": [*range(count, 0, -1)], "seconds": 0.5, "bytes": 1000})
    assert (row["count"], row["p50_ms"], row["p99_ms"]) == (count, p50, p99)
    assert (row["per_second"], row["bytes_per_second"]) == (2 * count, 2000 * count)


def test_a_load_runs_so_many_calls_at_a_time_for_so_long() -> None:
    """Three threads that wait for each other: fewer at a time would never end."""
    together = threading.Barrier(3)
    found = loaded("x", lambda *_: together.wait(30), parallel=3, seconds=0.0)
    assert len(found["ms"]) == 3
    numbers: list[int] = []
    found = loaded("x", lambda _, number: numbers.append(number), parallel=2, seconds=60.0, most=7)
    assert (sorted(numbers), len(found["ms"])) == ([*range(7)], 7)
    found = loaded("x", lambda *_: time.sleep(0.01), parallel=1, seconds=0.1)
    assert 0.1 <= found["seconds"] < 30
    assert len(found["ms"]) <= 11


def test_each_part_has_its_row(serve: Callable[..., Daemon], tmp_path: Path) -> None:
    """The daemon's socket, the master, the private store's node and the disk answer; the folder is left empty."""
    daemon = serve()
    rows, failed = measured("--socket", daemon.socket, "--disk", f"{tmp_path}:64MiB", "--fetch-threads", 2, status=0)
    assert failed == []
    (node,) = [what for what in rows if what.startswith("get from 127.0.0.1:")]
    assert [*rows] == ["socket", "master", "put", node, f"disk {tmp_path}"]
    assert all(0 < row["p50_ms"] <= row["p99_ms"] for row in rows.values())
    moved = [what for what, row in rows.items() if row.get("bytes_per_second", 0) > 0]
    assert moved == ["put", node, f"disk {tmp_path}"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.store
def test_every_storage_node_of_a_cluster_is_timed_and_nothing_is_left(tmp_path: Path) -> None:
    """A row for each node; without a daemon on the socket there is none of it."""
    with Store(memory="256 MB", nodes=2) as cluster:
        rows, failed = measured("--mooncake-config", cluster.config, "--socket", tmp_path / "none", status=0)
        assert cluster.keys == 0
    assert len([what for what in rows if what.startswith("get from ")]) == 2
    assert ("socket" in rows, failed) == (False, [])


@pytest.mark.store
def test_what_does_not_answer_is_named(tmp_path: Path) -> None:
    """A cluster that is not there, and a folder that is not there, are a line each."""
    _, failed = measured("--mooncake-config", absent_cluster(tmp_path), "--socket", tmp_path / "none", status=1)
    assert [line.partition(":")[0] for line in failed] == ["master", "store", "measure"]
    (missing,) = measure.disk(DaemonConfig.model_validate({"disk": f"{tmp_path}/missing"}), parallel=1, seconds=0.0)
    assert missing["failed"] == f"disk: No such file or directory: disk='{tmp_path}/missing'"
