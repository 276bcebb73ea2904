"""Loads KVPrefetchConnector with GPUs of host memory; torch's "cpu" then lies on one of them.

All ranks share the first GPU, unless the environment asks for one each (SPREAD).
"""

from __future__ import annotations

import os
from typing import Any

from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.shmring.gpu import cuda
from tests.support.host_device import SPREAD, UUIDS, HostDevices

__all__ = ["KVPrefetchConnector"]


class _Devices(HostDevices):
    def uuid_of(self, kind: str, index: int) -> str:
        from vllm.distributed import get_tensor_model_parallel_rank

        if os.environ.get(SPREAD):
            self.device = self.open(UUIDS[get_tensor_model_parallel_rank()])
        return super().uuid_of(kind, index)


_devices = _Devices(64 << 20)
cuda.devices = _devices


def mapped(engine: Any) -> list[int]:
    """Count the daemon's slabs that each rank has mapped."""
    return _on_ranks(engine, _mapped)


def worker_counters(engine: Any) -> list[dict[str, int]]:
    """Return the counters of each rank's worker side."""
    return _on_ranks(engine, _worker_counters)


def _on_ranks(engine: Any, work: Any) -> list[Any]:
    found: list[Any] = engine.engine_core.engine_core.model_executor.collective_rpc(work)
    return found


def _mapped(_worker: Any) -> int:
    return _devices.device.live["opened"]


def _worker_counters(_worker: Any) -> dict[str, int]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = get_kv_transfer_group().worker_side  # type: ignore[attr-defined]
    return dict(side.counters)
