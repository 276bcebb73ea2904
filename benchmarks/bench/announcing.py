"""A router's part in a pass: it announces each prompt through the daemon's HTTP door before the request arrives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kvprefetch.client import Client, Prompt
from kvprefetch.client.door import Door
from tests.lab.engine import EngineError

GOOD = {"accepted", "deferred", "completed", "used", "late"}


class Announcer:
    """Announces to one engine, on a thread of its own, over a door whose process runs from now on."""

    def __init__(self, socket: Path, engine: str) -> None:
        self._client, self._engine = Client(socket), engine
        self._thread = ThreadPoolExecutor(1)
        Door(socket).ask("GET", "/v1/kv_hints/none")

    def begin(self, prompts: Sequence[list[int]], at_s: Sequence[float], ttl_ms: int = 5000) -> Future[None]:
        """Announce each prompt so many seconds from now. The result raises EngineError for one that was refused."""
        return self._thread.submit(self._announce, time.monotonic(), prompts, at_s, ttl_ms)

    def _announce(self, begun_s: float, prompts: Sequence[list[int]], at_s: Sequence[float], ttl_ms: int) -> None:
        for prompt, at in zip(prompts, at_s, strict=True):
            time.sleep(max(0.0, begun_s + at - time.monotonic()))
            some = [Prompt(token_ids=prompt)]
            [answer] = self._client.prefetch(some, engine=self._engine, ttl_ms=ttl_ms).outcomes
            if answer.outcome not in GOOD:
                raise EngineError(f"an announcement was refused: {answer}")
