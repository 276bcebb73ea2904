"""Structured logging: JSON lines, with priorities for journald, or readable lines on a terminal.

docs/EVENTS.md describes the lines.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TextIO

import structlog

from . import pretty
from .events import COMMON, EVENTS, FLOODS
from .metrics import Metrics
from .streams import LogWriter, never_wait, take_faults

Log = Any  # a structlog bound logger; its class is made at run time

FLOOD_NS = 1_000_000_000
ENGINE_BYTES_S, ENGINE_BURST = 500_000, 2_000_000  # of one engine's lines: some 500 a second, and 2,000 at once
LAST_S = 2.0
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3}  # syslog's, as journald reads them: <N> before a line


class Floods:
    """Lets one line of a flooding event through and holds the rest back, once a second for each event and engine.

    So it does with every event of an engine whose lines had more bytes than one engine's may have.  A structlog
    processor; any thread may call. due() returns the last line held back of each, with `suppressed`: how many others
    were held back.  `wrote` counts.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._written: dict[str, tuple[float, int]] = {}  # by engine: how many bytes count, and when they did
        # By event and engine: the last line's time, and those held back since: the last one, and how many.
        self._seen: dict[tuple[str, str], tuple[int, dict[str, Any] | None, int]] = {}

    def __call__(self, _logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if "suppressed" in line:
            return line
        key = (str(line["event"]), str(line.get("engine", "")))
        now, floods = self._clock_ns(), line["event"] in FLOODS
        with self._lock:
            much = self._level(key[1], now) > ENGINE_BURST
            if not floods and not much:
                return line
            since, held, count = self._seen.get(key, (now - FLOOD_NS, None, 0))
            if floods and not much and now - since >= FLOOD_NS and held is None:
                self._seen[key] = (now, None, 0)
                return line
            self._seen[key] = (since if held is not None or floods else now, dict(line), count + 1)
        raise structlog.DropEvent

    def wrote(self, line: Mapping[str, Any], size: int) -> None:
        """Count the bytes of a line that is about to be written."""
        if engine := line.get("engine"):
            now = self._clock_ns()
            with self._lock:
                self._written[engine] = self._level(engine, now) + size, now

    def _level(self, engine: str, now: int) -> float:
        size, at_ns = self._written.get(engine, (0.0, now))
        return max(0.0, size - ENGINE_BYTES_S * (now - at_ns) / 1e9)

    def due(self, *, at_once: bool = False) -> list[dict[str, Any]]:
        """Return the lines to write now, and forget them."""
        now = self._clock_ns()
        with self._lock:
            over = {key: seen for key, seen in self._seen.items() if at_once or now - seen[0] >= FLOOD_NS}
            for key, (_, held, _) in over.items():
                if held is None:
                    del self._seen[key]  # quiet for a second: engines come and go, and their keys with them
                else:
                    self._seen[key] = (now, None, 0)
            self._written = {engine: at for engine, at in self._written.items() if self._level(engine, now)}
        return [{**held, "suppressed": count - 1} for _, held, count in over.values() if held is not None]


class Threshold:
    """A structlog processor: drops lines below a level, which may change while the daemon runs."""

    least = logging.INFO

    def set(self, level: str) -> None:
        self.least = getattr(logging, level.upper())

    @property
    def debug(self) -> bool:
        """Whether lines of level debug are written."""
        return self.least <= logging.DEBUG

    def __call__(self, _logger: Any, method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if getattr(logging, method.upper()) < self.least:
            raise structlog.DropEvent
        return line


threshold = Threshold()
floods = Floods()
_output: tuple[LogWriter, Log] | None = None
_place = ""


def configure(level: str, metrics: Metrics) -> Log:
    """Return the daemon's logger, which writes to standard output and counts in `metrics`."""
    global _output
    sys.stdout.flush()
    writer = LogWriter(sys.stdout.fileno())
    terminal = sys.stdout.isatty()
    prefix = not terminal and goes_to_journald(sys.stdout, os.environ)
    colour = pretty.wants_colour(sys.stdout)

    def count(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Count lines of level warning and above by event, also those that are held back."""
        if EVENTS.get(line["event"]) in ("warning", "error") and "suppressed" not in line:
            metrics.add("events", 1, line["event"])
        return line

    def render(_logger: Any, _method: str, line: MutableMapping[str, Any]) -> str:
        ordered = {name: line[name] for name in COMMON if name in line} | dict(line)
        if terminal:
            return pretty.line(ordered, colour=colour)
        text = json.dumps(ordered, default=str)
        floods.wrote(line, len(text))
        return f"<{PRIORITIES[ordered['level']]}>{text}" if prefix else text

    threshold.set(level)
    structlog.configure(
        processors=[
            count,
            threshold,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            floods,
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),  # `threshold` decides
        logger_factory=lambda: writer,
        cache_logger_on_first_use=True,
    )
    log: Log = structlog.get_logger().bind(run_id=uuid.uuid4().hex[:12])
    _output = writer, log
    return log


def unblock_streams(environ: Mapping[str, str] = os.environ) -> None:
    """Keep a reader of standard output or standard error that stalls from stopping the daemon."""
    global _place
    for stream in (sys.stderr, sys.stdout):
        stream.flush()
        _place = never_wait(stream.fileno(), ours=goes_to_journald(stream, environ))


def place() -> str:
    """Return where the log goes: a file's path, "the journal", or another word."""
    return _place


def tick(*, at_once: bool = False) -> int:
    """Write lines that were held back, and report lost ones; the main loop calls it a few times a second.

    Return how many lines were lost since the start, unreported ones included.
    """
    if _output is None:
        return 0
    writer, log = _output
    writer.tick()
    for line in floods.due(at_once=at_once):
        level, event = line.pop("level"), line.pop("event")
        line.pop("ts", None)
        getattr(log, level)(event, **line)
    for fault in take_faults():
        log.warning("log.kept", error=fault)
    if lost := writer.take_lost():
        log.warning("log.dropped", dropped_lines=lost)
    return writer.dropped_lines


def finish() -> None:
    """Write all waiting lines, if the reader takes them within two seconds. Call it last."""
    if _output is not None:
        _output[0].drain(LAST_S)


def goes_to_journald(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether systemd connected this stream to the journal (`JOURNAL_STREAM` names its device and inode)."""
    try:
        device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
        status = os.fstat(stream.fileno())
        return (int(device), int(inode)) == (status.st_dev, status.st_ino)
    except (OSError, ValueError):
        return False
