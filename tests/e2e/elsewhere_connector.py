"""Loads KVPrefetchConnector, with one process of the engine on another node: a kernel with another boot id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvprefetch.connector import connector
from kvprefetch.connector.engine import refusals

# "scheduler", or a worker's tensor-parallel rank.
WHO = "KVPREFETCH_TEST_ELSEWHERE"


class KVPrefetchConnector(connector.KVPrefetchConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        here = "scheduler" if role == KVConnectorRole.SCHEDULER else str(get_tensor_model_parallel_rank())
        if here == os.environ[WHO]:
            refusals.BOOT_ID = Path("/proc/sys/kernel/random/uuid")  # a new one for each reader
        super().__init__(vllm_config, role, kv_cache_config)
