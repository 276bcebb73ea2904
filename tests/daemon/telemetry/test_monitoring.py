"""The dashboard and the rules speak of metrics that the code exports, and promtool accepts and unit-tests the rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvprefetch.daemon.telemetry.metrics import CATALOGUE, PREFIX

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs/monitoring"
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text())
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
ALL_RULES: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
RECORDED = {rule["record"] for rule in ALL_RULES if "record" in rule}
ALERTS = {rule["alert"] for rule in ALL_RULES if "alert" in rule}


def exported(name: str) -> list[str]:
    """The names of the time series of one metric of the catalogue."""
    kind = CATALOGUE[name].kind
    if kind == "histogram":
        return [PREFIX + name + end for end in ("_bucket", "_sum", "_count")]
    return [PREFIX + name + ("_total" if kind == "counter" else "")]


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("promtool is not installed (make setup takes it out of Debian's package prometheus)")
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def strangers(expression: str) -> set[str]:
    """Metrics and labels in an expression that nobody exports."""
    series = {name: set(CATALOGUE[metric].labels) for metric in CATALOGUE for name in exported(metric)}
    known = {*series, *RECORDED, "up"}
    found = set(re.findall(r"\b(?:kvprefetchd[:_][\w:]+|up)\b", expression)) - known
    labels = {"instance", "job", "le", *(label for own in series.values() for label in own)}
    used = set(re.findall(r"(\w+)\s*=~?\s*\"", expression))
    for names in re.findall(r"\b(?:by|without|ignoring|group_left)\s*\(([^)]*)\)", expression):
        used |= {name.strip() for name in names.split(",") if name.strip()}
    for name, own in re.findall(r"\b(kvprefetchd_\w+)\{([^}]*)\}", expression):
        for label in re.findall(r"(\w+)\s*=~?\s*\"", own):
            if label not in series.get(name, set()) | {"instance", "job", "le"}:
                found.add(f"{name}{{{label}}}")
    return found | (used - labels)


@pytest.mark.parametrize("expression", [*QUERIES, *(rule["expr"] for rule in ALL_RULES)])
def test_every_query_is_of_metrics_that_are_exported(expression: str) -> None:
    assert strangers(expression) == set()


def test_a_stranger_is_found() -> None:
    found = strangers('rate(kvprefetchd_hints[5m]) + sum by (cluster) (kvprefetchd_engines{medium="disk"})')
    assert found == {"kvprefetchd_hints", "cluster", "kvprefetchd_engines{medium}"}


def test_the_dashboard_shows_every_metric() -> None:
    shown = " ".join(QUERIES)
    missing = [name for name in CATALOGUE if not any(re.search(rf"\b{series}\b", shown) for series in exported(name))]
    assert missing == []


def test_the_dashboard_s_panels_stand_beside_each_other() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_promtool_accepts_and_tests_the_rules() -> None:
    promtool("check", "rules", str(FOLDER / "rules.yml"))
    promtool("test", "rules", str(FOLDER / "rules_test.yml"))


def test_promtool_parses_the_dashboard_s_queries(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{i}", "expr": query.replace("$__rate_interval", "5m").replace("$instance", ".*")}
        for i, query in enumerate(QUERIES)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(path))


def test_every_rule_is_unit_tested_firing_and_quiet() -> None:
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == ALERTS
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == ALERTS
    checked = " ".join(case["expr"] for test in tests for case in test.get("promql_expr_test", []))
    assert {name for name in RECORDED if name in checked} == RECORDED


def test_every_alert_is_explained() -> None:
    text = (ROOT / "docs/symptoms.md").read_text()
    assert set(re.findall(r"^\| `(KVPrefetchd\w+)` \|", text, re.MULTILINE)) == ALERTS
    assert all(rule["labels"]["severity"] in ("critical", "warning") for rule in ALL_RULES if "alert" in rule)


def test_the_scrape_job_and_port_are_those_of_the_code() -> None:
    from kvprefetch.daemon.config.model import DaemonConfig

    text = (FOLDER / "rules.yml").read_text()
    config = DaemonConfig.model_fields
    assert f'targets: ["{config["metrics_address"].default}:{config["metrics_port"].default}"]' in text
    assert PREFIX == "kvprefetchd_"
