"""Runs in an engine's process: how long the steps of a pass take that admit a request, and how many requests wait."""

from __future__ import annotations

import time
from typing import Any


def begin(engine: Any) -> None:
    """Watch this engine's steps from now on; once for an engine."""
    core = engine.engine_core.engine_core
    step, schedule = core.step_fn, core.scheduler.schedule
    seen = core.watched = {"admission_s": [], "waiting_s": 0.0}
    admitted, ended_s = False, time.monotonic()

    def scheduled(*args: Any, **options: Any) -> Any:
        nonlocal admitted
        output = schedule(*args, **options)
        admitted |= bool(output.scheduled_new_reqs)
        return output

    def stepped() -> Any:
        nonlocal admitted, ended_s
        began_s, admitted = time.monotonic(), False
        waiting = core.scheduler.get_request_counts()[1]
        result = step()
        now_s = time.monotonic()
        if admitted:
            seen["admission_s"].append(now_s - began_s)
        seen["waiting_s"] += waiting * (now_s - ended_s)
        ended_s = now_s
        return result

    core.step_fn, core.scheduler.schedule = stepped, scheduled


def end(engine: Any) -> dict[str, Any]:
    """Return the seconds of each step that admitted a request, and requests that waited × seconds."""
    found: dict[str, Any] = engine.engine_core.engine_core.watched
    return found
