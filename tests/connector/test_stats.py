"""The connector's statistics, through vLLM's own aggregator, logger and Prometheus classes, alone and as a child."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.connector.engine.steps import REPORT_STEPS
from kvprefetch.connector.words.stats import COUNTERS, KVPrefetchStats, Tally
from tests.lab.connectors import multi, ours

from .fakes import BLOCK, Engine
from .reports import scheduled_output

ROOT = Path(__file__).resolve().parents[2]


def transfer(multiple: bool) -> KVTransferConfig:
    mine = ours(Path("/nowhere"))
    return KVTransferConfig(**(multi(mine, mine) if multiple else mine))


def test_a_tally_reports_what_was_counted_since() -> None:
    tally = Tally()
    tally.update(loads=2, wait_ns=1_500_000_000)
    assert (tally.take() or KVPrefetchStats()).data == {"loads": 2, "wait_seconds": 1.5}
    assert tally.take() is None
    tally["loads"] += 3
    assert (tally.take() or KVPrefetchStats()).data == {"loads": 3}


@pytest.mark.parametrize("multiple", [False, True])
def test_vllms_logger_prints_them(multiple: bool) -> None:
    """The stats arrive as plain dicts in another process; one line per interval, then they start over."""
    logging = KVConnectorLogging(transfer(multiple))
    for loads in (1, 2):
        plain: dict[str, Any] = {"loads": loads, "wait_seconds": 0.25}
        logging.observe({"KVPrefetchConnector": plain} if multiple else plain)
    lines: list[str] = []
    logging.log(lambda text, values: lines.append(text % values))
    (line,) = lines
    assert re.search(r"loads'?[=:] ?3\b", line)
    assert re.search(r"wait_seconds'?[=:] ?0\.5\b", line)
    logging.log(lambda text, values: lines.append(text % values))
    assert len(lines) == 1


@pytest.mark.parametrize("multiple", [False, True])
def test_vllms_prometheus_export_has_every_counter(multiple: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    for name, kind in (("_counter_cls", Counter), ("_gauge_cls", Gauge), ("_histogram_cls", Histogram)):
        monkeypatch.setattr(KVConnectorProm, name, functools.partial(kind, registry=registry))
    config: Any = SimpleNamespace(kv_transfer_config=transfer(multiple))
    prom = KVConnectorProm(config, ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]})
    plain = {**dict.fromkeys(COUNTERS, 2), "unheard_of": 1}
    prom.observe({"KVPrefetchConnector": plain} if multiple else plain, 1)
    text = generate_latest(registry).decode()
    for name, help_text in COUNTERS.items():
        assert f'vllm:kvprefetch_{name}_total{{engine="1",model_name="tiny"}} 2.0' in text
        assert f'vllm:kvprefetch_{name}_total{{engine="0",model_name="tiny"}} 0.0' in text
        assert help_text in text
    assert "unheard_of" not in text
    for former in ("late", "late_hints"):
        assert f'vllm:kvprefetch_{former}_total{{engine="1",model_name="tiny"}} 2.0' in text


def test_every_name_that_is_counted_is_in_the_catalogue_and_the_other_way_round() -> None:
    counted: set[str] = set()
    for path in (ROOT / "connector").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Subscript) and "counters" in ast.unparse(node.value):
                names = [str(part.value) for part in ast.walk(node.slice) if isinstance(part, ast.Constant)]
                if isinstance(node.slice, ast.JoinedStr):
                    suffix = names[1] if len(names) > 1 else ""
                    counted |= {f"{names[0]}{state}{suffix}" for state in ("ready", "pending")}
                else:
                    counted |= {re.sub(r"_ns$", "_seconds", name) for name in names}
    assert counted == set(COUNTERS)


def test_the_documentation_names_every_counter() -> None:
    text = (ROOT / "docs" / "METRICS.md").read_text().split("## The connector's statistics")[1]
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(COUNTERS)


def test_each_role_reports_its_own_side_and_nothing_when_there_is_nothing() -> None:
    connector = object.__new__(KVPrefetchConnector)
    connector.scheduler_side, connector.worker_side = None, None
    assert connector.get_kv_connector_stats() is None
    engine = Engine()
    connector.scheduler_side = engine.side
    assert connector.get_kv_connector_stats() is None
    request = engine.add("r", 3 * BLOCK)
    reports = []
    for _ in range(REPORT_STEPS):
        connector.build_connector_meta(scheduled_output([]))
        reports.append(connector.get_kv_connector_stats())
    assert [stats.data for stats in reports if stats is not None] == [{"hints": 1}]
    last = engine.add("s", 3 * BLOCK)
    engine.side.finished(request)
    assert connector.get_kv_connector_stats() is None, "another request runs"
    engine.side.finished(last)
    stats = connector.get_kv_connector_stats()
    assert stats is not None, "no step comes any more"
    assert stats.data == {"hints": 1}
