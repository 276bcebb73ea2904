"""The process of :class:`tests.lab.engine.Engine`: builds vLLM's engine and obeys commands, one JSON line each."""

from __future__ import annotations

import gc
import heapq
import importlib
import json
import os
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

from tests.lab.process import descendants, die_with_parent

# What a served engine sleeps after a step that executed nothing (vllm/v1/engine/core.py, _process_engine_step).
IDLE_STEP_S = 0.001


@dataclass(slots=True)
class _Request:
    index: int
    request_id: str
    internal_id: str
    added_s: float
    added_step: int
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: str | None = None

    def result(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "request_id": self.request_id,
            "tokens": self.tokens,
            "cached_tokens": self.cached_tokens,
            "arrival_s": self.added_s,
            "first_token_s": self.first_token_s,
            "finished_s": self.finished_s,
            "finish_reason": self.finish_reason,
        }


class Child:
    """One engine and the pipe to whoever drives it."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self._engine: Any = None
        self._passes = 0
        self._executed = True

    def send(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        operation = message["op"]
        if operation == "start":
            return self._start(message["engine_args"], message["prepare"])
        if operation == "pass":
            return self._pass(message)
        if operation == "reset":
            return {"value": self._reset(message["reset_connector"])}
        if operation == "call":
            return {"value": named(message["function"])(self._engine, *message["args"], **message["kwargs"])}
        raise ValueError(f"unknown operation {operation!r}")

    def stop(self) -> None:
        if self._engine is not None:
            gc.freeze()
            gc.unfreeze = lambda: None  # vLLM looks for garbage again and again, which takes a second at the end
            self._engine.engine_core.shutdown()

    def _start(self, engine_args: dict[str, Any], prepare: str) -> dict[str, Any]:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        for each in prepare.split():
            named(each)()
        if engine_args["kv_transfer_config"] is not None:
            if engine_args["kv_transfer_config"]["kv_connector"] == "LMCacheMPConnector":
                let_numba_be_imported_first()
            engine_args["kv_transfer_config"] = KVTransferConfig(**engine_args["kv_transfer_config"])
        self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_args))
        core = self._engine.engine_core.engine_core
        step = core.step_fn

        def step_fn() -> Any:
            outputs, executed = step()
            self._executed = executed
            return outputs, executed

        core.step_fn = step_fn
        return {"workers": self._workers()}

    def _workers(self) -> list[int]:
        executor = self._engine.engine_core.engine_core.model_executor
        return [worker.proc.pid for worker in getattr(executor, "workers", [])]

    def _step(self) -> list[Any]:
        self._executed = True
        outputs: list[Any] = self._engine.step()
        if not self._executed:
            time.sleep(IDLE_STEP_S)
        return outputs

    def _reset(self, reset_connector: bool, timeout_s: float = 10.0) -> bool:
        # Blocks pinned by saves still under way make it fail: steps let a connector notice that they are done.
        deadline = time.monotonic() + timeout_s
        while not self._engine.reset_prefix_cache(reset_connector=reset_connector):
            if time.monotonic() > deadline:
                return False
            self._step()
        return True

    def _pass(self, message: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        engine = self._engine
        prompts: list[list[int]] = message["prompts"]
        arrivals: list[float] = message["arrivals_s"] or [0.0] * len(prompts)
        order = deque(sorted(range(len(prompts)), key=arrivals.__getitem__))
        users = [0.0] * (message["concurrency"] or len(prompts))  # when each may send its next request
        pauses: list[float] = message["pauses_s"] or [0.0] * len(prompts)
        aborts = {each["index"]: each["after_steps"] for each in message["aborts"]}
        settings = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **message["sampling"]}
        max_tokens: list[int] = message["max_tokens"]
        self._passes += 1
        requests: dict[str, _Request] = {}
        outstanding: set[str] = set()
        steps = 0
        begun = time.monotonic()
        deadline = begun + message["timeout_s"]

        def now() -> float:
            return time.monotonic() - begun

        while order or outstanding:
            while order and users and max(users[0], arrivals[order[0]]) <= now():
                heapq.heappop(users)
                index = order.popleft()
                request_id = f"pass{self._passes}-{index}"
                options = dict(message["request_options"])
                if adapter := options.pop("lora", None):  # name, id, path, and whether it is read anew
                    options["lora_request"] = LoRARequest(*adapter[:3], load_inplace=any(adapter[3:]))
                if message["priorities"] is not None:
                    options["priority"] = message["priorities"][index]
                if message["sessions"] is not None:
                    options["session_id"] = message["sessions"][index]
                added = now()
                internal = engine.add_request(
                    request_id,
                    {"prompt_token_ids": prompts[index]},
                    SamplingParams(**{"max_tokens": max_tokens[index], **settings}),
                    **options,
                )
                requests[request_id] = _Request(index, request_id, internal, added, steps)
                outstanding.add(request_id)
            if not outstanding:
                time.sleep(min(IDLE_STEP_S, max(0.0, users[0] - now(), arrivals[order[0]] - now())))
                continue
            outputs = self._step()
            steps += 1
            seen = now()
            for output in outputs:
                request = requests[output.request_id]
                request.tokens = list(output.outputs[0].token_ids)
                request.cached_tokens = output.num_cached_tokens or 0
                if request.tokens and request.first_token_s is None:
                    request.first_token_s = seen
                    if message["events"]:
                        self.send({"event": "first_token", "index": request.index})
                if output.finished:
                    self._end(request, seen, str(output.outputs[0].finish_reason), outstanding, message["events"])
                    heapq.heappush(users, seen + pauses[request.index])
            for request_id in list(outstanding) if aborts else ():
                request = requests[request_id]
                if request.index in aborts and steps - request.added_step >= aborts[request.index]:
                    engine.abort_request([request_id])
                    self._end(request, now(), "abort", outstanding, message["events"])
                    heapq.heappush(users, now() + pauses[request.index])
            if time.monotonic() > deadline:
                left = sorted(requests[request_id].index for request_id in outstanding)
                engine.abort_request(list(outstanding))
                raise TimeoutError(f"requests not finished after {message['timeout_s']} s: {left}")
        total = now()
        self._settle()
        results = [request.result() for request in sorted(requests.values(), key=lambda each: each.index)]
        return {"requests": results, "total_s": total, "steps": steps}

    def _end(self, request: _Request, seen: float, reason: str, outstanding: set[str], events: bool) -> None:
        request.finished_s, request.finish_reason = seen, reason
        outstanding.discard(request.request_id)
        if events:
            self.send({"event": "finished", "index": request.index})

    def _settle(self, timeout_s: float = 30.0) -> None:
        """Step on until the scheduler has nothing left: saves under way finish only while it is stepped."""
        scheduler = self._engine.engine_core.engine_core.scheduler
        deadline = time.monotonic() + timeout_s
        while scheduler.has_requests() and time.monotonic() < deadline:
            self._step()


def named(function: str) -> Any:
    """Return what ``module:name`` names."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def let_numba_be_imported_first() -> None:
    """LMCache imports numba before vLLM goes through the objects of all modules (``register_triton_kernel_overrides``).

    llvmlite's library answers any name with a function of that name, ``__dict__`` too, on which vLLM then fails where
    scheduler and worker share a process.
    """
    library = type(importlib.import_module("llvmlite.binding.ffi").lib)
    answer = library.__getattr__

    def getattr_(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return answer(self, name)

    library.__getattr__ = getattr_


def main(kind: type[Child] = Child) -> None:
    """Obey until told to stop."""
    die_with_parent()
    # The pipes move away from 0 and 1, where everything that vLLM and its workers print would end up in them.
    commands = os.fdopen(os.dup(0), "r")
    answers = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    for pipe in (commands, answers):  # a worker that was forked must not hold them open when this process has died
        os.register_at_fork(after_in_child=partial(os.close, pipe.fileno()))
    child = kind(answers)
    for line in commands:
        message = json.loads(line)
        if message["op"] == "stop":
            break
        try:
            child.send({"ok": True, **child.handle(message)})
        except Exception as error:
            traceback.print_exc()
            child.send({"ok": False, "error": f"{type(error).__name__}: {error}"})
    below = descendants(os.getpid())
    child.stop()
    print(f"engine stopped, workers were {below}", file=sys.stderr, flush=True)
    # Threads of the libraries that never end must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
