"""The process of an engine that is served: vLLM's AsyncLLM, its core in a process below, requests at any instant."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from tests.lab import engine_child
from tests.lab.process import descendants

Part = tuple[list[int], int]
"""Tokens as they came, and how many of the prompt were not computed, or 0 where that is not said."""


class Child(engine_child.Child):
    """Obeys the commands of `tests.lab.engine.Engine`; a pass may neither abort nor name sessions."""

    _loop: asyncio.AbstractEventLoop

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        found = super().handle(message)
        if inspect.isawaitable(found.get("value")):
            found["value"] = self._loop.run_until_complete(found["value"])
        return found

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()

    def _start(self, engine_args: dict[str, Any], prepare: str) -> dict[str, Any]:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        async def made() -> Any:
            config = AsyncEngineArgs(**prepared(engine_args, prepare)).create_engine_config()
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM's default; on a CPU each core imports all anew
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        self._loop = asyncio.new_event_loop()
        self._engine = self._loop.run_until_complete(made())
        return {"workers": descendants(os.getpid())}

    def _reset(self, reset_connector: bool, timeout_s: float = 10.0) -> bool:
        async def reset() -> bool:
            deadline = time.monotonic() + timeout_s
            while not await self._engine.reset_prefix_cache(reset_connector=reset_connector):
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(0.05)
            return True

        return self._loop.run_until_complete(reset())

    def _pass(self, message: dict[str, Any]) -> dict[str, Any]:
        self._passes += 1
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            return self._loop.run_until_complete(asyncio.wait_for(self._serve(message), message["timeout_s"]))
        finally:
            gc.enable()
            gc.unfreeze()

    async def _serve(self, message: dict[str, Any]) -> dict[str, Any]:
        prompts: list[list[int]] = message["prompts"]
        arrivals: list[float] = message["arrivals_s"] or [0.0] * len(prompts)
        places = asyncio.Semaphore(message["concurrency"] or len(prompts))
        wishes = {"temperature": 0.0, "ignore_eos": True, **message["sampling"]}
        begun = time.monotonic()

        async def one(index: int) -> dict[str, Any]:
            await asyncio.sleep(max(0.0, begun + arrivals[index] - time.monotonic()))
            async with places:
                name = f"pass{self._passes}-{index}"
                asked = {**wishes, "max_tokens": message["max_tokens"][index]}
                tokens, times, cached = list[int](), list[float](), 0
                arrived = time.monotonic() - begun
                async for new, known in self._stream(prompts[index], asked, name):
                    if new:
                        times.append(time.monotonic() - begun)
                        tokens += new
                    cached = known or cached
            return {
                "index": index,
                "request_id": name,
                "tokens": tokens,
                "cached_tokens": cached,
                "arrival_s": arrived,
                "first_token_s": times[0],
                "finished_s": times[-1],
                "finish_reason": "length",
                "token_s": times,
            }

        results = await asyncio.gather(*map(one, range(len(prompts))))
        total_s = max(each["finished_s"] for each in results)
        return {"requests": results, "total_s": total_s, "steps": 0, "begun_s": begun}

    async def _stream(self, prompt: list[int], wishes: dict[str, Any], name: str) -> AsyncIterator[Part]:
        """Ask for a prompt's answer."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False, **wishes)
        async for output in self._engine.generate({"prompt_token_ids": prompt}, sampling, name):
            yield output.outputs[0].token_ids, output.num_cached_tokens or 0


def prepared(engine_args: dict[str, Any], prepare: str) -> dict[str, Any]:
    """Call what the engine's spec wants called; return its arguments with objects in the place of names."""
    from vllm.config import KVTransferConfig

    for each in prepare.split():
        engine_child.named(each)()
    transfer, executor = engine_args["kv_transfer_config"], engine_args["distributed_executor_backend"]
    if transfer is not None:
        if transfer["kv_connector"] == "LMCacheMPConnector":
            engine_child.let_numba_be_imported_first()
        transfer = KVTransferConfig(**transfer)
    if "." in executor:
        # As a class it travels to the core's process by its module, which changes vLLM there as well.
        executor = engine_child.named(":".join(executor.rsplit(".", 1)))
    return {**engine_args, "kv_transfer_config": transfer, "distributed_executor_backend": executor}


def main() -> None:
    """Obey until told to stop."""
    engine_child.main(Child)


if __name__ == "__main__":
    main()
