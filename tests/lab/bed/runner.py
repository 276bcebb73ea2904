"""In the place of vLLM's model runners: takes in what the scheduler sends, and calls the connector's hooks as they do.

Its steps come in the order of hooks of Model Runner V2 (v1/worker/gpu/model_runner.py) or of V1
(v1/worker/gpu_model_runner.py): `second` and `first`.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.distributed.parallel_state import get_dcp_group, get_dp_group, get_pcp_group, get_pp_group, get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR, get_kv_connector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache, bind_kv_cache_to_layers, copy_kv_cache_blocks_inplace

from tests.lab.bed import layouts, memory
from tests.lab.bed.device import Device, Plan
from tests.lab.bed.loads import Loads
from tests.lab.bed.settings import Settings
from tests.lab.bed.timeline import Timeline


class _Output(AsyncModelRunnerOutput):
    """The result of a step that ends on the timeline, as that of a GPU's step ends with an event."""

    def __init__(self, output: ModelRunnerOutput, timeline: Timeline | None, ends_ns: int) -> None:
        self._output, self._timeline, self._ends_ns = output, timeline, ends_ns

    def get_output(self) -> ModelRunnerOutput:
        if self._timeline is not None and (left := self._ends_ns - time.monotonic_ns()) > 0:
            time.sleep(left / 1e9)
        return self._output

    def get_kv_connector_output(self) -> Any:
        return self._output.kv_connector_output


