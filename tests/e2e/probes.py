"""Functions for Engine.call: they run in the scheduler's process, to look or to do damage on purpose."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any


def _scheduler(engine: Any) -> Any:
    return engine.engine_core.engine_core.scheduler


def _side(engine: Any) -> Any:
    """Our scheduler side, also inside a MultiConnector."""
    connector = _scheduler(engine).connector
    for child in getattr(connector, "_connectors", [connector]):
        if type(child).__name__ == "KVPrefetchConnector":
            return child
    raise LookupError("no KVPrefetchConnector here")


def counters(engine: Any) -> dict[str, int]:
    """Return the counters of our scheduler side."""
    return dict(_side(engine).scheduler_side.counters)


def attached(engine: Any) -> bool:
    """Tell whether the scheduler side is attached to a live daemon."""
    epoch = _side(engine).scheduler_side.link.epoch
    return epoch is not None and bool(epoch.alive(time.monotonic_ns()))


def vllm_version(engine: Any) -> str:
    """Return the version of the engine's vLLM."""
    import vllm

    return str(vllm.__version__)


def load_a_foreign_block(engine: Any, index: int) -> None:
    """From now on, give every load but the first this block of the first load's prompt: the second one, or a state.

    It replaces what an earlier call began.
    """
    side = _side(engine)
    build = getattr(side.build_connector_meta, "whole", side.build_connector_meta)
    foreign: list[int] = []

    def spoiled(scheduler_output: Any) -> Any:
        meta = build(scheduler_output)
        for load in meta.loads:
            if foreign:
                load.slots[index] = foreign[0]
            else:
                foreign.append(load.slots[index])
        return meta

    spoiled.whole = build  # type: ignore[attr-defined]
    side.build_connector_meta = spoiled


def spoil_loads(engine: Any, how: str) -> None:
    """From now on each synchronous load has its first blocks swapped, half of its second one, or is late by a step.

    It replaces what an earlier call of this or of `load_a_foreign_block` began.  The worker is in this process.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side, worker = _side(engine), get_kv_transfer_group().worker_side
    build = getattr(side.build_connector_meta, "whole", side.build_connector_meta)
    late = list[Any]()

    def spoiled(scheduler_output: Any) -> Any:
        meta = build(scheduler_output)
        if how == "late":
            meta.loads, late[:] = [*late], meta.loads
        for load in meta.loads:
            if how == "swapped":
                load.slots[:2] = load.slots[1::-1]
            elif how == "half":
                row = worker.link.mapped(load.epoch).rows[load.slots[1]]
                row[len(row) // 2 :] = 0
        return meta

    spoiled.whole = build  # type: ignore[attr-defined]
    side.build_connector_meta = spoiled


def load_the_first_ranks_block(engine: Any) -> None:
    """From now on the second block of each load is on all ranks the first one's."""
    engine.collective_rpc(_first_ranks_block)


def _first_ranks_block(_worker: Any) -> None:
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.parallel_state import get_tp_group

    side, ranks = get_kv_transfer_group().worker_side, get_tp_group()
    load = side.load

    def spoiled(meta: Any) -> None:
        for each in meta.loads:
            row = torch.from_numpy(side.link.mapped(each.epoch).rows[each.slots[1]])
            torch.distributed.broadcast(row, src=ranks.first_rank, group=ranks.cpu_group)
        load(meta)

    side.load = spoiled


def break_loads(engine: Any, every: int) -> None:
    """From now on, let every `every`-th load name a slot that no staging area has, so that the worker refuses it."""
    side = _side(engine)
    build = side.build_connector_meta
    numbers = itertools.count(1)

    def broken(scheduler_output: Any) -> Any:
        meta = build(scheduler_output)
        for load in meta.loads:
            if next(numbers) % every == 0:
                load.slots[-1] = 1 << 30
        return meta

    side.build_connector_meta = broken


_PREEMPTED: list[str] = []


def count_preemptions(engine: Any) -> None:
    """Count preemptions from now on."""
    scheduler = _scheduler(engine)
    preempt = scheduler._preempt_request

    def counting(request: Any, *args: Any, **kwargs: Any) -> Any:
        _PREEMPTED.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counting


def preemptions(_engine: Any) -> int:
    return len(_PREEMPTED)


def preempt_next(engine: Any, requests: int, after_tokens: int) -> None:
    """Preempt each of the next requests once it has so many tokens, and empty the engine's own prefix cache."""
    scheduler, left = _scheduler(engine), [requests]
    schedule = scheduler.schedule

    def preempting(*args: Any, **options: Any) -> Any:
        running = [each for each in scheduler.running if not each.num_preemptions]
        if left[0] and any(each.num_output_tokens >= after_tokens for each in running):
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
            left[0] -= 1
        return schedule(*args, **options)

    scheduler.schedule = preempting


_WAITING: dict[str, float] = {}
_LONGEST = [0.0]


def watch_waits(engine: Any) -> None:
    """From now on, measure how long requests are held at the head of the queue; start anew at each call."""
    _WAITING.clear()
    _LONGEST[0] = 0.0
    connector = _scheduler(engine).connector
    match = connector.get_num_new_matched_tokens
    if getattr(match, "watched", False):
        return

    def watching(request: Any, num_computed_tokens: int) -> Any:
        answer = match(request, num_computed_tokens)
        if answer[0] is not None:
            _WAITING.pop(request.request_id, None)
            return answer
        now = time.monotonic()
        _LONGEST[0] = max(_LONGEST[0], now - _WAITING.setdefault(request.request_id, now))
        return answer

    watching.watched = True  # type: ignore[attr-defined]
    connector.get_num_new_matched_tokens = watching


