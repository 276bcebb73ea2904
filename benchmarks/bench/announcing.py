"""A router's part in a pass: it announces each prompt through the daemon's HTTP door before the request arrives."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kvprefetch.daemon.cli.prefetch import Door
from tests.lab.engine import EngineError

GOOD = {"accepted", "deferred", "completed", "used", "late"}


class Announcer:
    """Announces to one engine, on a thread of its own, over a door whose process runs from now on."""

    def __init__(self, socket: Path, engine: str) -> None:
        self._door, self._engine = Door(socket), engine
        self._thread = ThreadPoolExecutor(1)
        self._door.ask("GET", "/v1/kv_hints/none")

    def begin(self, prompts: Sequence[list[int]], at_s: Sequence[float]) -> Future[None]:
        """Announce each prompt so many seconds from now. The result raises EngineError for one that was refused."""
        return self._thread.submit(self._announce, time.monotonic(), prompts, at_s)

    def _announce(self, begun_s: float, prompts: Sequence[list[int]], at_s: Sequence[float]) -> None:
        for prompt, at in zip(prompts, at_s, strict=True):
            time.sleep(max(0.0, begun_s + at - time.monotonic()))
            payload = {"engine": self._engine, "token_ids": prompt}
            action = {"action_id": "1", "action_type": "kv.prefetch", "action_version": "1.0", "payload": payload}
            envelope = {"protocol_version": "0.1", "message_id": uuid.uuid4().hex, "actions": [action]}
            status, answer = self._door.ask("POST", "/v1/kv_hints", envelope)
            if status != 202 or answer["actions"][0]["outcome"] not in GOOD:
                raise EngineError(f"an announcement was refused: status={status} answer={answer}")
