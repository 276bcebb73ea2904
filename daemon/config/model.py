"""The daemon's one typed configuration model: every key, its unit, its bound and its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from ...shmring.wire.checks import Mode
from ...shmring.wire.control_socket import check_socket_path, own_socket
from .machine import usable_cores
from .sizes import parse_size, size_text


class ConfigError(Exception):
    """Bad configuration: one line with key, value and bound. The process exits with 78 (EX_CONFIG)."""


class Taken(ConfigError):
    """Another process has a port or socket of the configuration. The process exits with 69, and systemd tries again."""


def _parse_uids(value: object) -> object:
    """Split text such as 1000,1001; return anything else as it is."""
    return [part for part in value.replace(",", " ").split() if part] if isinstance(value, str) else value


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


def _octal(text: str) -> str:
    if re.fullmatch("0?[0-7]{3}", text) is None:
        raise ValueError("should be three octal digits, such as 0660")
    return text


def _within(least: int, most: int) -> AfterValidator:
    """Bound a size; the error gives the bounds as people write sizes."""

    def check(count: int) -> int:
        if not least <= count <= most:
            raise ValueError(f"should be {size_text(least)} to {size_text(most)}")
        return count

    return AfterValidator(check)


Size = Annotated[int, BeforeValidator(parse_size)]
Number = Annotated[int, BeforeValidator(_number)]
Uid = Annotated[Number, Field(ge=0, le=(1 << 32) - 2)]


def door_socket(control: Path) -> Path:
    """Return the path of the HTTP door's Unix socket, beside the control socket."""
    return control.with_name(f"{control.stem}-hints{control.suffix}")


