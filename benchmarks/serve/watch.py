"""Runs in an engine's process: how long the steps of a pass take that admit a request, and how long requests wait."""

from __future__ import annotations

import time
from typing import Any


def begin(engine: Any) -> None:
    """Watch this engine's steps from now on; once for an engine."""
    core = engine.engine_core.engine_core
    step, schedule, add = core.step_fn, core.scheduler.schedule, core.scheduler.add_request
    admission_s, waits_s, came_s = list[float](), dict[str, float](), dict[str, float]()
    core.watched = {"admission_s": admission_s, "waits_s": waits_s}
    admitted = False

    def added(request: Any) -> None:
        came_s[request.request_id] = time.monotonic()
        add(request)

    def scheduled(*args: Any, **options: Any) -> Any:
        nonlocal admitted
        output, now_s = schedule(*args, **options), time.monotonic()
        for each in output.scheduled_new_reqs:
            admitted = True
            waits_s[each.req_id] = now_s - came_s[each.req_id]
        return output

    def stepped() -> Any:
        nonlocal admitted
        began_s, admitted = time.monotonic(), False
        result = step()
        if admitted:
            admission_s.append(time.monotonic() - began_s)
        return result

    core.step_fn, core.scheduler.schedule, core.scheduler.add_request = stepped, scheduled, added


def end(engine: Any) -> dict[str, Any]:
    """Return the seconds of each step that admitted a request, and for how long each request waited for that."""
    found: dict[str, Any] = engine.engine_core.engine_core.watched
    return found
