"""The daemon's one typed configuration model: every key, its unit, its bound and its default."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ..shmring.protocol import default_socket, first_error

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30,
          "ti": 1 << 40}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


class ConfigError(Exception):
    """Bad configuration, in one line that names key, value and bound. The process exits with 78 (EX_CONFIG)."""


def parse_size(text: object) -> int:
    """Bytes of a size such as 512MiB, 4GB or 65536. ValueError when it is none."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(str(text).strip())
    if match is None or match.group(2).lower() not in _UNITS:
        raise ValueError("should be a size such as 512MiB, 4GB or 65536")
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])


Size = Annotated[int, BeforeValidator(parse_size)]


class DaemonConfig(BaseModel):
    """Everything `kvprefetchd serve` can be told. Sizes are bytes, or text with a unit; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    socket: Path = Field(default_factory=lambda: Path(default_socket()), description="control socket")
    staging: Size = Field(default=1 << 30, ge=4096, le=1 << 42, description="staging bytes of each engine, all ranks")
    save_share: float = Field(default=0.25, ge=0.0, le=0.9, description="share of the staging slots kept for saves")
    max_engines: int = Field(default=8, ge=1, le=256, description="engines attached at a time")
    mooncake_config: Path | None = Field(default=None, description="JSON file of a cluster to join")
    memory: Size = Field(default=1 << 30, ge=16 << 20, le=1 << 42, description="DRAM segment of the embedded store")
    disk: str | None = Field(default=None, description="DIR[:SIZE] of the embedded store's SSD tier")
    master_port: int | None = Field(default=None, ge=1, le=65535, description="port of the embedded master")
    chunk: Size = Field(default=4 << 20, ge=4096, le=1 << 30, description="bytes of one store call")
    fetch_threads: int = Field(
        default_factory=lambda: max(1, min(4, (os.cpu_count() or 1) // 2)), ge=1, le=64,
        description="concurrent fetches; each one in flight keeps a core busy",
    )  # fmt: skip
    spin_us: int = Field(default=50, ge=0, le=10_000, description="how long the idle loop spins before it sleeps")
    hint_ring: Size = Field(default=4 << 20, ge=1 << 16, le=1 << 30, description="bytes of each engine's hint ring")
    rpc_timeout_ms: int = Field(default=2000, ge=10, le=60_000, description="one question to the master")
    metrics_address: str = Field(default="127.0.0.1", min_length=1, description="address of /metrics and /healthz")
    metrics_port: int = Field(default=9655, ge=0, le=65535, description="its TCP port; 0: no metrics")
    log_level: str = Field(
        default="info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error"
    )


def load(values: Mapping[str, Any]) -> DaemonConfig:
    """Validate configuration values. Raises ConfigError naming the first bad key, its value and the bound."""
    try:
        return DaemonConfig.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(first_error(error)) from None
