"""Which releases of Mooncake are served: those that the tests ran, and others that have all that the daemon calls."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib import metadata
from typing import Any

# The releases that the tests ran, the oldest first; 0.3.14 as its build for CUDA 13, without a GPU.
TRIED = ("0.3.13", "0.3.14")
DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
# What the daemon calls of a client, and the keywords of its `setup`; a transfer engine has a test of its own.
CLIENT = (
    "batch_get_into batch_get_into_multi_buffers batch_get_replica_desc batch_is_exist batch_put_from "
    "batch_put_from_multi_buffers batch_remove close get get_size put register_buffer setup unregister_buffer"
)
SETUP = ("engine", "enable_ssd_offload", "ssd_offload_path", "tenant_id")


def installed() -> dict[str, str]:
    """Return the versions of Mooncake's packages by their names; imports nothing of them."""
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def lacks(client: Any) -> list[str]:
    """Return what a client's class has not of what the daemon calls."""
    found = [f"client.{name}" for name in CLIENT.split() if not hasattr(client, name)]
    parameters = getattr(getattr(client, "setup", None), "__doc__", None) or ""  # of a class from C++
    return found + [f"client.setup({name}=)" for name in SETUP if f"{name}:" not in parameters]


def untried(versions: Mapping[str, str]) -> str:
    """Say in one line that no test has run these versions, as `installed` returns them; empty for those of TRIED."""
    other = {name: text for name, text in versions.items() if ".".join(text.split(".")[:3]) not in TRIED}
    if versions and not other:
        return ""
    said = " ".join(f"{name}={text}" for name, text in other.items()) or "version unknown"
    return f"no test has run this Mooncake: {said} tried={', '.join(TRIED)}: it has all that the daemon calls"
