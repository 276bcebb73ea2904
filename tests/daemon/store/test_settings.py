"""The settings file of a Mooncake cluster that vLLM reads, and the errors in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvprefetch.daemon.config.model import ConfigError
from kvprefetch.daemon.store.settings import MooncakeSettings, size_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mooncake.json"


def read(path: Path, **settings: Any) -> MooncakeSettings:
    path.write_text(json.dumps({"master_server_address": "127.0.0.1:50051", **settings}))
    return MooncakeSettings.from_file(path)


def test_should_read_the_file_that_vllm_reads(path: Path) -> None:
    sizes = {"global_segment_size": "4GB", "local_buffer_size": "8 MB"}
    found = read(path, metadata_server="P2PHANDSHAKE", protocol="tcp", tenant_id=None, **sizes)
    assert found == MooncakeSettings("P2PHANDSHAKE", "127.0.0.1:50051", "tcp", "", 0, "default")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"colour": "red"}, "colour='red'"),
        ({"protocol": "rpc_only"}, "protocol='rpc_only'"),
        (
            {"metadata_server": "redis://h:1"},
            "must be P2PHANDSHAKE, http://HOST:PORT/metadata or etcd://HOST:PORT: meta",
        ),
        ({"local_buffer_size": "4 XB"}, "local_buffer_size='4 XB'"),
        ({"local_buffer_size": 0}, "greater than or equal to 1: local_buffer_size=0"),
        ({"mode": "standalone-store"}, "should be 0 in mode standalone-store"),
        ({"global_segment_size": "0"}, "above 0 in mode embedded"),
        ({"master_server_address": "h:99999"}, "must be host:port, with a port of 1 to 65535"),
        ({"global_segment_size": float("inf")}, "global_segment_size=inf"),
    ],
)
def test_should_refuse_a_wrong_setting_by_name(path: Path, change: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(path, **change)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), (1.5e9, 1_500_000_000), ("4GB", 4 << 30), (" .5 mb ", 1 << 19), ("3kb", 3072), ("2 b", 2), ("8", 8)],
)
def test_a_gigabyte_is_two_to_the_thirtieth_as_for_vllm(text: object, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_should_refuse_a_file_that_is_missing_or_no_object(path: Path, text: str | None) -> None:
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError):
        MooncakeSettings.from_file(path)


def test_should_refuse_puts_that_nobody_acknowledges(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(ConfigError, match=r"^MC_TCP_PROTO=1: .*; unset it$"):
        read(path)
