"""How to join a Mooncake cluster: the settings, and the JSON file that vLLM's own connector reads them from."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

_KEYS = (
    "metadata_server", "master_server_address", "protocol", "device_name", "mode", "global_segment_size",
    "local_buffer_size", "enable_offload", "tenant_id",
)  # fmt: skip
_LEGACY_TCP = "MC_TCP_PROTO"
_LOCAL_BUFFER_BYTES = 16 << 20  # Mooncake's own default; the zero-copy calls used here never touch it


class SettingsError(ValueError):
    """A setting is wrong; one line that names the key, its value and the bound."""


@dataclass(frozen=True)
class MooncakeSettings:
    """How to join a Mooncake cluster. Sizes in bytes."""

    local_hostname: str
    metadata_server: str
    master_server_address: str
    protocol: str
    device_name: str
    global_segment_size: int
    local_buffer_size: int
    tenant_id: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> MooncakeSettings:
        """Settings from the JSON file that MOONCAKE_CONFIG_PATH names for vLLM (`vllm/distributed/mooncake_store.py`).

        The same keys and size forms are accepted. The daemon joins as a reader, so `global_segment_size`, `mode` and
        `enable_offload`, which say what an engine contributes, are checked and then not used; `local_buffer_size` is
        capped at 16 MiB, because no call made here copies through it. Raises SettingsError, also where Mooncake is told
        not to wait until the owner of a value has it.
        """
        if os.environ.get(_LEGACY_TCP) == "1":
            raise SettingsError(
                f"{_LEGACY_TCP}=1: puts over TCP would count as done before their bytes are there; unset it"
            )
        raw = _read(path)
        text = {
            key: _text(path, raw, key, default)
            for key, default in (
                ("metadata_server", ""),
                ("master_server_address", ""),
                ("protocol", "rdma"),
                ("device_name", ""),
                ("mode", "embedded"),
                ("tenant_id", "default"),
            )
        }
        master = text["master_server_address"]
        port = re.fullmatch(r".+:(\d{1,5})", master)
        if "://" not in master and (port is None or not 1 <= int(port[1]) <= 65535):
            raise SettingsError(
                f"{path}: master_server_address={master!r} must be host:port, with a port of 1 to 65535"
            )
        if text["mode"] not in ("embedded", "standalone-store"):
            raise SettingsError(f"{path}: mode={text['mode']!r} must be 'embedded' or 'standalone-store'")
        if not isinstance(raw.get("enable_offload", False), bool):
            raise SettingsError(f"{path}: enable_offload={raw['enable_offload']!r} must be true or false")
        segment = _size(path, raw, "global_segment_size", 4 << 30, 0)
        if (segment == 0) != (text["mode"] == "standalone-store"):
            raise SettingsError(
                f"{path}: global_segment_size={segment} must be 0 in mode standalone-store, above 0 in mode embedded"
            )
        return cls(
            local_hostname=_own_address(master),
            metadata_server=text["metadata_server"] or "P2PHANDSHAKE",
            master_server_address=master,
            protocol=text["protocol"],
            device_name=text["device_name"],
            global_segment_size=0,
            local_buffer_size=min(_size(path, raw, "local_buffer_size", 4 << 30, 1), _LOCAL_BUFFER_BYTES),
            tenant_id=text["tenant_id"].strip() or "default",
        )


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"{path}: cannot be read: {why}") from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise SettingsError(f"{path}: must be a JSON object, is a {type(raw).__name__}")
    for key, value in raw.items():
        if key not in _KEYS:
            raise SettingsError(f"{path}: unknown key {key}={value!r}; known keys are {', '.join(_KEYS)}")
    return raw


def _text(path: object, raw: dict[str, Any], key: str, default: str) -> str:
    value = raw.get(key, default)
    if key == "tenant_id" and value is None:
        return default
    if not isinstance(value, str):
        raise SettingsError(f"{path}: {key}={value!r} must be a string")
    return value


def _size(path: object, raw: dict[str, Any], key: str, default: int, minimum: int) -> int:
    value = raw.get(key, default)
    size = -1
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        size = int(value)
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(gb|mb|kb|b)?\s*", value.lower())
        if match:
            unit = {"gb": 1 << 30, "mb": 1 << 20, "kb": 1 << 10}.get(match[2] or "b", 1)
            size = int(Decimal(match[1]) * unit)
    if size < minimum:
        raise SettingsError(f"{path}: {key}={value!r} must be bytes or a size such as '4GB', at least {minimum}")
    return size


def _own_address(master: str) -> str:
    """The address of this host that a packet to `master` would carry; nothing is sent."""
    host, _, port = master.rpartition("://")[2].split(",")[0].rpartition(":")
    with (
        contextlib.suppress(OSError, ValueError, TypeError, OverflowError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])
    return "127.0.0.1"
