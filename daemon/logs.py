"""Structured logging: JSON lines for machines, a coloured console on a terminal."""

from __future__ import annotations

import logging
import sys
import uuid
from typing import Any, TextIO

import structlog

Log = Any  # a structlog bound logger; its class is made at run time


def configure(level: str = "info", stream: TextIO | None = None) -> Log:
    """The daemon's logger, writing to `stream` (standard output by default). Fields: ts, level, event, run_id, …"""
    out = stream if stream is not None else sys.stdout
    render: Any
    if out.isatty():
        render = [structlog.dev.ConsoleRenderer()]
    else:
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            *render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=True,
    )
    return structlog.get_logger().bind(run_id=uuid.uuid4().hex[:12])
