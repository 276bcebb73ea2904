"""The worker that vLLM loads: it computes nothing and checks everything, through vLLM's own connector classes.

Real vLLM around it: scheduler, engine core, KV cache manager, executors, connector API, the model's own layers and
their paged tensors.  Its steps come in the order of hooks of Model Runner V2 (v1/worker/gpu/model_runner.py) or of V1
(v1/worker/gpu_model_runner.py): `second` and `first`.  BED in the environment has its `Settings` as JSON.

vLLM's CPU platform refuses asynchronous scheduling, Model Runner V2, and prefix caching with MLA; `install` allows all.
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.distributed.parallel_state import get_pp_group, get_tp_group, get_world_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR, get_kv_connector
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache, bind_kv_cache_to_layers, copy_kv_cache_blocks_inplace
from vllm.v1.worker.workspace import init_workspace_manager

from tests.lab.bed import layouts
from tests.lab.bed.device import Device, Plan
from tests.lab.bed.settings import Settings
from tests.lab.bed.timeline import Timeline


def install() -> None:
    """Let a CPU engine schedule asynchronously, cache prefixes and have Model Runner V2, as asked. Once per process."""
    vllm_config: Any = sys.modules[VllmConfig.__module__]
    vllm_config.HAS_TRITON = True  # read to choose a model runner, which here compiles nothing
    platform: Any = CpuPlatform
    original = platform.check_and_update_config.__func__
    if hasattr(original, "around"):
        return

    def check_and_update_config(cls: Any, config: VllmConfig) -> None:
        scheduling, cache = config.scheduler_config, config.cache_config
        wanted = scheduling.async_scheduling, scheduling.enable_chunked_prefill, scheduling.max_num_batched_tokens
        prefixes, block = cache.enable_prefix_caching, cache.block_size
        original(cls, config)
        scheduling.async_scheduling, scheduling.enable_chunked_prefill, scheduling.max_num_batched_tokens = wanted
        cache.enable_prefix_caching = prefixes
        if cache.user_specified_block_size:
            cache.block_size = block

    check_and_update_config.around = original  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_update_config)


install()


class Executor(UniProcExecutor):
    """vLLM's executor of one rank, by a name that the CPU platform does not turn into "mp".

    It is pickled by name with the configuration, so that an engine core's process imports this module before it looks
    at the configuration again.
    """


class _Output(AsyncModelRunnerOutput):
    """The result of a step that ends on the timeline, as that of a GPU's step ends with an event."""

    def __init__(self, output: ModelRunnerOutput, timeline: Timeline | None, ends_ns: int) -> None:
        self._output, self._timeline, self._ends_ns = output, timeline, ends_ns

    def get_output(self) -> ModelRunnerOutput:
        if self._timeline is not None and (left := self._ends_ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
        return self._output


class Runner:
    """In the place of a model runner; `second`: with the hooks of Model Runner V2."""

    is_pooling_model = False

    def __init__(self, config: VllmConfig, *, second: bool) -> None:
        self.settings = Settings.read()
        preset = self.settings.preset
        self.timeline = None if preset is None else Timeline(preset, time.monotonic_ns)
        self.device: Device
        self.model: Any = None
        self.drafter: Any = None
        self._drafter_layers: set[str] = set()
        self._config, self._second = config, second
        self._connector: Any = NO_OP_KV_CONNECTOR
        self._tensors: dict[str, torch.Tensor] = {}
        self._blocks = 0
        self._step: tuple[Any, Plan, int, Any] | None = None
        self._drafts = config.num_speculative_tokens
        self._drafted: DraftTokenIds | None = None
        self._adapters: set[int] = set()
        self._async = config.scheduler_config.async_scheduling

    # --- what a worker asks of its runner at its start ----------------------------------------------------------------

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        del load_dummy_weights
        self.model = get_model(vllm_config=self._config)
        drafts = self._config.speculative_config
        if drafts is not None and drafts.use_eagle():
            before = set(self._config.compilation_config.static_forward_context)
            self.drafter = get_model(vllm_config=self._config, model_config=drafts.draft_model_config)
            self._drafter_layers = set(self._config.compilation_config.static_forward_context) - before

    def get_model(self) -> Any:
        return self.model

    def get_draft_model(self) -> Any:
        return self.drafter

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> Any:
        return layouts.given_specs(self.settings.given) if self.settings.given else get_kv_cache_spec(self._config)

    def update_max_model_len(self, max_model_len: int) -> None:
        del max_model_len

    def initialize_kv_cache(self, kv_cache_config: Any, kv_cache_allocation_context: Any = None) -> None:
        del kv_cache_allocation_context
        layout = self._config.cache_config.get_resolved_kv_cache_layout()
        self._tensors = allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
        context = self._config.compilation_config.static_forward_context
        bind_kv_cache_to_layers(
            {name: cache for name, cache in self._tensors.items() if name in context},
            context,
            kv_cache_groups=kv_cache_config.kv_cache_groups,
        )
        self._blocks = kv_cache_config.num_blocks
        ranks = get_tp_group()
        groups = layouts.groups_of(
            kv_cache_config,
            self._tensors,
            ranks.world_size,
            ranks.rank_in_group,
            self._config.model_config.get_total_num_kv_heads(),
            self._drafter_layers,
        )
        self.device = Device(
            groups,
            self._config.model_config.get_vocab_size(),
            self._blocks,
            rank=self._config.parallel_config.rank,
            every_step=self.settings.every_step,
        )
        if self._second:
            self._connector = get_kv_connector(self._config, self._tensors)
        elif has_kv_transfer_group():
            get_kv_transfer_group().register_kv_caches(self._tensors)
            get_kv_transfer_group().set_host_xfer_buffer_ops(copy_kv_blocks)

    # --- a step -----------------------------------------------------------------------------------------------------

    def execute_model(self, output: Any, intermediate_tensors: Any = None) -> Any:
        del intermediate_tensors
        return self._execute_second(output) if self._second else self._execute_first(output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        del grammar_output
        if self._step is None:
            return None
        (output, plan, ends_ns, connector_output), self._step = self._step, None
        self._agree(plan)
        sampled = self.device.sample(plan)
        if self._drafter_layers:
            with set_forward_context(None, self._config):
                self._run_layers(self.device.drafting(plan), drafter=True)
        if self._drafts:
            self._drafted = self._draft(sampled)
        if self._second:
            connector_output = self._connector.post_forward(output.finished_req_ids)
        elif self._drafts:
            KVConnectorModelRunnerMixin.finalize_kv_connector()
        if not get_pp_group().is_last_rank:
            return ModelRunnerOutput.with_kv_conn_output_only(connector_output)
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: number for number, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=connector_output,
        )
        asynchronous = _Output(result, self.timeline, ends_ns)
        return asynchronous if self._async else asynchronous.get_output()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        drafted, self._drafted = self._drafted, None
        return drafted

    def _execute_second(self, output: Any) -> Any:
        self.device.forget(output.finished_req_ids)
        self.device.forget(output.preempted_req_ids or ())
        self._take_in(output)
        self._blocks_changed(output)
        if not output.total_num_scheduled_tokens:
            return self._connector.no_forward(output)
        names = list(output.num_scheduled_tokens)
        batch = SimpleNamespace(
            req_ids=names,
            idx_mapping=torch.arange(len(names)),
            num_tokens=output.total_num_scheduled_tokens,
        )
        with set_forward_context(None, self._config):
            self._connector.pre_forward(output, batch)
            plan = self._forward(output)
        self._connector.finish_forward()
        self._step = output, plan, self._launch(output, plan), None
        return None

    def _execute_first(self, output: Any) -> Any:
        if has_kv_transfer_group():
            get_kv_transfer_group().handle_preemptions(output.kv_connector_metadata)
        self.device.forget(output.finished_req_ids)
        self._blocks_changed(output)
        self._take_in(output)
        if not output.total_num_scheduled_tokens:
            if not has_kv_transfer_group():
                return EMPTY_MODEL_RUNNER_OUTPUT
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(output, self._config)
        mixin = KVConnectorModelRunnerMixin
        with (
            set_forward_context(None, self._config),
            mixin.maybe_get_kv_connector_output(output, defer_finalize=bool(self._drafts)) as connector_output,
        ):
            plan = self._forward(output)
        self._step = output, plan, self._launch(output, plan), connector_output
        return None

    def _take_in(self, output: Any) -> None:
        """Note the tokens and blocks of the requests that the scheduler sends."""
        for new in output.scheduled_new_reqs:
            if self.timeline is not None:
                self.timeline.admit(new.req_id)
            tokens = new.prompt_token_ids if new.prefill_token_ids is None else new.prefill_token_ids
            adapter = "" if new.lora_request is None else new.lora_request.lora_name
            self.device.admit(new.req_id, tokens, new.block_ids, new.num_computed_tokens, adapter)
        cached = output.scheduled_cached_reqs
        for number, name in enumerate(cached.req_ids):
            request, blocks = self.device.requests[name], cached.new_block_ids[number]
            computed = cached.num_computed_tokens[number]
            if name in cached.resumed_req_ids:
                tokens = cached.all_token_ids.get(name)
                if tokens is None:
                    tokens = request.tokens[: request.prompt + cached.num_output_tokens[number]].tolist()
                self.device.come_back(name, tokens, blocks, computed)
                continue
            if blocks is not None:
                self.device.append(name, blocks)
            assert self._async or computed <= request.computed, f"{name}: {computed} of {request.computed} computed"
            if computed < request.computed:  # the scheduler dropped the result of a step with a failed load
                request.computed = computed
                request.truncate(max(request.prompt, request.prompt + cached.num_output_tokens[number]))

    def _blocks_changed(self, output: Any) -> None:
        if output.new_block_ids_to_zero:
            self.device.zero(output.new_block_ids_to_zero)
        if output.kv_cache_block_copies:
            copy_kv_cache_blocks_inplace(self._tensors.values(), self._blocks, output.kv_cache_block_copies)

    def _forward(self, output: Any) -> Plan:
        """Go through the layers as vLLM's attention layers do (`maybe_transfer_kv_layer`)."""
        plan = self.device.plan(output.num_scheduled_tokens, output.scheduled_spec_decode_tokens)
        self._run_layers(plan, drafter=False)
        return plan

    def _run_layers(self, plan: Plan, *, drafter: bool) -> None:
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        for group in self.device.groups:
            for layer in group.layers:
                if layer.drafter is not drafter:
                    continue
                if connector is not None:
                    connector.wait_for_layer_load(layer.name)
                begun_ns = time.thread_time_ns()
                self.device.run(plan, group, layer)
                self.device.counters["oracle_ns"] += time.thread_time_ns() - begun_ns
                if connector is not None:
                    connector.save_kv_layer(layer.name, self._tensors[layer.name], None)

    def _launch(self, output: Any, plan: Plan) -> int:
        if self.timeline is None:
            return 0
        prefill = sum(max(0, min(each.start + each.count, each.request.prompt) - each.start) for each in plan.work)
        copied = plan.copied_bytes if output.has_sync_kv_loads else 0
        overlap = getattr(output.kv_connector_metadata, "overlap", False)
        return self.timeline.launch(prefill, output.total_num_scheduled_tokens - prefill, copied, overlap=overlap)

    @staticmethod
    def _agree(plan: Plan) -> None:
        """Let a wrong block on one rank make the tokens of all ranks wrong, as sums over ranks would."""
        world = get_world_group()
        if world.world_size > 1:
            bad = torch.tensor([number in plan.bad for number in range(len(plan.work))], dtype=torch.uint8)
            torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX, group=world.cpu_group)
            plan.bad = set(bad.nonzero().flatten().tolist())

    def _draft(self, sampled: dict[str, list[int]]) -> DraftTokenIds:
        names = list(sampled)
        return DraftTokenIds(names, [self.device.draft(name, self._drafts) if sampled[name] else [] for name in names])

    # --- what vLLM calls besides --------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self._tensors = {}

    def add_lora(self, lora_request: Any) -> bool:
        """Take any adapter: its name is in the prefixes of its requests."""
        self._adapters.add(lora_request.lora_int_id)
        return True

    def list_loras(self) -> set[int]:
        return self._adapters

    def reset_mm_cache(self) -> None:
        """Keep no images."""

    def reset_encoder_cache(self) -> None:
        """Keep no images."""


