"""Plays an engine in a container: it saves and loads, loses its daemon, and does so again with the next one."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from tests.support.fake_engine import BLOCK_BYTES, FakeEngine
from tests.support.waiting import eventually

SOCKET = Path("/run/kvprefetch/kvprefetchd.sock")


def attached() -> FakeEngine | None:
    with contextlib.suppress(OSError, AssertionError):
        return FakeEngine(SOCKET, engine_id="elsewhere")
    return None


def saved_and_loaded(engine: FakeEngine) -> int:
    values = {hashlib.sha256(bytes([i])).digest(): bytes([i]) * BLOCK_BYTES for i in range(8)}
    engine.save(values)
    eventually(lambda: engine.load(list(values)) == list(values.values()), 30, "a hit")
    return len(values)


def main() -> None:
    for turn in ("first", "second"):
        engine = eventually(attached, 60, "a daemon", pause_s=0.2)
        print(f"{turn} daemon: {saved_and_loaded(engine)} blocks saved and loaded", flush=True)
        if turn == "first":
            engine.scheduler.settimeout(120)
            while engine.scheduler.recv(1 << 16):  # the daemon's end closes the connection
                pass
        engine.close()


if __name__ == "__main__":
    main()
