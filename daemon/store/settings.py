"""The settings to join a Mooncake cluster, and the JSON file that vLLM's own connector reads them from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator

from ...shmring.wire.checks import Packet, first_error
from ..config.model import ConfigError
from . import addresses

_NO_TRANSPORT = ("", "rpc_only")  # Mooncake ends the process with the second
_LEGACY_TCP = "MC_TCP_PROTO"


def _protocol(name: str) -> str:
    if name in _NO_TRANSPORT:
        raise ValueError("moves no bytes: should be tcp, rdma or another")
    return name


def size_of(value: object) -> int:
    """Return a size; "4GB" is 4 GiB here. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([gmk]?b)?\s*", str(value).lower())
    if match is None:
        raise ValueError("should be bytes or a size such as '4GB'")
    return int(Decimal(match[1]) * (1 << 10 * "bkmg".index((match[2] or "b")[0])))


_Size = Annotated[int, BeforeValidator(size_of)]


class _File(Packet):
    metadata_server: Annotated[str, AfterValidator(addresses.metadata)] = addresses.P2P
    master_server_address: Annotated[str, AfterValidator(addresses.master)]
    protocol: Annotated[str, AfterValidator(_protocol)] = "rdma"
    device_name: str = ""
    mode: Literal["embedded", "standalone-store"] = "embedded"
    tenant_id: str | None = None
    global_segment_size: Annotated[_Size, Field(validate_default=True)] = 4 << 30
    local_buffer_size: Annotated[_Size, Field(ge=1)] = 4 << 30
    enable_offload: bool = False

    @field_validator("global_segment_size")
    @classmethod
    def _of_mode(cls, size: int, info: ValidationInfo) -> int:
        if (size == 0) != (info.data.get("mode") == "standalone-store"):
            raise ValueError("should be 0 in mode standalone-store, above 0 in mode embedded")
        return size


@dataclass(frozen=True)
class MooncakeSettings:
    """How to join a Mooncake cluster. Sizes in bytes. `private`: no other process knows its master."""

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
        `enable_offload` and `local_buffer_size` are checked and then not used. Raises ConfigError, also where the
        environment tells Mooncake not to wait until a storage node has a value.
        """
        if os.environ.get(_LEGACY_TCP) == "1":
            raise ConfigError(
                f"{_LEGACY_TCP}=1: puts over TCP would count as done before their bytes are there; unset it"
            )
        try:
            found = _File.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except ValidationError as error:
            raise ConfigError(f"{path}: {first_error(error)}") from None
        kept = found.model_dump(include={"metadata_server", "master_server_address", "protocol", "device_name"})
        return cls(**kept, global_segment_size=0, tenant_id=(found.tenant_id or "").strip() or "default")
