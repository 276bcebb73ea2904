"""Loads KVPrefetchConnector, whose worker reads the model's files longer than the engine takes to warm up."""

from __future__ import annotations

from typing import Any

from kvprefetch.connector import connector
from kvprefetch.connector.identity import fingerprint
from tests.support.waiting import eventually

of_model = fingerprint.of_model


class KVPrefetchConnector(connector.KVPrefetchConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        changing, before = vllm_config, vllm_config.instance_id

        def slow(vllm_config: Any, since_ns: int = 1 << 63) -> dict[str, str]:
            """The engine core runs the configuration's __post_init__ once more at the end of its start."""
            eventually(lambda: changing.instance_id != before, 60)
            return of_model(vllm_config, since_ns)

        fingerprint.of_model = slow
