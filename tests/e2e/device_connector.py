"""Loads KVPrefetchConnector with fake GPUs, on which vLLM's tensors of the CPU stand in for those of a GPU.

The copy kernel runs on the fake driver's streams.  vLLM's operations on a CPU do not wait for a stream, so synchronous
copies are over when they return; asynchronous ones run beside the forward.  All ranks share the first GPU, unless the
environment asks for one each (fakecuda.SPREAD).  The warm-up stands for the capture of CUDA graphs (docs/PITFALLS.md,
37).  Only an engine imports this: it changes the connector's and vLLM's modules.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.connector.copy.paged import PagedCache
from kvprefetch.connector.worker import copies as copying
from kvprefetch.connector.worker.copies import CudaCopies
from kvprefetch.shmring.gpu import cuda
from kvprefetch.shmring.gpu.cuda import Device
from tests.support import fakecuda

__all__ = ["KVPrefetchConnector"]


def _for_cache(paged: PagedCache) -> tuple[CudaCopies, Device]:
    from vllm.distributed import get_tensor_model_parallel_rank

    from tests.support.fakecuda.torch import FakeStreams

    fakecuda.load()
    rank = get_tensor_model_parallel_rank() if os.environ.get(fakecuda.SPREAD) else 0
    device = cuda.open_device(fakecuda.UUIDS[rank])
    start = min(piece.address for piece in paged.pieces) // mmap.PAGESIZE * mmap.PAGESIZE
    end = max(
        each.address + (paged.num_blocks - 1) * each.stride + (each.segments - 1) * each.distance + each.length
        for each in paged.pieces
    )
    device.register(start, -(-(end - start) // mmap.PAGESIZE) * mmap.PAGESIZE)
    streams: Any = FakeStreams(device, at_once=True)
    return CudaCopies(paged, device, streams), device


copying.for_cache = _for_cache


def _captured(warm_up: Any) -> Any:
    """Let vLLM's warm-up, which captures graphs on a GPU, run in a capture, which no thread may spoil."""

    def run(worker: Any) -> Any:
        device = cuda.open_device(fakecuda.UUID)
        stream = device.stream()
        device.call("streamBeginCapture", stream.pointer, fakecuda.GLOBAL_MODE)
        found = warm_up(worker)
        device.call("streamEndCapture", stream.pointer)
        stream.close()
        return found

    return run


CPUWorker.compile_or_warm_up_model = _captured(CPUWorker.compile_or_warm_up_model)


def mapped(engine: Any) -> list[int]:
    """Count the daemon's slabs that each rank has mapped."""
    return _on_ranks(engine, _mapped)


def worker_counters(engine: Any) -> list[dict[str, int]]:
    """Return the counters of each rank's worker side."""
    return _on_ranks(engine, _worker_counters)


def _on_ranks(engine: Any, work: Any) -> list[Any]:
    found: list[Any] = engine.engine_core.engine_core.model_executor.collective_rpc(work)
    return found


def _mapped(_worker: Any) -> int:
    return fakecuda.held_by(os.getpid()) - 1  # without the table of the paged cache


def _worker_counters(_worker: Any) -> dict[str, int]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = get_kv_transfer_group().worker_side  # type: ignore[attr-defined]
    return dict(side.counters)
