"""Process that serves four requests over the bed's worker by AsyncLLM, with a clock, and prints what came as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from tests.lab.bed import engine as bed
from tests.lab.bed import oracle
from tests.lab.bed.timeline import PRESETS
from tests.lab.process import die_with_parent
from tests.lab.prompts import make_prompts


async def _serve() -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, detokenize=False)
    async with bed.async_engine(preset=PRESETS["50-10"], num_gpu_blocks=96) as engine:

        async def one(name: str, prompt: list[int]) -> tuple[bool, float]:
            begun, tokens = time.monotonic(), list[int]()
            async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
                tokens = list(output.outputs[0].token_ids)
            return tokens == oracle.answer(prompt, 10, 2048), time.monotonic() - begun

        prompts = make_prompts(4, 300)
        served = await asyncio.gather(*(one(f"request-{number}", each) for number, each in enumerate(prompts)))
        return {
            "asynchronous": engine.vllm_config.scheduler_config.async_scheduling,
            "right": [right for right, _ in served],
            "took_s": [took for _, took in served],
            "ranks": await engine.collective_rpc("bed_report"),
        }


if __name__ == "__main__":
    die_with_parent()
    print(json.dumps(asyncio.run(_serve())), flush=True)
