"""vLLM's view of us: the class that delegates to the scheduler side or the worker side and keeps their errors inside.

The guard below logs an unexpected exception with its traceback and answers "nothing to load, nothing to save".  Two
calls are not guarded, because hiding an error there could make wrong tokens: construction, which refuses engines that
cannot be served, and update_state_after_alloc, after which the engine counts on the blocks being filled.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group

from ..shmring.wire.attach import Hello, WorkerInfo
from . import register, releases
from .attach import hellos
from .attach.epoch import SchedulerEpoch, WorkerEpoch
from .attach.link import Link
from .attach.starter import Starter
from .copy.paged import PagedCache
from .engine import compat, geometry, groups, refusals
from .identity import built, fingerprint, namespace, updates
from .identity.adapters import Adapters
from .identity.start import start_of
from .request.reported import install as watch_calls
from .request.request_state import RUNNING, SAVING
from .scheduler import early
from .scheduler.prefix_cache import PrefixCache
from .scheduler.scheduler import SchedulerSide
from .words import config as configuration
from .words.guards import FAILED, guarded
from .words.metadata import KVPrefetchMetadata, KVPrefetchNode, KVPrefetchWorkerMeta
from .words.stats import KVPrefetchPromMetrics, KVPrefetchStats
from .worker import copies as copying
from .worker.adapter_reads import AdapterReads
from .worker.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvprefetch")


class KVPrefetchConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM connector of kvprefetch, one side per role. With `mode: off` both are None."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ValueError, in one line, for a configuration or an engine that cannot be served."""
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = configuration.load(transfer.kv_connector_extra_config)
        refusals.check(vllm_config, kv_cache_config)
        self._geometry = geometry.of_engine(vllm_config, kv_cache_config)
        served = groups.served(kv_cache_config)
        if built.is_child():  # what other children do in the same pass is not known
            self._geometry = dataclasses.replace(self._geometry, ahead=False)
        self._start = start_of(vllm_config)
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        self.link: Link[SchedulerEpoch] | Link[WorkerEpoch] | None = None
        self.keys = None
        self.worker: Any | None = None
        self._step = KVPrefetchMetadata()  # of the step that a worker does
        if self._settings.mode == "off":
            return
        if role == KVConnectorRole.SCHEDULER:
            if untried := releases.check():
                log.warning(untried)
            hello = hellos.of_scheduler(vllm_config, self._start, self._geometry, self._settings)
            hellos.warn(transfer, hello)
            options = self._settings.start_daemon
            link = self.link = Link(
                self._settings.socket,
                lambda: hellos.as_of_now(hello, side.live_epochs(), side.resets.current),
                SchedulerEpoch.map,
                daemon_user=self._settings.daemon_user,
                start=None if options is None else Starter(options, self._settings.socket).start,
            )
            publish = geometry.publishes_events(vllm_config)
            adapters = Adapters.of_engine(vllm_config, self._geometry)
            side = SchedulerSide(self._settings, self._geometry, link, publish=publish, adapters=adapters)
            self.scheduler_side = side
            link.start()
            side.reported.watched = watch_calls()
            if side.early.allowed and not early.install():
                log.warning("kvprefetch: %s", compat.NOT_EARLY)
            if options is not None:  # so that the first request is hinted and saved, too
                link.wait()
        else:
            from vllm.distributed import get_tensor_model_parallel_rank

            if self._geometry.world_size > 1:
                refusals.check_ranks(vllm_config)
            self._tp_rank = get_tensor_model_parallel_rank()
            self._as_made = hellos.as_made(vllm_config), copy.deepcopy(served)
            self.worker = built.calling_worker()
            self.keys = namespace.keys_of(
                vllm_config,
                served,
                self._tp_rank,
                self._settings.cache_prefix,
                self.worker,
                upstream_keys=self._settings.key_format == "vllm",
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is only a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No. vLLM with CUDA graphs asks before it starts anything. Raises ValueError for a bad configuration."""
        settings = configuration.load(extra_config)
        if settings.start_daemon is not None and settings.mode != "off":
            Starter(settings.start_daemon, settings.socket)  # it says what this machine lacks
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Yes: vLLM waits for the device, and so for our copies, before its memory goes, and resets us."""
        return True

    def shutdown(self) -> None:
        if self.link is not None:
            self.link.close()

    @guarded(False)
    def reset_cache(self) -> bool | None:
        """Scheduler: True when nothing of the old weights can be served or stored any more. None for a worker."""
        return None if self.scheduler_side is None else self.scheduler_side.reset()

    # --- start ------------------------------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Worker: its node. None as a child: MultiConnector hands the metadata of one child to all its children."""
        if self.keys is None or not has_kv_transfer_group() or get_kv_transfer_group() is not self:
            return None
        return refusals.this_node()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Scheduler: the workers' nodes by (pp_rank, tp_rank). Raises ValueError for ranks on other nodes."""
        ranks = {rank: node for rank, node in metadata.items() if isinstance(node, KVPrefetchNode)}
        try:
            refusals.check_nodes(self._vllm_config, refusals.this_node(), ranks)
        except ValueError:
            self.shutdown()
            raise

    # --- scheduler side ---------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.scheduler_side is not None:
            cache = self.scheduler_side.early.cache = PrefixCache(kv_cache_manager, self._geometry)
            self.scheduler_side.cache = cache

    # vLLM calls the hooks below for every request or step, with cold caches: they guard themselves, as each call of a
    # Python function costs 2 to 3 us there.

    def on_new_request(self, request: Request) -> None:
        if self.scheduler_side is not None:
            try:
                self.scheduler_side.arrived(request)
            except Exception:
                log.exception(FAILED, "on_new_request")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler_side is not None:
            try:
                return self.scheduler_side.match(request, num_computed_tokens)
            except Exception:
                log.exception(FAILED, "get_num_new_matched_tokens")
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVPrefetchMetadata:
        side = self.scheduler_side
        if side is None:
            return KVPrefetchMetadata()
        try:
            running = len(side.phases[SAVING]) + len(side.phases[RUNNING])
            if (
                side.quiet_steps
                and running
                and len(scheduler_output.num_scheduled_tokens) == running
                and scheduler_output.total_num_scheduled_tokens == running
            ):
                side.quiet_steps -= 1
                side.steps.begun += 1
                return side.quiet
        except Exception:
            log.exception(FAILED, "build_connector_meta")
        meta = side.take_loads(scheduler_output)
        try:
            side.plan_step(scheduler_output, meta)
        except Exception:
            log.exception(FAILED, "plan_step")
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        reports, failed = connector_output.kv_connector_worker_meta, connector_output.invalid_block_ids
        if (reports is not None or failed) and self.scheduler_side is not None:
            try:
                self.scheduler_side.outputs(reports, failed_blocks=failed or ())
            except Exception:
                log.exception(FAILED, "update_connector_output")

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing is pinned, so the engine may have the blocks back at once: always (False, None)."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler_side is not None:
            try:
                self.scheduler_side.finished(request, block_ids)
            except Exception:
                log.exception(FAILED, "request_finished")
        return False, None

    @guarded(dict)
    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Memory or disk, as the daemon found it; unspecified where the daemon does not ask the store."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource as kinds  # not in 0.31, which never asks

        disk = self.scheduler_side.disk_tokens(request) if self.scheduler_side is not None else None
        if disk is None:
            return {kinds.EXTERNAL_UNSPECIFIED: num_external_tokens} if num_external_tokens else {}
        disk = min(disk, num_external_tokens)
        sources = {kinds.HOST: num_external_tokens - disk, kinds.DISK: disk}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def take_events(self) -> Iterable[KVCacheEvent]:
        side = self.scheduler_side
        try:
            return () if side is None or side.events is None else side.take_events()
        except Exception:
            log.exception(FAILED, "take_events")
            return ()

    def has_pending_push_work(self) -> bool:
        try:
            return self.scheduler_side is not None and self.scheduler_side.has_pending_work()
        except Exception:
            log.exception(FAILED, "has_pending_push_work")
            return False

    def get_kv_connector_stats(self) -> KVPrefetchStats | None:
        """Counts since the last report. vLLM asks the scheduler side once per step, when the step has ended."""
        side = self.scheduler_side or self.worker_side
        try:
            if isinstance(side, WorkerSide):
                counted, side.counted = side.counted, False
                return side.counters.take() if counted else None
            if side is not None and side.steps.skip:
                side.steps.skip -= 1
                side.steps.ended_ns = time.monotonic_ns()
            elif side is not None and side.step_ended():
                return side.counters.take()
        except Exception:
            log.exception(FAILED, "get_kv_connector_stats")
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVPrefetchStats:
        return KVPrefetchStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KVPrefetchPromMetrics:
        return KVPrefetchPromMetrics(*arguments)

    # --- worker side ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Raises ValueError for a layout that cannot be served."""
        if self.keys is None:
            return
        config, caches = self._as_made
        layers = [layer for group in caches.kv_cache_groups for layer in group.layer_names]
        paged = PagedCache(kv_caches, layers, caches.num_blocks)
        copies, device = copying.for_cache(paged)
        hello = functools.cache(lambda: self._worker_hello(paged, "" if device is None else device.uuid))
        map_epoch = functools.partial(WorkerEpoch.map, device=device)
        user = self._settings.daemon_user
        wait = None if self._settings.start_daemon is None else lambda: None  # for the one that the scheduler starts
        link = self.link = Link(self._settings.socket, hello, map_epoch, keep_ended=True, daemon_user=user, start=wait)
        self.worker_side = WorkerSide(link, paged, self.keys, copies, one_table=self._geometry.one_table)
        self.worker_side.updates = updates.of_worker(self.worker, eplb=config.parallel_config.enable_eplb)
        self.worker_side.rank = hellos.rank_of(config, self._tp_rank)
        if config.lora_config is not None:
            self.worker_side.adapters = AdapterReads.of(self.worker, self.worker_side.rank)
        link.start()

    def _worker_hello(self, paged: PagedCache, device: str) -> Hello:
        """Runs on the link's thread, because it reads the model's files. `device`: UUID of the rank's GPU, or ""."""
        (config, caches), keys, rules = self._as_made, self.keys, self._geometry.groups
        assert keys is not None
        written = groups.written(caches, paged.places, paged.block_bytes, drafts=geometry.drafted_tokens(config))
        if self._settings.key_format == "vllm":
            where = namespace.Namespace(keys.prefixes, {})
        else:
            running = functools.partial(
                fingerprint.of_engine,
                config,
                caches,
                rules=rules,
                replicas=keys.replicas,
                layout=paged.layout,
                written=written,
            )
            where = namespace.fingerprinted(config, keys, running, self._start)
        info = WorkerInfo(
            block_bytes=paged.block_bytes,
            key_prefixes=list(where.prefixes),
            replicas=keys.replicas,
            replica_index=keys.replica_index,
            written=written,
            device=device,
            fingerprint={"unknown": where.unknown} if where.unknown else where.fingerprint,
        )
        hello = hellos.of_worker(config, self._start, self._geometry, self._tp_rank, info)
        namespace.log_sharing(where, first_rank=hello.rank == 0)
        return hello

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """A step begins. With drafts, model runner V1 calls wait_for_save on the last pipeline stage only."""
        if self.has_connector_metadata():
            self.wait_for_save()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, KVPrefetchMetadata)
        self._step = connector_metadata
        try:
            if self.worker_side is not None:
                self.worker_side.step_begins(self._step)
        except Exception:
            log.exception(FAILED, "bind_connector_metadata")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        # Not guarded: the worker side answers for every load itself, whatever happens to it.
        side, step = self.worker_side, self._step
        if side is not None and (step.loads or side.link.ended):
            side.load(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole blocks, ordered by the stream; nothing is layer-wise."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves are whole blocks, done in wait_for_save."""

    def wait_for_save(self) -> None:
        if self.worker_side is not None and self._step.saves:
            self.worker_side.save(self._step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self.worker_side.received() or None) if self.worker_side is not None else None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Failed loads too, where the worker side names their requests."""
        if (side := self.worker_side) is None:
            return KVConnectorTransferResults()
        failed = side.failed_requests() if side.failed else set()
        return KVConnectorTransferResults(finished_recving=side.received(), failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        side = self.worker_side
        return side.failed_blocks() if side is not None and side.failed else set()

    def build_connector_worker_meta(self) -> KVPrefetchWorkerMeta | None:
        return None if self.worker_side is None else self.worker_side.report()


# MultiConnector looks the name up to read our statistics, also for a class given by its module path.
register()
