"""Writes the daemon's picture once a second, on a thread of its own: the loop does not wait, and need not be well."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from .board import Board
from .health import judge
from .metrics import Metrics

PUBLISH_S = 1.0
REST_NS = 10_000_000_000  # without a new number; then the process's own metrics are news


class Publisher:
    """`publish` gives it a status to write at once; until the next one it keeps the ages of the last one true."""

    def __init__(self, board: Board, metrics: Metrics, status: Mapping[str, Any]) -> None:
        self.board, self.metrics = board, metrics
        self._status, self._shown = dict(status), dict[str, Any]()
        self._wake, self._stop = threading.Event(), False
        self._text, self._text_ns = b"", -REST_NS
        self._write()
        self._thread = threading.Thread(target=self._run, name="publish", daemon=True)
        self._thread.start()

    def publish(self, status: Mapping[str, Any]) -> None:
        """Write this status, or a change of it."""
        self._status = {**self._status, **status}
        self._wake.set()

    def close(self) -> None:
        """End the thread, and remove the picture."""
        self._stop = True
        self._wake.set()
        self._thread.join(5.0)
        self.board.close()

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait(PUBLISH_S)
            self._wake.clear()
            self._write()

    def _write(self) -> None:
        status, metrics, now_ns = self._status, self.metrics, time.monotonic_ns()
        health = judge(status, self.board.beat_ns, now_ns)
        metrics.show("ready", {(): health.ready})
        metrics.show("loop_age_seconds", {(): health.loop_age_s})
        metrics.show("call_age_seconds", {(call,): age_s for call, age_s in health.call_age_s.items()})
        if news := metrics.changed or not health.ready or now_ns - self._text_ns >= REST_NS:
            self._text, self._text_ns = metrics.text(), now_ns
        if news or status is not self._shown:
            self._shown = status
            self.board.write(status, self._text)
