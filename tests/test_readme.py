"""The commands of README and the tables of docs/reference/configuration.md are those of the code."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from kvprefetch.connector.config import ConnectorConfig
from kvprefetch.daemon.config.model import DaemonConfig
from tests.support import documents

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


@pytest.mark.parametrize("target", re.findall(r"^make ([\w-]+)$", README, re.MULTILINE))
def test_make_targets_exist(target: str) -> None:
    """Each target that the README names is one of the Makefile's."""
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.vllm
def test_the_engine_s_command_line_is_one_vllm_and_the_connector_accept() -> None:
    """The README's `vllm serve` line selects the connector by the name that it registers."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvprefetch.connector import register

    command = re.search(r"^vllm serve .*$", README, re.MULTILINE)
    assert command is not None
    words = shlex.split(command[0])
    config = KVTransferConfig(**json.loads(words[words.index("--kv-transfer-config") + 1]))
    register()
    assert KVConnectorFactory.get_connector_class(config).__name__ == "KVPrefetchConnector"
