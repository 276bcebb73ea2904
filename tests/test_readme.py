"""The README's commands and configuration tables are those of the code."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from kvprefetch.connector.config import ConnectorConfig
from kvprefetch.daemon.cli.common import default_text
from kvprefetch.daemon.config.model import SIZES, DaemonConfig
from kvprefetch.daemon.config.sizes import size_text

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def table(heading: str) -> dict[str, str]:
    """First column to second column of the table under a heading, backticks removed."""
    section = README.split(f"### {heading}\n")[1].split("\n### ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    return {name.strip().strip("`"): default.strip() for name, default in rows}


def documented(model: type[BaseModel], rows: dict[str, str]) -> None:
    assert list(rows) == list(model.model_fields)
    for name, field in model.model_fields.items():
        default: Any = field.default
        if model is DaemonConfig and field.get_default(call_default_factory=True) in (None, ()):
            assert rows[name] == default_text(name, field)
        elif field.default_factory is None and default is not None:
            shown = rows[name].strip("`")
            if model is DaemonConfig and name in SIZES:
                default = size_text(default)
            assert shown in (json.dumps(default), str(default)), f"{name}: README says {shown}, the code {default!r}"


def test_the_connector_s_keys_and_defaults() -> None:
    documented(ConnectorConfig, table("The connector"))


def test_the_daemon_s_options_and_defaults() -> None:
    rows = {option.removeprefix("--").replace("-", "_"): default for option, default in table("The daemon").items()}
    documented(DaemonConfig, rows)


@pytest.mark.parametrize("target", re.findall(r"^make ([\w-]+)$", README, re.MULTILINE))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_engine_s_command_line_is_one_vllm_and_the_connector_accept() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvprefetch.connector import register

    command = re.search(r"^vllm serve .*$", README, re.MULTILINE)
    assert command is not None
    words = shlex.split(command[0])
    config = KVTransferConfig(**json.loads(words[words.index("--kv-transfer-config") + 1]))
    register()
    assert KVConnectorFactory.get_connector_class(config).__name__ == "KVPrefetchConnector"


def test_linked_documents_exist() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
