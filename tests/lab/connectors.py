"""Values of vLLM's ``kv_transfer_config`` for the connectors that tests and benchmarks compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def upstream(*, lookup_async: bool = False, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """vLLM's own connector for a Mooncake store; looks up synchronously by default, as upstream does."""
    return {
        "kv_connector": "MooncakeStoreConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lookup_async": lookup_async, **extra},
    }


def ours(socket: Path, *, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """kvprefetch's connector, talking to the daemon at ``socket``.

    It waits for every block that the store holds, a minute at most, so that hits can be counted on a machine with no
    core to spare. The connector's default, ``wait_policy="adaptive"``, waits for as long as that beats recomputing.
    """
    if "wait_policy" not in extra:
        extra = {"wait_policy": "timeout", "wait_timeout_ms": 60_000, **extra}
    return {
        "kv_connector": "KVPrefetchConnector",
        "kv_connector_module_path": "kvprefetch.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket), **extra},
    }


def multi(*children: dict[str, Any], role: str = "kv_both") -> dict[str, Any]:
    """MultiConnector over ``children``, asked in this order."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(children)},
    }
