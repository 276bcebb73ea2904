"""The commands of README and the tables of docs/reference/configuration.md are those of the code."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvprefetch.connector.words.config import ConnectorConfig
from kvprefetch.daemon.config.model import DaemonConfig
from tests.support import documents, shown

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("table", [documents.connector, documents.daemon])
def test_the_configuration_s_tables_are_those_of_the_models(table: Callable[[], str]) -> None:
    """docs/reference/configuration.md has each table as the code prints it."""
    text = (ROOT / "docs/reference/configuration.md").read_text()
    assert table() in text, documents.command(table.__name__)


def test_a_table_has_a_row_for_each_key_in_the_model_s_order() -> None:
    """The printed tables leave out no key of either model."""
    rows = re.findall(r"^\| `(?:--)?([\w-]+)` \|", documents.connector() + documents.daemon(), re.MULTILINE)
    assert [row.replace("-", "_") for row in rows] == [*ConnectorConfig.model_fields, *DaemonConfig.model_fields]


def test_the_compatibility_page_has_what_the_tests_showed() -> None:
    """The table is that of the recorded results, and each result is of a test that still says so."""
    assert shown.table() in shown.PAGE.read_text(), "print it: python -m tests.support.shown"


def test_the_markers_of_the_table_can_be_read_without_running_the_tests() -> None:
    """A run with `--record` reads them when it ends."""
    found = {marker for path in Path(__file__).parent.rglob("test_*.py") for marker in shown.said(path)}
    assert len(found) > 50
    recorded = [each for path in sorted(shown.FOLDER.glob("*.json")) for each in shown.load(path)]
    assert recorded
    assert [each for each in recorded if each.stale()] == []


@pytest.mark.parametrize(
    "changed",
    [
        {"test": "tests/e2e/test_saving.py::test_gone"},
        {"feature": "aborts"},
        {"family": "MLA"},
        {"level": "refused"},
    ],
)
def test_a_result_is_stale_once_its_test_is_gone_or_says_something_else(changed: dict[str, str]) -> None:
    test = "tests/e2e/test_saving.py::test_preempted_requests_are_saved_and_loaded_right"
    result = shown.Shown("full attention", "preemption", "run end to end", test)
    assert not result.stale()
    assert replace(result, **changed).stale()


@pytest.mark.parametrize("target", re.findall(r"^make ([\w-]+)$", README, re.MULTILINE))
def test_make_targets_exist(target: str) -> None:
    """Each target that the README names is one of the Makefile's."""
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.vllm
def test_the_engine_s_command_line_is_one_vllm_and_the_connector_accept() -> None:
    """README's `vllm serve` lines select the connector by the name that it registers, with keys that it knows."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvprefetch.connector import register
    from kvprefetch.connector.words.config import load

    register()
    commands = re.findall(r"^vllm serve .*$", README, re.MULTILINE)
    assert "start_daemon" in commands[0]
    for words in map(shlex.split, commands):
        config = KVTransferConfig(**json.loads(words[words.index("--kv-transfer-config") + 1]))
        assert KVConnectorFactory.get_connector_class(config).__name__ == "KVPrefetchConnector"
        load(config.kv_connector_extra_config)


def test_the_readme_is_short() -> None:
    """A reader sees what it is, what it brings and how to begin."""
    assert len(README.splitlines()) <= 140