def longest_wait_s(_engine: Any) -> float:
    """Return the longest time from a request's first "not yet" to its last one since watch_waits()."""
    return _LONGEST[0]


_STEPS: list[float] = []


def watch_steps(engine: Any) -> None:
    """From now on, measure the engine's steps; start anew at each call."""
    _STEPS.clear()
    core = engine.engine_core.engine_core
    step = core.step_fn
    if getattr(step, "watched", False):
        return

    def watching() -> Any:
        began = time.monotonic()
        try:
            return step()
        finally:
            _STEPS.append(time.monotonic() - began)

    watching.watched = True  # type: ignore[attr-defined]
    core.step_fn = watching


def longest_step_s(_engine: Any) -> float:
    """Return the longest step since watch_steps()."""
    return max(_STEPS, default=0.0)


BEGIN, END = "/kvprefetch-trace-begin", "/kvprefetch-trace-end"


def _mark(path: str) -> None:
    """Make a system call that nothing else makes."""
    os.path.exists(path)


def trace_pushes(engine: Any) -> None:
    """From now on, put every on_new_request between two marks of a trace."""
    connector = _scheduler(engine).connector
    arrived = connector.on_new_request

    def traced(request: Any) -> None:
        _mark(BEGIN)
        arrived(request)
        _mark(END)

    connector.on_new_request = traced


def add_and_poll(engine: Any, prompts: list[list[int]], polls: int, *, plant: bool = False) -> int:
    """Add requests, poll the first one `polls` times between two marks, and abort them; return the pending answers.

    With `plant` each poll also makes a system call of its own, and the trace must show it.
    """
    from vllm import SamplingParams

    scheduler = _scheduler(engine)
    before = set(scheduler.requests)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"poll-{index}", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1))
    names = [name for name in scheduler.requests if name not in before]
    request = scheduler.requests[names[0]]
    ask = scheduler.connector.get_num_new_matched_tokens
    pending = 0
    ask(request, 0)  # the first visit sends an ask, which may ring the bell
    _mark(BEGIN)
    for _ in range(polls):
        pending += ask(request, 0) == (None, False)
        if plant:
            os.getppid()
    _mark(END)
    engine.abort_request([f"poll-{index}" for index in range(len(prompts))])
    return pending


_EVENTS: list[Any] = []
_SOURCES: dict[str, int] = {}


def record_events_and_sources(engine: Any) -> None:
    """From now on, keep the published KV events and the media that hits are attributed to."""
    scheduler = _scheduler(engine)
    publish = scheduler.kv_event_publisher.publish
    sources = getattr(scheduler.connector, "get_external_cache_hit_sources", None)  # from vLLM 0.32 on

    def publishing(batch: Any) -> None:
        _EVENTS.extend(batch.events)
        publish(batch)

    def attributing(request: Any, tokens: int) -> Any:
        found = sources(request, tokens)
        for source, count in found.items():
            _SOURCES[source.value] = _SOURCES.get(source.value, 0) + count
        return found

    scheduler.kv_event_publisher.publish = publishing
    if sources is not None:
        scheduler.connector.get_external_cache_hit_sources = attributing


def stored_events(_engine: Any) -> list[tuple[str, list[int]]]:
    """Return (medium, token ids) of each BlockStored so far, without those of the engine's own cache."""
    events = [event for event in _EVENTS if type(event).__name__ == "BlockStored" and event.medium != "GPU"]
    return [(event.medium, list(event.token_ids)) for event in events]


def sources(_engine: Any) -> dict[str, int]:
    """Return the hit tokens by medium since the last call."""
    found = dict(_SOURCES)
    _SOURCES.clear()
    return found


def stall_a_step(engine: Any, seconds: float) -> None:
    """Let the next step take so much longer."""
    scheduler = _scheduler(engine)
    schedule = scheduler.schedule

    def stalling(*args: Any, **options: Any) -> Any:
        scheduler.schedule = schedule
        time.sleep(seconds)
        return schedule(*args, **options)

    scheduler.schedule = stalling


def leak_a_flag(engine: Any) -> None:
    """Take a flag that no request has."""
    _side(engine).scheduler_side.link.epoch.flags.take(1, 1)


def workers_found(engine: Any) -> list[bool]:
    """Return, for each rank, whether our worker side found its vLLM worker, and the model that this runs."""
    found: list[bool] = engine.engine_core.engine_core.model_executor.collective_rpc(_worker_found)
    return found


def _worker_found(wrapper: Any) -> bool:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvprefetch.connector.identity import built

    connector: Any = get_kv_transfer_group()
    for child in getattr(connector, "_connectors", [connector]):
        if type(child).__name__ == "KVPrefetchConnector":
            return child.worker is wrapper.worker and built.models(child.worker) == [wrapper.worker.get_model()]
    return False


def scales_queries(engine: Any) -> list[bool]:
    """Return, for each rank, whether the layers without RoPE of its Llama 4 scale their queries."""
    found: list[bool] = engine.engine_core.engine_core.model_executor.collective_rpc(_scales_queries)
    return found


def _scales_queries(wrapper: Any) -> bool:
    layers = [each for each in wrapper.worker.get_model().modules() if getattr(each, "nope", False)]
    (found,) = {bool(each.attn_temperature_tuning) for each in layers}
    return found
