"""What tests of telemetry share: a snapshot of a certain age, and the HTTP server's answers."""

from __future__ import annotations

import urllib.error
import urllib.request

from kvprefetch.daemon.telemetry.snapshot import Snapshot


def get(port: int, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
    """Return status and body, also of an error."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=timeout_s) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def snapshot_at(
    now_s: float, *, beat_s: float, running: dict[str, float] | None = None, phase: str = "serving"
) -> Snapshot:
    """Return a snapshot with times in seconds; `running`: when each call in flight began."""
    snapshot = Snapshot(lambda: int(now_s * 1e9))
    snapshot.phase, snapshot.beat_ns = phase, int(beat_s * 1e9)
    snapshot.publish(0, [], [], store_open=True)
    snapshot.running = lambda: {call: int(since * 1e9) for call, since in (running or {}).items()}
    return snapshot
