"""The worker that vLLM loads: it computes nothing and checks everything, through vLLM's own connector classes.

Real vLLM around it: scheduler, engine core, KV cache manager, executors, connector API, the model's own layers and
their paged tensors.  BED in the environment has its `Settings` as JSON.

vLLM's CPU platform refuses asynchronous scheduling, Model Runner V2, and prefix caching with MLA; `install` allows all.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.workspace import init_workspace_manager

from tests.lab.bed import layouts, loads
from tests.lab.bed.runner import Runner
from tests.lab.bed.streams import Streams
from tests.lab.bed.timeline import Timeline


def install() -> None:
    """Let a CPU engine schedule asynchronously, cache prefixes, sleep and have Model Runner V2, as asked."""
    readers: list[Any] = [sys.modules[VllmConfig.__module__], gpu_worker]
    for module in readers:
        module.HAS_TRITON = True  # read to choose a model runner, which here compiles nothing
    platform: Any = CpuPlatform
    platform.is_sleep_mode_available = lambda self: True
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
    loads.tell()


install()


class Executor(UniProcExecutor):
    """vLLM's executor of one rank, by a name that the CPU platform does not turn into "mp".

    It is pickled by name with the configuration, so that an engine core's process imports this module before it looks
    at the configuration again.
    """


class Worker(CPUWorker):
    """`worker_cls="tests.lab.bed.worker.Worker"`."""

    model_runner: Any
    streams: Streams | None = None

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        os.environ["VLLM_DIST_IDENT"] = self.distributed_init_method.split(":")[-1].rsplit("/", 1)[-1]
        gpu_worker.init_worker_distributed_environment(
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
        if self.streams is not None:
            self.streams.step_begins()
        return self.model_runner.execute_model(scheduler_output)

    def execute_dummy_batch(self) -> None:
        self.model_runner.step_idle()

    def synchronize_device(self) -> None:
        if self.streams is not None:
            self.streams.synchronize()

    def bed_copies(self, rank: int, seconds: float) -> None:
        """Let copies of this rank, of our connector, end so much later from now on."""
        if rank == self.rank:
            if self.streams is None:
                side = get_kv_transfer_group().worker_side
                side.copies = self.streams = Streams(side.copies)
            self.streams.seconds = seconds

    def sleep(self, level: int = 1) -> None:
        """Give up the KV memory, whatever the level: weights the bed has none."""
        del level
        self.model_runner.sleep()

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            self.model_runner.wake_up()

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
