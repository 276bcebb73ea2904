"""Numbers of one engine, from vLLM's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from . import compat, groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ...kv.groups import Groups

_T = TypeVar("_T")


@dataclass(frozen=True)
class Geometry:
    """Numbers of one engine. Sizes in tokens or bytes; `block_bytes` is one rank's share of a block.

    A block is the unit of all KV groups.  `max_running`: requests that run at a time.  `spec_kinds`: of each group the
    kind of cache and the window in vLLM's KV events.  `retention`: vLLM's prefix_cache_retention_interval.
    """

    groups: Groups
    world_size: int
    block_bytes: int
    max_blocks: int
    max_running: int
    loads: bool
    saves: bool
    spec_kinds: tuple[tuple[str, int | None], ...]
    # Data-parallel ranks of a mixture of experts step together: each waits for whatever another does between steps.
    lockstep: bool
    # A step is scheduled while another one runs.
    overlapping: bool = False
    # Its scheduler is a step ahead of the device, by asynchronous scheduling.
    ahead: bool = False
    # No step in flight uses blocks that vLLM gives to a request: windows give blocks back at once.
    fenced_blocks: bool = False
    retention: int | None = None
    # vLLM's numbers of `groups`, where it has others, outside its prefix cache; their blocks are in its tables, too.
    numbers: tuple[int, ...] | None = None
    # It computes so many tokens at the end of a hit again, and takes no hit that is not longer.
    replayed_tokens: int = 0

    @property
    def one_table(self) -> bool:
        """Whether a request has one table of blocks."""
        return len(self.groups) == 1 and self.numbers is None

    @property
    def takes_back_loads(self) -> bool:
        """Whether vLLM takes back a synchronous load that failed; an asynchronous one it always does."""
        return self.one_table and not self.overlapping

    def tables(self, all_groups: Sequence[_T]) -> Sequence[_T]:
        """Return what vLLM has for each of `groups`, of what it has for each of its own groups."""
        return all_groups if self.numbers is None else [all_groups[number] for number in self.numbers]

    def number(self, group: int) -> int:
        """Return vLLM's number of one of `groups`."""
        return group if self.numbers is None else self.numbers[group]

    @cached_property
    def block_tokens(self) -> int:
        return self.groups.unit_tokens


def of_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Geometry:
    """The numbers of a configuration that `check` accepted."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    transfer, rules = vllm_config.kv_transfer_config, rules_of(vllm_config, kv_cache_config)
    ahead = bool(vllm_config.scheduler_config.async_scheduling)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    served, count = groups.served(kv_cache_config), len(kv_cache_config.kv_cache_groups)
    return Geometry(
        groups=rules,
        world_size=vllm_config.parallel_config.world_size,
        # All layers of all blocks lie in one allocation, whose size each of its tensors names.
        block_bytes=kv_cache_config.kv_cache_tensors[0].size // kv_cache_config.num_blocks,
        max_blocks=max(1, vllm_config.model_config.max_model_len // rules.unit_tokens),
        max_running=vllm_config.scheduler_config.max_num_seqs,
        loads=transfer.is_kv_consumer,
        saves=transfer.is_kv_producer,
        spec_kinds=tuple(
            (get_kv_cache_spec_kind(each.kv_cache_spec).value, get_kv_cache_spec_sliding_window(each.kv_cache_spec))
            for each in served.kv_cache_groups
        ),
        # vLLM tells ranks that need not step together that there is but one (EngineCoreProc.run_engine_core).
        lockstep=vllm_config.parallel_config.data_parallel_size > 1,
        overlapping=ahead or stages > 1,
        ahead=ahead and stages == 1,
        fenced_blocks=count == 1 and compat.frees_behind_steps(),
        retention=kv_cache_config.prefix_cache_retention_interval,
        numbers=None if len(rules) == count else tuple(kv_cache_config.prefix_cacheable_group_ids),
        replayed_tokens=compat.replayed_tokens(kv_cache_config),
    )


def rules_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Groups:
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    speculative = vllm_config.speculative_config
    drafts = speculative is not None and bool(speculative.use_eagle_block_drop())
    shards = vllm_config.parallel_config.decode_context_parallel_size
    return groups.of_engine(kv_cache_config, hash_tokens, drafts=drafts, shards=shards)


def drafted_tokens(vllm_config: VllmConfig) -> int:
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens or 0)


def stage_of(vllm_config: VllmConfig) -> tuple[int, int]:
    """Return this process's pp_rank and pcp_rank: vLLM numbers ranks by stage, then by prefill context, then by TP."""
    parallel = vllm_config.parallel_config
    stage, pcp_rank = divmod(parallel.rank // parallel.tensor_parallel_size, parallel.prefill_context_parallel_size)
    return stage % parallel.pipeline_parallel_size, pcp_rank


def publishes_events(vllm_config: VllmConfig) -> bool:
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events
