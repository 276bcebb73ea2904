"""vLLM's real scheduler, aggregator and worker-side calling order around our real connector; the test plays the daemon.

The daemon is tests/connector/fakes.py on real shared memory, so that a test decides what is staged, and when.  Random
schedules against a real daemon are in tests/scheduler.
"""

from __future__ import annotations

import functools
import pickle
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import vllm.distributed
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowMLASpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from kvprefetch.connector import connector as module
from kvprefetch.connector.attach.epoch import WorkerEpoch
from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.connector.engine import refusals
from kvprefetch.connector.scheduler.scheduler import SchedulerSide
from kvprefetch.connector.words.metadata import KVPrefetchMetadata
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.shmring.layout import Layout
from kvprefetch.shmring.segment import Segment
from kvprefetch.shmring.wire.attach import Attached
from tests.lab import connectors
from tests.lab.checkpoint import TINY, make_checkpoint
from tests.scheduler.model import LAYERS
from tests.scheduler.shape import base_config, cache_config, sized
from tests.support import scheduler_checks
from tests.support.clock import Clock

from .fakes import BLOCK, BLOCK_BYTES, FakeDaemon, FakeLink
from .worker_link import FakeWorkerLink

MAX_MODEL_LEN = 512
GROUPS = Groups((Group(Kind.FULL, BLOCK),), BLOCK)
STOP_TOKEN = 2


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """Another child of MultiConnector: answers `tokens` for every request that has as many left, and loads nothing."""

    tokens: int | None = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...
    def build_connector_meta(self, scheduler_output: Any) -> KVPrefetchMetadata:
        return KVPrefetchMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


@dataclass
class PeerMetadata(KVConnectorMetadata):
    """The requests whose KV is to come, with their blocks."""

    wanted: dict[str, list[int]]