class DaemonConfig(BaseModel):
    """The configuration of `kvprefetchd serve`. Sizes are bytes, or text with a unit; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    socket: Annotated[Path, BeforeValidator(check_socket_path)] = Field(
        default_factory=lambda: Path(own_socket()), description="control socket"
    )
    socket_mode: Annotated[str, AfterValidator(_octal)] = Field(
        default="0660", description="file mode of the control socket, octal"
    )
    socket_group: str | None = Field(
        default=None, min_length=1, description="name or number of the group that owns the control socket"
    )
    allow_uids: Annotated[tuple[Uid, ...], BeforeValidator(_parse_uids)] = Field(
        default_factory=tuple,
        max_length=256,
        description="users who may attach, beside root, the daemon's own and the group",
    )
    namespaces: Literal["per_user", "shared"] = Field(
        default="per_user",
        description="which engines may share stored KV: per_user: those of one user; shared: of all who may attach",
    )
    mode: Mode = Field(
        default="on", description="shadow: look up and count, never load or save; off: answer every request with a miss"
    )
    staging: Annotated[Size, _within(4096, 1 << 42)] = Field(
        default=1 << 30, description="staging bytes of each engine, all ranks"
    )
    device_staging: Annotated[Size, _within(0, 1 << 42)] = Field(
        default=1 << 30, description="staging bytes on each GPU of each engine; 0: host memory only"
    )
    device_margin: Annotated[Size, _within(0, 1 << 42)] = Field(
        default=2 << 30, description="bytes of a GPU's free memory that staging leaves alone"
    )
    save_share: Annotated[float, BeforeValidator(_number)] = Field(
        default=0.25, ge=0.0, le=0.9, description="share of the staging slots kept for saves"
    )
    max_engines: Number = Field(default=16, ge=1, le=256, description="engines attached at a time")
    max_engines_per_uid: Number = Field(
        default=8, ge=1, le=256, description="of these, engines that run as one and the same user"
    )
    mooncake_config: Path | None = Field(default=None, description="JSON file of a cluster to join")
    memory: Annotated[Size, _within(16 << 20, 1 << 42)] = Field(
        default=1 << 30, description="DRAM segment of the embedded store"
    )
    disk: str | None = Field(
        default=None,
        description="DIR[:SIZE] of the embedded store's disk; auto: a fifth of what is free where the user's data is",
    )
    master_port: Number | None = Field(default=None, ge=1, le=65535, description="port of the embedded master")
    store_reach: Literal["local", "any"] = Field(
        default="local",
        description="local: no embedded store where other machines could reach its memory; any: start it all the same",
    )
    chunk: Annotated[Size, _within(4096, 1 << 30)] = Field(default=4 << 20, description="most bytes of one store call")
    fetch_threads: Number = Field(
        default_factory=lambda: max(2, min(4, usable_cores() // 2)),
        ge=1,
        le=64,
        description="concurrent fetches, at most; one that does not sleep while it waits keeps a core busy",
    )
    hint_ring: Annotated[Size, _within(1 << 16, 1 << 30)] = Field(
        default=4 << 20, description="bytes of each engine's hint ring, or the next power of two"
    )
    rpc_timeout_ms: Number = Field(default=2000, ge=10, le=60_000, description="one question to the master")
    metrics_address: str = Field(
        default="127.0.0.1", min_length=1, description="address of /metrics, /healthz, /readyz"
    )
    metrics_port: Number = Field(default=9655, ge=0, le=65535, description="its TCP port; 0: no metrics")
    door: Literal["on", "off"] = Field(
        default="on", description="on: the HTTP door for announcements, a Unix socket beside the control socket"
    )
    door_port: Number = Field(
        default=0, ge=0, le=65535, description="TCP port of the door on 127.0.0.1; 0: the Unix socket alone"
    )
    door_token: Path | None = Field(
        default=None, description="file with the token that callers of that port send: Authorization: Bearer TOKEN"
    )
    checksums: Literal["on", "off"] = Field(
        default="off", description="on: each value has a checksum, which a fetch compares; other keys than without"
    )
    sessions: Literal["on", "off"] = Field(
        default="on", description="on: prompts of sessions are kept, and staged before their next requests come"
    )
    call_timeout_ms: Number = Field(
        default=4000,
        ge=100,
        le=600_000,
        description="one look-up, fetch, save or call to a GPU; then the requests go on without it",
    )
    lease_ms: Number | None = Field(
        default=None,
        ge=100,
        le=3_600_000,
        description="how long the store keeps what was looked up, as its master is set",
    )
    exit_idle_s: Number = Field(
        default=0,
        ge=0,
        le=86_400,
        description="seconds without an engine after which the daemon ends; the first has at least a minute; 0: never",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="debug, info, warning or error"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _whole(cls, value: object) -> object:
        if isinstance(value, str) and "\0" in value:  # the system's functions take no such name
            raise ValueError("should have no zero byte")
        return value

    @property
    def door_socket(self) -> Path:
        return door_socket(self.socket)

    @property
    def lease_ns(self) -> int:
        """Return `lease_ms`, or the default of the store's master, in ns."""
        default_ms = 2000 if self.disk is not None and self.mooncake_config is None else 10_000
        return (self.lease_ms or default_ms) * 1_000_000


# Former keys, each a warning for a release: with the key that has the meaning now, or with the reason.
FORMER = {"hints": "door", "hints_port": "door_port", "hints_token": "door_token"}
GONE = {
    "spin_us": "the daemon looks at the rings as the CPU time of a look allows",
    "device_owner": "the daemon itself finds the way to share a GPU's memory",
}

# Keys that SIGHUP changes: those of `NEXT_ATTACH` for engines that attach later, the others of `RELOADABLE` at once.
# Any other key needs a restart.
NEXT_ATTACH = frozenset({"staging", "device_staging", "device_margin", "save_share", "hint_ring", "chunk"})
RELOADABLE = NEXT_ATTACH | frozenset(
    {"allow_uids", "log_level", "max_engines", "max_engines_per_uid", "mode", "namespaces"}
)

# Keys with a size as their value.
SIZES = frozenset(
    name
    for name, field in DaemonConfig.model_fields.items()
    if any(getattr(each, "func", None) is parse_size for each in field.metadata)
)
