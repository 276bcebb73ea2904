"""Process that starts `AsyncLLM`, vLLM's server without HTTP, as often as it is told: the engine core is its child.

Its argument is JSON: EngineArgs, and how often.  A line on stdout says that an engine served a request; the engine ends
with the next line from stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from tests.lab.process import die_with_parent


async def _serve(engine_args: dict[str, Any], starts: int) -> None:
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = engine_args.pop("kv_transfer_config")
    for number in range(starts):
        arguments = AsyncEngineArgs(**engine_args, kv_transfer_config=KVTransferConfig(**transfer))
        config = arguments.create_engine_config()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # vLLM's default; on a CPU each core would import all anew
        engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        sampling = SamplingParams(max_tokens=1, detokenize=False)
        async for _ in engine.generate({"prompt_token_ids": [*range(9, 80)]}, sampling, f"request-{number}"):
            pass
        os.write(1, b"\nserved\n")  # at once: the engine core's log may be in the middle of a line
        await asyncio.to_thread(sys.stdin.readline)
        engine.shutdown()


def main() -> None:
    die_with_parent()
    given = json.loads(sys.argv[1])
    asyncio.run(_serve(given["engine_args"], given["starts"]))


if __name__ == "__main__":
    main()
