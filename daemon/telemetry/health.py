"""Judges whether the daemon is well by the work it should be doing: the loop's heartbeat and the oldest store call.

Ready: engines may count on the daemon now.  Healthy: it may recover by itself; otherwise only a restart helps.  A GPU
call that hangs changes neither, since no request waits for it.  Nor does a disk that keeps nothing: it is listed as a
problem, and memory serves on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .snapshot import Snapshot

LOOP_READY_S, LOOP_HEALTHY_S = 2.0, 10.0
# Mooncake gives a transfer up after 60 s when its peer died; an older call will not come back.
CALL_READY_S, CALL_HEALTHY_S = 10.0, 90.0


@dataclass(frozen=True)
class Health:
    """Ages in seconds; each line of `problems` names an age above its bound, or a fault."""

    phase: str
    ready: bool
    healthy: bool
    loop_age_s: float
    call_age_s: Mapping[str, float]
    store_open: bool
    problems: tuple[str, ...]


def judge(snapshot: Snapshot) -> Health:
    """Judge now. Any thread may ask."""
    published, now = snapshot.published, snapshot.clock_ns()
    loop_age_s = max(0, now - snapshot.beat_ns) / 1e9
    call_age_s = {kind: max(0, now - since) / 1e9 for kind, since in snapshot.running().items()}
    store_age_s = {kind: age_s for kind, age_s in call_age_s.items() if kind != "copy"}
    oldest_s = max(store_age_s.values(), default=0.0)
    serving = snapshot.phase == "serving"
    problems = []
    if not serving:
        problems.append(snapshot.phase)
    elif loop_age_s > LOOP_READY_S:
        problems.append(
            f"the main loop hangs: loop_age_s={loop_age_s:.1f} ready<={LOOP_READY_S} alive<={LOOP_HEALTHY_S}"
        )
    problems += [
        f"a store call does not come back: call={kind} age_s={age_s:.1f} ready<={CALL_READY_S} alive<={CALL_HEALTHY_S}"
        for kind, age_s in store_age_s.items()
        if age_s > CALL_READY_S
    ]
    if serving and not published.store_open:
        problems.append("the store is not open: everything is a miss")
    elif serving and not published.store_answering:
        problems.append("the store does not answer: new requests are misses")
    healthy = oldest_s <= CALL_HEALTHY_S and (not serving or loop_age_s <= LOOP_HEALTHY_S)
    ready = not problems
    if fault := snapshot.disk_fault():
        problems.append(fault)
    return Health(snapshot.phase, ready, healthy, loop_age_s, call_age_s, published.store_open, tuple(problems))
