"""KVPrefetchConnector on a GPU of host memory: vLLM imports it from here, and torch's "cpu" then lies on that GPU."""

from __future__ import annotations

from typing import Any

from kvprefetch.connector.connector import KVPrefetchConnector
from tests.support import host_device

__all__ = ["KVPrefetchConnector"]

_devices = host_device.install(total_bytes=64 << 20)


def mapped(_engine: Any) -> int:
    """How many slabs of others this process has mapped."""
    return _devices.device.live["opened"]


def worker_counters(engine: Any) -> dict[str, int]:
    """What the worker side counted; for an engine whose worker is in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = get_kv_transfer_group()._worker  # type: ignore[attr-defined]
    return dict(side._counters)
