"""A connector that loads and saves nothing, and notes which of its hooks vLLM calls, in their order."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

CALLS: list[str] = []


class HooksConnector(KVConnectorBase_V1):
    """Its module's `CALLS` has the names."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


def _noted(name: str) -> Any:
    original = getattr(HooksConnector, name)

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        CALLS.append(f"{name} {args[0]}" if name in ("wait_for_layer_load", "save_kv_layer") else name)
        return original(self, *args, **kwargs)

    return hook


for _name in (
    "register_kv_caches", "set_host_xfer_buffer_ops", "handle_preemptions", "bind_connector_metadata", "start_load_kv",
    "wait_for_layer_load", "save_kv_layer", "finish_forward", "wait_for_save", "get_transfer_results",
    "get_block_ids_with_load_errors", "get_kv_connector_stats", "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta", "clear_connector_metadata", "on_new_request", "get_num_new_matched_tokens",
    "update_state_after_alloc", "build_connector_meta", "update_connector_output", "request_finished", "take_events",
):  # fmt: skip
    setattr(HooksConnector, _name, _noted(_name))


def calls(engine: Any) -> list[str]:
    """For `Engine.call`: the hooks so far."""
    del engine
    return CALLS
