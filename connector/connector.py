"""The class vLLM sees: delegates to the scheduler side or the worker side, by role, and keeps their errors inside.

The guard below turns an unexpected exception into "nothing to load, nothing to save", logged with its traceback.  Two
calls are not guarded, because swallowing there could make wrong tokens: construction (which refuses what it cannot
serve) and update_state_after_alloc, after which the engine counts on the blocks being filled.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from . import config as configuration
from . import copies as copying
from . import fingerprint, namespace, register, support
from .link import Link
from .metadata import KVPrefetchMetadata, KVPrefetchNode, KVPrefetchWorkerMeta
from .paged import PagedCache
from .scheduler import SchedulerSide
from .session import SchedulerSession, WorkerSession
from .stats import KVPrefetchPromMetrics, KVPrefetchStats
from .worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from ..shmring.wire.attach import Hello

log = logging.getLogger("vllm.kvprefetch")

_F = TypeVar("_F", bound=Callable[..., Any])


def _guarded(default: Any) -> Callable[[_F], _F]:
    """Return `default` (called, when it is callable) where the method raises."""

    def wrap(method: _F) -> _F:
        @functools.wraps(method)
        def call(self: KVPrefetchConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception:
                log.exception("kvprefetch: %s failed; the engine goes on without it", method.__name__)
                return default() if callable(default) else default

        return call  # type: ignore[return-value]

    return wrap


class KVPrefetchConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM connector of kvprefetch. `mode: off` does nothing at all."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ValueError, in one line, for a configuration or an engine that cannot be served."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = configuration.load(transfer.kv_connector_extra_config)
        support.check(vllm.__version__, vllm_config, kv_cache_config)
        self._geometry = support.geometry(vllm_config, kv_cache_config)
        if self._settings.mode == "shadow":  # the daemon is to know, and then keeps no slots for saves
            self._geometry = dataclasses.replace(self._geometry, saves=False)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._link: Link[SchedulerSession] | Link[WorkerSession] | None = None
        self._keys = None
        if self._settings.mode == "off":
            return
        if role == KVConnectorRole.SCHEDULER:
            if transfer.kv_load_failure_policy != "recompute":
                log.warning(
                    'kvprefetch: set kv_load_failure_policy to "recompute"; with %r a failed load fails its request',
                    transfer.kv_load_failure_policy,
                )
            hello = support.scheduler_hello(
                vllm_config, self._geometry, reset_timeout_ms=self._settings.reset_timeout_ms
            )
            if hello.scheduler is not None and not hello.scheduler.hash_probe:
                log.warning(
                    "kvprefetch: prefix_caching_hash_algo=%s begins with a random number in each process, so no other "
                    "engine and no later start finds what this one saves: set PYTHONHASHSEED",
                    hello.scheduler.hash_algorithm,
                )
            link = Link(
                self._settings.socket,
                lambda: support.with_epochs(hello, side.live_epochs()),
                SchedulerSession.map,
                daemon_user=self._settings.daemon_user,
            )
            side = self._scheduler = SchedulerSide(
                self._settings, self._geometry, link, publish=support.publishes_events(vllm_config)
            )
            self._link = link
            link.start()
        else:
            from vllm.distributed import get_tensor_model_parallel_rank

            self._tp_rank = get_tensor_model_parallel_rank()
            self._keys = support.keys_of(vllm_config, kv_cache_config, self._tp_rank, self._settings.cache_prefix)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is only a later miss."""
        return False

    def shutdown(self) -> None:
        if self._link is not None:
            self._link.close()

    def reset_cache(self) -> bool | None:
        """Scheduler: True when nothing of the old weights can be served or stored any more. None for a worker."""
        if self._scheduler is None:
            return None
        return self._reset()

    @_guarded(False)
    def _reset(self) -> bool:
        assert self._scheduler is not None
        return self._scheduler.reset()

    # --- start ------------------------------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Worker: its node. None as a child: MultiConnector hands one child's metadata to all of its children."""
        if self._keys is None or not has_kv_transfer_group() or get_kv_transfer_group() is not self:
            return None
        return KVPrefetchNode(*support.this_node())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Scheduler: what the workers said, keyed (pp_rank, tp_rank). Raises ValueError for ranks on other nodes."""
        ranks = {rank: node for rank, node in metadata.items() if isinstance(node, KVPrefetchNode)}
        try:
            support.check_nodes(self._vllm_config, KVPrefetchNode(*support.this_node()), ranks)
        except ValueError:
            self.shutdown()
            raise

    # --- scheduler side ---------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            pool = kv_cache_manager.block_pool
            self._scheduler.local_tokens = lambda request: kv_cache_manager.get_computed_blocks(request)[1]
            self._scheduler.local_cached_blocks = lambda: len(pool.cached_block_hash_to_block)
            group = self._geometry.group
            self._scheduler.still_cached = lambda block_id, digest: (
                pool.blocks[block_id].block_hash == make_block_hash_with_group_id(BlockHash(digest), group)
            )

    @_guarded(None)
    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    @_guarded((0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVPrefetchMetadata:
        if self._scheduler is None:
            return KVPrefetchMetadata()
        meta = self._scheduler.take_loads()
        self._plan(scheduler_output, meta)
        return meta

    @_guarded(None)
    def _plan(self, scheduler_output: SchedulerOutput, meta: KVPrefetchMetadata) -> None:
        assert self._scheduler is not None
        self._scheduler.plan_step(scheduler_output, meta)

    @_guarded(None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._scheduler.outputs(
                connector_output.kv_connector_worker_meta, failed_blocks=bool(connector_output.invalid_block_ids)
            )

    @_guarded((False, None))
    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing is pinned, so the engine may have the blocks back at once: always (False, None)."""
        if self._scheduler is not None:
            self._scheduler.finished(request, block_ids)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[self._geometry.group])

    @_guarded(dict)
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Memory or disk, as the daemon found it; unspecified where it does not ask the store."""
        disk = self._scheduler.disk_tokens(request) if self._scheduler is not None else None
        if disk is None:
            return {CacheHitSource.EXTERNAL_UNSPECIFIED: num_external_tokens} if num_external_tokens else {}
        disk = min(disk, num_external_tokens)
        sources = {CacheHitSource.HOST: num_external_tokens - disk, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in sources.items() if tokens}

    @_guarded(tuple)
    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self._scheduler is None else self._scheduler.take_events()

    @_guarded(False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_pending_work()

    # --- statistics, both sides -------------------------------------------------------------------------------------

    @_guarded(None)
    def get_kv_connector_stats(self) -> KVPrefetchStats | None:
        """What was counted since the last call. The scheduler side is asked once per step, when that has ended."""
        if self._scheduler is not None:
            self._scheduler.step_ended()
        side = self._scheduler or self._worker
        return None if side is None else side.tally.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVPrefetchStats:
        return KVPrefetchStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: dict[Any, Any], labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVPrefetchPromMetrics:  # fmt: skip
        return KVPrefetchPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- worker side ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Raises ValueError for a layout that cannot be served."""
        if self._keys is None:
            return
        config, caches, group = self._vllm_config, self._kv_cache_config, self._geometry.group
        paged = PagedCache(kv_caches, caches.kv_cache_groups[group].layer_names, caches.num_blocks)
        copies, device = copying.for_cache(paged)
        running = functools.partial(
            fingerprint.of_engine, config, caches, group=group, put_factor=self._keys.put_factor, layout=paged.layout
        )
        hello = functools.partial(self._worker_hello, paged.block_bytes, "" if device is None else device.uuid, running)
        map_session = functools.partial(WorkerSession.map, device=device)
        link = Link(
            self._settings.socket,
            functools.cache(hello),
            map_session,
            keep_ended=True,
            daemon_user=self._settings.daemon_user,
        )
        self._worker = WorkerSide(link, paged, self._keys, copies)
        self._link = link
        link.start()

    def _worker_hello(self, block_bytes: int, device: str, running: Callable[[], dict[str, str]]) -> Hello:
        """On the link's thread, for it reads the model's files."""
        config, keys = self._vllm_config, self._keys
        assert keys is not None
        if self._settings.key_format == "vllm":
            where = namespace.vllms_own(keys)
        else:
            where = namespace.fingerprinted(config, keys, running, support.incarnation(config))
        hello = support.worker_hello(
            config,
            self._geometry,
            tp_rank=self._tp_rank,
            block_bytes=block_bytes,
            keys=keys,
            device=device,
            where=where,
        )
        namespace.say(where, first_rank=hello.rank == 0)
        return hello

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step begins. With drafts, model runner V1 says wait_for_save on the last pipeline stage only."""
        if self.has_connector_metadata():
            self.wait_for_save()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step_begins()

    @_guarded(None)
    def _step_begins(self) -> None:
        if self._worker is not None:
            self._worker.step_begins(self._metadata())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        # Not guarded: the worker side answers for every load itself, whatever happens to it.
        if self._worker is not None:
            self._worker.load(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole blocks, ordered by the stream; nothing is layer-wise."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves are whole blocks, done in wait_for_save."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        return None, self._worker.received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> KVPrefetchWorkerMeta | None:
        return None if self._worker is None else self._worker.report()

    def _metadata(self) -> KVPrefetchMetadata:
        meta = self._get_connector_metadata()
        assert isinstance(meta, KVPrefetchMetadata)
        return meta


# MultiConnector looks up the name when it reads our statistics, also when the class was given by its module path.
register()
