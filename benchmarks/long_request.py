"""Measures what one request of 10^6 tokens costs the engine's thread, with a stand-in for the daemon.

The parts are the three hooks that such a request meets: its hint (`on_new_request`), its answer
(`get_num_new_matched_tokens`, with all of it staged) and the allocation of its blocks (`update_state_after_alloc`).
The blocks are vLLM's own objects, and vLLM's own list of their ids is timed beside them.  Times are CPU times of the
thread, medians of requests.  Other memory is read before each part, as a forward pass does: `--warm` leaves that out.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from benchmarks.machine import machine
from kvprefetch.shmring.layout import PAGE_ENTRIES
from tests.connector.fakes import BLOCK, Engine, Request

BLOCKS = 1 << 16
PARTS = ("hint", "answer", "allocation")
ALL = "all"
LIST = "vLLM's own list of block ids"
OTHER_BYTES = 64 << 20


class LongRequest(Request):
    """A prompt of so many full blocks and one token, whose digests are there, as vLLM's are when it arrives."""

    def __init__(self, number: int, blocks: int) -> None:
        super().__init__(f"long-{number}", blocks * BLOCK + 1)
        self._digests = [hashlib.sha256(f"{number}-{at}".encode()).digest() for at in range(blocks)]

    @property
    def block_hashes(self) -> list[bytes]:
        return self._digests


def measure(requests: int, blocks: int, *, warm: bool) -> dict[str, list[float]]:
    """Milliseconds of CPU of each part, request by request, after one that is not counted."""
    pages = blocks // PAGE_ENTRIES + 1  # of slot tables; there are as many as flags
    engine = Engine(flags=2 * pages, slots=blocks, ring=1 << 23, entries=blocks, max_blocks=blocks)
    pool = [KVCacheBlock(number) for number in range(1, 2 * blocks + 1)]
    other = np.zeros(OTHER_BYTES // 8)
    found: dict[str, list[float]] = {part: [] for part in (*PARTS, ALL, LIST)}

    def timed(part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        if not warm:
            other.sum()
        began = time.thread_time_ns()
        result = call(*arguments)
        found[part].append((time.thread_time_ns() - began) / 1e6)
        return result

    gc.disable()
    for number in range(requests + 1):
        request: Any = LongRequest(number, blocks)
        # Freed blocks come back in reverse.
        first = number % 2 * blocks
        allocated = KVCacheBlocks((pool[first : first + blocks][::-1],))
        timed("hint", engine.hooks.on_new_request, request)
        engine.daemon.stage(request.request_id, blocks)
        tokens, _ = timed("answer", engine.hooks.get_num_new_matched_tokens, request, 0)
        if tokens != blocks * BLOCK:
            raise RuntimeError(f"not all of the request was answered: tokens={tokens} wanted={blocks * BLOCK}")
        timed("allocation", engine.hooks.update_state_after_alloc, request, allocated, tokens)
        timed(LIST, allocated.get_block_ids)
        request.num_computed_tokens = tokens
        meta = engine.step([(request, 1)])
        if [*meta.loads[0].block_ids] != allocated.get_block_ids()[0]:
            raise RuntimeError("other blocks are loaded than were allocated")
        engine.acknowledge(meta)
        engine.hooks.request_finished_all_groups(request, ([],))
        engine.daemon.drain()
        engine.daemon.free()
    found[ALL] = [sum(each) for each in zip(*(found[part] for part in PARTS), strict=True)]
    return {part: times[1:] for part, times in found.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_request", description=__doc__)
    parser.add_argument("--requests", type=int, default=15, help="measured requests (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"of {BLOCK} tokens (default %(default)s)")
    parser.add_argument("--warm", action="store_true", help="read no other memory between the parts")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures to this file")
    options = parser.parse_args(argv)
    for name in ("requests", "blocks"):
        if (value := getattr(options, name)) < 1:
            parser.error(f"--{name} must be at least 1, not {value}")
    ran_on = machine()
    print(f"machine: {json.dumps(ran_on)}", flush=True)
    found = measure(options.requests, options.blocks, warm=options.warm)
    print(f"{options.blocks * BLOCK} tokens, {options.blocks} blocks, {options.requests} requests; ms of CPU")
    for part, times in found.items():
        print(f"{part:30} {statistics.median(times):6.2f}  ({min(times):.2f}-{max(times):.2f})")
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": ran_on, "warm": options.warm, "ms": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