class PeerConnector(OtherConnector):
    """A child that brings what a prefill engine computed, as NIXL's: asked once, a step later all came or nothing."""

    fails = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.wanted: dict[str, list[int]] = {}
        self.due: dict[str, list[int]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        asked = (request.kv_transfer_params or {}).get("do_remote_prefill")
        return (request.num_prompt_tokens - num_computed_tokens, True) if asked else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.wanted[request.request_id] = blocks.get_block_ids()[0]
            request.kv_transfer_params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        wanted, self.wanted = self.wanted, {}
        return PeerMetadata(wanted)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.due, came = self._get_connector_metadata().wanted, self.due
        self.lost = {block for blocks in came.values() for block in blocks} if self.fails else set()
        return None, set(came) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.lost


@dataclass(frozen=True)
class Options:
    """The set-up of a RealEngine. `in_flight` steps are scheduled before the oldest one's output is processed.

    Those are of asynchronous scheduling, or else of pipeline stages.
    """

    ranks: int = 1
    in_flight: int = 1
    asynchronous: bool = True
    blocks: int = 64
    seqs: int = 4
    budget: int = 256
    multi: bool = False
    beside: str = "OtherConnector"
    first: bool = False  # of the two children: ours
    second_runner: bool = False
    role: str = "kv_both"
    policy: str = "recompute"
    replayed: int = 0  # tokens of a window outside the prefix cache, in a group before the other one
    credits: Sequence[int] = ()


class RealEngine:
    """One engine core without a model. `options`: fields of Options, and the connector's own settings."""

    link_class = FakeLink

    def __init__(self, folder: Path, **options: Any) -> None:
        mine = {name: options.pop(name) for name in list(options) if name in Options.__dataclass_fields__}
        self.options = given = Options(**mine)
        self.clock = Clock()
        self.daemon = FakeDaemon(self.clock)
        self.daemon.credits.grant(list(given.credits))
        self.link = self.link_class(self.daemon.epoch())
        self.in_flight = given.in_flight
        self.flight: deque[tuple[Any, list[Any], dict[str, list[int]]]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.metas: list[KVPrefetchMetadata] = []
        self.memory: list[torch.Tensor] = []  # of each rank: layer, block, token, head, bytes
        config = self._config(folder, options)
        cache = cache_config(given.blocks, GROUPS, page_bytes=BLOCK_BYTES // LAYERS)
        if given.replayed:
            heads: dict[str, Any] = {"block_size": BLOCK // 2, "num_kv_heads": 1, "head_size": 8, "dtype": torch.uint8}
            window = SlidingWindowMLASpec(**heads, sliding_window=given.replayed, bounded_replay=True)
            cache.kv_cache_groups.insert(0, KVCacheGroupSpec(["window"], window))
        self.workers = [self._worker(config, cache, rank) for rank in range(given.ranks)]
        side = functools.partial(SchedulerSide, clock=self.clock)
        with (
            mock.patch.object(module, "Link", return_value=self.link),
            mock.patch.object(module, "SchedulerSide", side),
        ):
            self.scheduler = (Scheduler if self.in_flight == 1 else AsyncScheduler)(
                config, cache, StructuredOutputManager(config), block_size=BLOCK, log_stats=True
            )
        self.scheduler.use_v2_model_runner = given.second_runner
        self.connector = self._ours(self.scheduler.connector)
        assert self.connector.scheduler_side is not None
        self.side = self.connector.scheduler_side
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._aggregator = KVOutputAggregator(given.ranks)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    # --- what a client does -------------------------------------------------------------------------------------------

    def add(self, name: str, prompt: Sequence[int] | int | None, out: int = 3, **options: Any) -> Request:
        """A new request, as in `request`."""
        request = self.request(name, prompt, out, **options)
        self.tokens.setdefault(name, [])
        self.scheduler.add_request(request)
        return request

    def request(self, name: str, prompt: Sequence[int] | int | None, out: int = 3, **options: Any) -> Request:
        """vLLM's own; a number is a prompt of so many tokens of its own, and None one of `prompt_embeds`."""
        tokens = (
            [(zlib.crc32(name.encode()) + i) % 1000 + 10 for i in range(prompt)]
            if isinstance(prompt, int)
            else prompt and list(prompt)
        )
        params = SamplingParams(max_tokens=out, ignore_eos=True, **options.pop("sampling", {}))
        params.update_from_generation_config({}, STOP_TOKEN)
        return Request(name, tokens, params, None, block_hasher=self._hasher, **options)

    def stage(self, name: str, blocks: int | None = None) -> None:
        """Everything of the request's hint, or its first blocks, is there."""
        self.daemon.stage(name, self.daemon.hint(name).blocks if blocks is None else blocks)

    def hinted(self, name: str, prompt: int, staged: int | None = None, **options: Any) -> Request:
        """A new request whose blocks come once the scheduler has asked for them."""
        request = self.add(name, prompt, **options)
        self.step()
        self.stage(name, staged)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    # --- steps --------------------------------------------------------------------------------------------------------

    def schedule(self) -> Any:
        """Schedule a step and run it on every rank; its output is processed later."""
        self.clock.advance_ms(1)
        self.daemon.beat()
        output = self.scheduler.schedule()
        scheduler_checks.check(self.side)
        meta = output.kv_connector_metadata
        self.metas.append(getattr(meta, "metadata", [meta])[0 if self.options.first else -1])
        sampled = {name: [3] if self._samples(name) else [] for name in output.num_scheduled_tokens}
        sent = pickle.dumps(output)
        reports = [self.run_rank(worker, pickle.loads(sent)) for worker in self.workers]
        self.flight.append((output, reports, sampled))
        return output

    def process(self) -> Any:
        """Give the oldest step's output to the scheduler; return KVOutputAggregator's sum of the ranks' reports."""
        output, reports, sampled = self.flight.popleft()
        names = list(output.num_scheduled_tokens)
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                names,
                {name: i for i, name in enumerate(names)},
                [list(sampled[name]) for name in names],
                kv_connector_output=report,
            )
            for report in reports
        ]
        combined = self._aggregator.aggregate(outputs)
        assert combined is not None
        for result in self.scheduler.update_from_output(output, combined).values():
            for one in result.outputs:
                self.tokens[one.request_id] += one.new_token_ids
        return combined.kv_connector_output

    def step(self) -> Any:
        """One turn of the engine's loop."""
        output = self.schedule()
        while len(self.flight) >= self.in_flight:
            self.process()
        return output

    def run(self, limit: int = 200) -> None:
        """Step until nothing is left to do; AssertionError after `limit` steps."""
        for _ in range(limit):
            self.daemon.drain()
            self.daemon.free()
            if not self.scheduler.has_requests():
                if not self.flight:
                    return
                self.process()
            else:
                self.step()
        raise AssertionError(f"the engine does not come to rest: requests={list(self.scheduler.requests)}")

    def finish(self) -> None:
        """Run to the end; nothing is held then."""
        self.run()
        assert self.left() == []

    def run_rank(self, worker: Any, output: Any) -> Any:
        """One step on one rank, in the order of vLLM's model runner."""
        with (
            mock.patch.multiple(mixin, get_kv_transfer_group=lambda: worker, get_forward_context=lambda: None),
            mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(output) as report,
        ):
            self.forward(worker, output)
        return report

    def forward(self, worker: Any, output: Any) -> None:
        """Where a model would compute; for tests that want to look."""

    # --- what must hold at rest ---------------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """Everything that is still held although nothing goes on."""
        found = []
        self.daemon.drain()
        if flags := self.daemon.unreturned():
            found.append(f"flags not returned: {flags}")
        found += scheduler_checks.held(self.side)
        if self.scheduler.requests:
            found.append(f"requests in the scheduler: {list(self.scheduler.requests)}")
        if (free := self.pool.get_num_free_blocks()) != self.pool.num_gpu_blocks - 1:
            found.append(f"blocks pinned: {self.pool.num_gpu_blocks - 1 - free}")
        return found

    def orders(self, kind: str = "loads") -> list[Any]:
        """All load or save orders so far; workers take them from their own copies of the metadata."""
        return [order for meta in self.metas for order in getattr(meta, kind)]

    def table(self, name: str) -> list[int]:
        """The request's block ids."""
        ids: list[int] = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
        return list(ids)

    # --- construction -------------------------------------------------------------------------------------------------

    def _config(self, folder: Path, settings: dict[str, Any]) -> Any:
        given = self.options
        base = base_config(make_checkpoint(folder, TINY), MAX_MODEL_LEN)
        config = sized(base, BLOCK, given.blocks, given.ranks, given.seqs, given.budget)
        config.kv_events_config = None
        config.scheduler_config.async_scheduling = given.in_flight > 1 and given.asynchronous
        # A clock that stands still must neither be spun on nor measured with.
        mine = connectors.ours(Path("/nowhere"), role=given.role, spin_us=0, idle_wait_us=0, **settings)
        if given.multi:
            other = {"kv_connector": given.beside, "kv_connector_module_path": __name__, "kv_role": "kv_both"}
            mine = connectors.multi(*((mine, other) if given.first else (other, mine)), role=given.role)
        config.kv_transfer_config = KVTransferConfig(**{**mine, "kv_load_failure_policy": given.policy})
        return config

    def _worker(self, config: Any, cache: KVCacheConfig, rank: int) -> Any:
        link = FakeWorkerLink(self.epoch_of(self.daemon.layout))
        blocks = cache.num_blocks
        memory = torch.zeros(LAYERS, blocks, BLOCK, 1, BLOCK_BYTES // LAYERS // BLOCK, dtype=torch.uint8)
        self.memory.append(memory)
        tensors = {f"layer0.{i}": memory[i].permute(0, 2, 1, 3) for i in range(LAYERS)}
        with (
            mock.patch.object(module, "Link", return_value=link),
            mock.patch.object(vllm.distributed, "get_tensor_model_parallel_rank", return_value=rank),
            mock.patch.object(refusals, "check_ranks"),  # no process groups here
        ):
            worker = KVConnectorFactory.get_connector_class(config.kv_transfer_config)(
                config, KVConnectorRole.WORKER, cache
            )
            worker.register_kv_caches(tensors)
        return worker

    @staticmethod
    def epoch_of(layout: Layout) -> WorkerEpoch:
        """A rank's slots of this epoch."""
        slots = layout.slot_count
        segment = Segment.create(slots * BLOCK_BYTES)
        attached = Attached(
            epoch=layout.epoch, segment_bytes=segment.size_bytes, slot_count=slots, slot_bytes=BLOCK_BYTES
        )
        return WorkerEpoch(attached, segment)

    @staticmethod
    def _ours(connector: Any) -> KVPrefetchConnector:
        children: Iterator[Any] = iter(getattr(connector, "_connectors", [connector]))
        return next(child for child in children if isinstance(child, KVPrefetchConnector))

    def _samples(self, name: str) -> bool:
        """Whether the step just scheduled reaches the request's last token."""
        request = self.scheduler.requests[name]
        done: bool = request.num_computed_tokens >= request.num_tokens + max(0, request.num_output_placeholders - 1)
        return done