class Worker(CPUWorker):
    """`worker_cls="tests.lab.bed.worker.Worker"`."""

    model_runner: Any

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        os.environ["VLLM_DIST_IDENT"] = self.distributed_init_method.split(":")[-1].rsplit("/", 1)[-1]
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        init_workspace_manager(self.device)
        self.model_runner = Runner(self.vllm_config, second=self.use_v2_model_runner)

    def determine_available_memory(self) -> int:
        return int(self.cache_config.kv_cache_memory_bytes or 1 << 30)

    def compile_or_warm_up_model(self) -> Any:
        from vllm.v1.worker.worker_base import CompilationTimes

        return CompilationTimes(0.0, 0.0)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        given = self.model_runner.settings.given
        return list(layouts.PACKED) if given else super().get_supported_kv_cache_layouts()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Without a stage's tensors for the next one: each stage knows from the oracle what it computes."""
        return self.model_runner.execute_model(scheduler_output)

    def execute_dummy_batch(self) -> None:
        """Take part in nothing: the bed's ranks compute alone."""

    def bed_report(self, reset: bool = False) -> dict[str, Any]:
        """Return the rank's counters and faults."""
        device, timeline = self.model_runner.device, self.model_runner.timeline
        found = device.report()
        if timeline is not None:
            found["timeline"] = timeline.report()
        if reset:
            device.counters.clear()
            device.faults.clear()
            if timeline is not None:
                timeline.restart()
        return found

    def bed_clock(self, on: bool) -> None:
        """Let steps take no time from now on, or that of the preset again."""
        runner = self.model_runner
        runner.timeline = Timeline(runner.settings.preset, time.monotonic_ns) if on else None


def clock(engine: Any, on: bool) -> Any:
    """For `Engine.call`: `Worker.bed_clock` of each rank."""
    return engine.collective_rpc("bed_clock", args=(on,))


def report(engine: Any, reset: bool = False) -> list[dict[str, Any]]:
    """For `Engine.call`: what each rank counted and found."""
    found: list[dict[str, Any]] = engine.collective_rpc("bed_report", args=(reset,))
    return found
