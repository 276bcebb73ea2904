"""What vLLM says of a step, and what the ranks report after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvprefetch.connector.words.metadata import AdapterRead, KVPrefetchWorkerMeta

if TYPE_CHECKING:
    from .fakes import Request


class Blocks:
    """vLLM's KVCacheBlocks: the blocks of a request in each group, by their ids."""

    def __init__(self, *tables: Sequence[int]) -> None:
        self.blocks = tuple([SimpleNamespace(block_id=each) for each in table] for table in tables)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in group] for group in self.blocks)


def scheduled_output(
    pairs: Sequence[tuple[Request, int]],
    tables: Mapping[str, tuple[list[int], ...]] | None = None,
    offers: Mapping[str, Sequence[tuple[int, int, int]]] | None = None,
) -> Any:
    """vLLM's SchedulerOutput of a step with so many tokens of each request; `offers`: its boundary states."""
    return SimpleNamespace(
        num_scheduled_tokens={request.request_id: tokens for request, tokens in pairs},
        total_num_scheduled_tokens=sum(tokens for _, tokens in pairs),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=(tables or {}).get, boundary_state_offloads=dict(offers or {})
        ),
    )


def reads_of(adapter: Any, *contents: str) -> KVPrefetchWorkerMeta:
    """What the ranks report that have read an adapter, each with its own modules."""
    return KVPrefetchWorkerMeta(
        adapters={
            rank: [
                AdapterRead(
                    adapter.adapter_id, adapter.name, adapter.path, each.encode().ljust(32) + bytes([rank]) * 32
                )
            ]
            for rank, each in enumerate(contents)
        }
    )
