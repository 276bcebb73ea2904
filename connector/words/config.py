"""The keys of `kv_connector_extra_config`, with unit, bound and default."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ...shmring.wire.checks import first_error, living, nearest, shown
from ...shmring.wire.control_socket import DAEMON_USER, check_socket_path

log = logging.getLogger("vllm.kvprefetch")
Policy = Literal["best_effort", "wait", "timeout", "adaptive"]
# Former keys, with the reason: each is a warning for a release.
GONE = {
    "reset_timeout_ms": "a reset is confirmed at once",
    "weights_file": "the log names the weights by a digest of what they are",
}
# Keys that Dynamo's worker for vLLM reads here, each with the file that does; our own code does not read them.
FOREIGN = {"secondary_tiers": "dynamo/vllm/kv_hints.py", "dynamo_state_agent": "dynamo/vllm/state_agent.py"}
ADVERTISED = "router_hint"  # what it tells Dynamo's router (KV_HINT_TRANSFER_CAPABILITY_KEY)


def _check_user(value: object) -> object:
    named = isinstance(value, str) and 1 <= len(value) <= 256 and "\0" not in value
    if not named and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < (1 << 32) - 1):
        raise ValueError(f"should be a user's name, or its number from 0 to {(1 << 32) - 2}")
    return value


def _daemon_options(value: object) -> object:
    """Return the options that true and false stand for: none of its own, and no daemon."""
    if isinstance(value, bool):
        return {} if value else None
    if value is not None and (not isinstance(value, dict) or "socket" in value):
        raise ValueError('should be true or the daemon\'s options, without socket: {"disk": "/var/lib/kv:100GiB"}')
    return value


def _mode(value: object) -> object:
    if value == "shadow":
        log.warning("kvprefetch: mode: shadow is the daemon's alone now (kvprefetchd mode shadow); this engine is off")
        return "off"
    return value


class ConnectorConfig(BaseModel):
    """The connector's configuration. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    socket: Annotated[str | None, BeforeValidator(check_socket_path)] = Field(
        default=None, description="the daemon's control socket"
    )
    daemon_user: Annotated[str | int, BeforeValidator(_check_user)] = Field(
        default=DAEMON_USER, description="name or number of the daemon's user, beside root and the engine's own"
    )
    start_daemon: Annotated[dict[str, Any] | None, BeforeValidator(_daemon_options)] = Field(
        default=None, description="true, or the daemon's options: start a daemon where none listens"
    )
    mode: Annotated[Literal["on", "off"], BeforeValidator(_mode)] = Field(default="on", description="off: do nothing")
    load_mode: Literal["auto", "sync", "async"] = Field(
        default="auto",
        description="sync: copy before the forward; async: beside it; auto: by size and by how busy the engine is. "
        "With a LoRA adapter sync, or async where steps overlap",
    )
    sync_load_max_bytes: int = Field(
        default=32 << 20,
        ge=0,
        le=1 << 50,
        description="largest load of one request and rank done before an idle engine's forward",
    )
    wait_policy: Policy = Field(
        default="adaptive", description="what a request at the head of the queue does when its blocks are late"
    )
    wait_timeout_ms: int = Field(
        default=5000, ge=0, le=3_600_000, description="longest wait of a request with timeout and adaptive"
    )
    spin_us: int = Field(
        default=250, ge=0, le=10_000, description="longest look of a pass at look-ups about to end; 0: none"
    )
    idle_wait_us: int = Field(
        default=2000,
        ge=0,
        le=10_000,
        description="longest wait of a pass of an idle engine for flags about to change; 0: none",
    )
    hint_on_arrival: bool = Field(default=True, description="false: hint only when the scheduler first asks")
    save_decode_cache: bool = Field(default=False, description="also save blocks filled while decoding")
    key_format: Literal["fingerprint", "vllm"] = Field(
        default="fingerprint",
        description="vllm: keys of vLLM's MooncakeStoreConnector, which engines with other weights have, too",
    )
    cache_prefix: str = Field(
        default="", max_length=256, description="put before every key, as upstream's option of this name"
    )
    event_lifetime_s: int = Field(
        default=120,
        ge=1,
        le=86_400,
        description="a stored block's KV event is taken back after this time without a save, load or use of it",
    )

    @property
    def in_force(self) -> str:
        """What an operator would ask for, as key=value: how requests wait and load, and what is not the default."""
        named = {"wait_policy", "load_mode"} | self.model_fields_set - {"socket", "start_daemon", "cache_prefix"}
        return " ".join(f"{key}={getattr(self, key)}" for key in type(self).model_fields if key in named)


# Keys that a single request may set for itself.
OVERRIDABLE = ("wait_policy", "wait_timeout_ms")


def override(config: ConnectorConfig, wishes: Any) -> ConnectorConfig:
    """The configuration with a request's own wishes. ValueError in one line naming the first bad key, value, bound."""
    if not isinstance(wishes, Mapping):
        raise ValueError(f"kv_transfer_params: kvprefetch: must be an object: kvprefetch={shown(wishes)}")
    for key, value in wishes.items():
        if key not in OVERRIDABLE:
            raise ValueError(
                f"kv_transfer_params: {shown(key)}: is not one of {', '.join(OVERRIDABLE)}: value={shown(value)}"
            )
    try:
        return ConnectorConfig.model_validate({**config.model_dump(), **wishes})
    except ValidationError as error:
        raise ValueError(f"kv_transfer_params: {first_error(error, ConnectorConfig)}") from None


def _check_advertised(entries: Any) -> None:
    """Raise ValueError for an entry that asks for a place to keep KV in, which nothing here would be."""
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, Mapping) or entry.get("router_capabilities") != [ADVERTISED]:
            wanted = f'only what advertises router_capabilities ["{ADVERTISED}"] to Dynamo may be here'
            raise ValueError(f"kv_connector_extra_config: secondary_tiers: {wanted}: entry={shown(entry)}")


def load(values: Mapping[str, Any]) -> ConnectorConfig:
    """Validate the extra configuration. ValueError in one line naming the first bad key, its value and the bound."""
    if not isinstance(values, Mapping):
        raise ValueError(f"kv_connector_extra_config: is not an object of keys: value={shown(values)}")
    _check_advertised(values.get("secondary_tiers", []))
    values = {key: value for key, value in values.items() if key not in FOREIGN}
    values, known = living(values, GONE, log.warning), ConnectorConfig.model_fields
    if unknown := [key for key in values if key not in known]:
        close = nearest(str(unknown[0]), known)
        raise ValueError(
            f"kv_connector_extra_config: unknown key {shown(unknown[0])}: the keys are {', '.join(known)}{close}"
        )
    try:
        return ConnectorConfig.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"kv_connector_extra_config: {first_error(error, ConnectorConfig)}") from None
