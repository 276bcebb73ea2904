"""The settings to join a Mooncake cluster, and the JSON file that vLLM's own connector reads them from."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from . import addresses

_TEXTS = {
    "metadata_server": "",
    "master_server_address": "",
    "protocol": "rdma",
    "device_name": "",
    "mode": "embedded",
    "tenant_id": "default",
}
_KEYS = (*_TEXTS, "global_segment_size", "local_buffer_size", "enable_offload")
_NO_TRANSPORT = ("", "rpc_only")  # Mooncake ends the process with the second
_LEGACY_TCP = "MC_TCP_PROTO"


class SettingsError(ValueError):
    """A setting is wrong; one line that names the key, its value and the bound."""


@dataclass(frozen=True)
class MooncakeSettings:
    """How to join a Mooncake cluster. Sizes in bytes. `private`: no other process knows its master."""

    local_hostname: str
    metadata_server: str
    master_server_address: str
    protocol: str
    device_name: str
    global_segment_size: int
    tenant_id: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    private: bool = False

    def __str__(self) -> str:
        """The settings that an error of Mooncake's may be about."""
        keys = ("master_server_address", "metadata_server", "protocol", "device_name")
        return " ".join(f"{key}={getattr(self, key)!r}" for key in keys)

    def unreached(self, timeout_s: float) -> str | None:
        """Return a line about a server that does not answer, before Mooncake's own retries; None when all answer."""
        kind = addresses.elected(self.master_server_address)
        master = f"{kind} of Mooncake masters" if kind else "Mooncake master"
        for key, what in (("master_server_address", master), ("metadata_server", "metadata server")):
            address = getattr(self, key)
            if (why := addresses.unreached(address, timeout_s)) is not None:
                return f"no {what} answers at {address[:200]}: {why} ({key})"
        return None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> MooncakeSettings:
        """Read the JSON file that MOONCAKE_CONFIG_PATH names for vLLM (`vllm/distributed/mooncake_store.py`).

        It accepts the same keys and size forms. The daemon contributes no memory, so `global_segment_size`, `mode`,
        `enable_offload` and `local_buffer_size` are checked and then not used. Raises SettingsError, also where the
        environment tells Mooncake not to wait until a storage node has a value.
        """
        if os.environ.get(_LEGACY_TCP) == "1":
            raise SettingsError(
                f"{_LEGACY_TCP}=1: puts over TCP would count as done before their bytes are there; unset it"
            )
        raw = _read(path)
        text = {key: _text(path, raw, key, default) for key, default in _TEXTS.items()}
        text["metadata_server"] = text["metadata_server"] or addresses.P2P
        master, metadata, protocol = text["master_server_address"], text["metadata_server"], text["protocol"]
        offload, segment = raw.get("enable_offload", False), _size(path, raw, "global_segment_size", 0)
        standalone = text["mode"] == "standalone-store"
        _size(path, raw, "local_buffer_size", 1)
        for key, why in (
            ("master_server_address", addresses.wrong_master(master)),
            ("metadata_server", addresses.wrong_metadata(metadata)),
            ("protocol", "moves no bytes: must be tcp, rdma or another" if protocol in _NO_TRANSPORT else None),
            ("mode", None if standalone or text["mode"] == "embedded" else "must be 'embedded' or 'standalone-store'"),
            ("enable_offload", None if isinstance(offload, bool) else "must be true or false"),
        ):
            if why is not None:
                raise SettingsError(f"{path}: {key}={text.get(key, offload)!r} {why}")
        if (segment == 0) != standalone:
            raise SettingsError(
                f"{path}: global_segment_size={segment} must be 0 in mode standalone-store, above 0 in mode embedded"
            )
        return cls(
            local_hostname=addresses.own(master),
            metadata_server=metadata,
            master_server_address=master,
            protocol=protocol,
            device_name=text["device_name"],
            global_segment_size=0,
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


def _size(path: object, raw: dict[str, Any], key: str, minimum: int) -> int:
    value = raw.get(key, 4 << 30)
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