class Runner(LoRAModelRunnerMixin):
    """In the place of a model runner; `second`: with the hooks of Model Runner V2."""

    is_pooling_model = False

    def __init__(self, config: VllmConfig, *, second: bool) -> None:
        self.settings = Settings.read()
        preset = self.settings.preset
        self.timeline = None if preset is None else Timeline(preset, time.monotonic_ns)
        self.device: Device
        self.loads: Loads
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
        self.lora_config = config.lora_config
        self._adapters: dict[str, Any] = {}
        self._async = config.scheduler_config.async_scheduling
        self._given_ns = 0  # when the step under work came

    # --- what a worker asks of its runner at its start ----------------------------------------------------------------

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        del load_dummy_weights
        self.model = get_model(vllm_config=self._config)
        if self.lora_config is not None:
            self.model = self.load_lora_model(self.model, self._config, torch.device("cpu"))
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
        given = self.settings.given
        if not given or given in layouts.BESIDE:
            own = get_kv_cache_spec(self._config)
            return own | layouts.given_specs(given) if given else own
        return layouts.given_specs(given)

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
        ranks, parallel = get_tp_group(), self._config.parallel_config
        sharing = get_dcp_group()
        groups = layouts.groups_of(
            kv_cache_config,
            self._tensors,
            ranks.world_size,
            ranks.rank_in_group,
            self._config.model_config.get_total_num_kv_heads(),
            self._drafter_layers,
            layouts.Shard(sharing.world_size, sharing.rank_in_group, parallel.cp_kv_cache_interleave_size),
        )
        self.device = Device(
            groups,
            self._config.model_config.get_vocab_size(),
            self._blocks,
            rank=parallel.rank,
            every_step=self.settings.every_step,
        )
        self.loads = Loads(time.monotonic_ns, self.device.bytes_of)
        if self._second:
            self._connector = get_kv_connector(self._config, self._tensors)
        elif has_kv_transfer_group():
            get_kv_transfer_group().register_kv_caches(self._tensors)
            get_kv_transfer_group().set_host_xfer_buffer_ops(copy_kv_blocks)

    # --- a step -----------------------------------------------------------------------------------------------------

    def execute_model(self, output: Any, intermediate_tensors: Any = None) -> Any:
        del intermediate_tensors
        self._given_ns = time.monotonic_ns()
        found = self._execute_second(output) if self._second else self._execute_first(output)
        # Behind the synchronous ones of the step, as the copies that no forward waits for.
        self.loads.begin(output, self.timeline, self._given_ns)
        if found is None:
            return None
        return ModelRunnerOutput.with_kv_conn_output_only(self.loads.arrived(found.kv_connector_output))

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
        connector_output = self.loads.arrived(connector_output)
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
        self._read_adapters(output)
        if not output.total_num_scheduled_tokens:
            return self._connector.no_forward(output)
        names = list(output.num_scheduled_tokens)
        batch = SimpleNamespace(
            req_ids=names,
            idx_mapping=torch.arange(len(names)),
            num_tokens=output.total_num_scheduled_tokens,
        )
        with set_forward_context(None, self._config):
            self._connector.pre_forward(output, input_batch=batch)
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
        self._read_adapters(output)
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
            adapter = ""
            if new.lora_request is not None:
                self._adapters[new.req_id], adapter = new.lora_request, new.lora_request.lora_name
            replay_start = getattr(new, "replay_start", 0)  # not in vLLM 0.31
            self.device.admit(new.req_id, tokens, new.block_ids, new.num_computed_tokens, adapter, replay_start)
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

    def _read_adapters(self, output: Any) -> None:
        """Let vLLM read and keep the adapters of the step's requests; the device knows them by their names."""
        for name in output.finished_req_ids:
            self._adapters.pop(name, None)
        if self.lora_config is None or not output.num_scheduled_tokens:
            return
        active = [(self._adapters.get(name), count) for name, count in output.num_scheduled_tokens.items()]
        numbers = [(0 if each is None else each.lora_int_id, count) for each, count in active]
        of_tokens = tuple(number for number, count in numbers for _ in range(count))
        self._set_active_loras(tuple(number for number, _ in numbers), of_tokens, {each for each, _ in active if each})

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
            return self._together(0)
        prefill = sum(max(0, min(each.start + each.count, each.request.prompt) - each.start) for each in plan.work)
        sizes = plan.copied.items() if output.has_sync_kv_loads else ()
        copied = sum(size for name, size in sizes if name not in self.loads.copied)
        self.loads.copied.difference_update(plan.copied)
        decode = output.total_num_scheduled_tokens - prefill
        beside_ns = self._given_ns if getattr(output.kv_connector_metadata, "overlap", False) else 0
        return self._together(self.timeline.launch(prefill, decode, copied, beside_ns=beside_ns))

    def _together(self, ends_ns: int) -> int:
        """Return when the step ends: data-parallel ranks wait for each other, to launch it and to end it."""
        ranks = get_dp_group()
        if ranks.world_size > 1:
            last = torch.tensor([ends_ns], dtype=torch.int64)
            torch.distributed.all_reduce(last, op=torch.distributed.ReduceOp.MAX, group=ranks.cpu_group)
            ends_ns = int(last[0])
            if self.timeline is not None:
                self.timeline.busy_until(ends_ns)
        return ends_ns

    @staticmethod
    def _agree(plan: Plan) -> None:
        """Let a wrong block on one rank make the tokens of all ranks wrong, as sums over ranks would."""
        for ranks in (get_tp_group(), get_pcp_group(), get_pp_group()):
            if ranks.world_size > 1:
                bad = torch.tensor([number in plan.bad for number in range(len(plan.work))], dtype=torch.uint8)
                torch.distributed.all_reduce(bad, op=torch.distributed.ReduceOp.MAX, group=ranks.cpu_group)
                plan.bad = set(bad.nonzero().flatten().tolist())

    def _draft(self, sampled: dict[str, list[int]]) -> DraftTokenIds:
        names = list(sampled)
        return DraftTokenIds(names, [self.device.draft(name, self._drafts) if sampled[name] else [] for name in names])

    # --- what vLLM calls besides --------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self._tensors = {}

    def sleep(self) -> None:
        memory.take_away(self._tensors.values())
        self.device.lose_all()

    def wake_up(self) -> None:
        memory.bring_back(self._tensors.values())

    def step_idle(self) -> None:
        """Take part in a step of the data-parallel ranks, without a request."""
        self.device.counters["idle_steps"] += 1
        self._together(0 if self.timeline is None else self.timeline.launch(0, 0))

    def reset_mm_cache(self) -> None:
        """Keep no images."""

    def reset_encoder_cache(self) -> None:
        """Keep no images."""
