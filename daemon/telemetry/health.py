"""Is the daemon well? Judged by its picture, on any thread and in any process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .pretty import printable

LOOP_READY_S, LOOP_HEALTHY_S = 2.0, 10.0
# A question to the master, whose own bound is `rpc_timeout_ms` of at most 60 s; an older one will not come back.
CALL_READY_S, CALL_HEALTHY_S = 10.0, 90.0


@dataclass(frozen=True)
class DaemonHealth:
    """Ages in seconds; each line of `problems` names an age above its bound, or a fault."""

    phase: str
    alive: bool
    ready: bool
    healthy: bool
    loop_age_s: float
    call_age_s: Mapping[str, float]
    store_open: bool
    problems: tuple[str, ...]


def judge(status: Mapping[str, Any], beat_ns: int, now_ns: int, *, alive: bool = True) -> DaemonHealth:
    """Judge by what a restart mends: the process, the loop's heartbeat, and questions to the master.

    `status`: what the daemon published last (control/report.py); `beat_ns`: the loop's last heartbeat, CLOCK_MONOTONIC.

    Ready: engines may count on the daemon now.  Healthy: it may recover by itself; otherwise only a restart helps.
    Other calls may take long in a daemon that works: transfers of a node that trickles, a purge, the reservation of
    much staging, a GPU's.  No request waits for one beyond its deadline, and a restart would make none faster.  A disk
    that keeps nothing, a log that loses lines, memory that could not be freed, engines that wait for long, and engines
    that are refused for what they are, are listed as problems, and the daemon serves on.
    """
    phase, store_open = str(status.get("phase", "starting")), bool(status.get("store_open"))
    loop_age_s = max(0, now_ns - beat_ns) / 1e9
    call_age_s = {kind: max(0, now_ns - since) / 1e9 for kind, since in status.get("calls_ns", {}).items()}
    asked_s = call_age_s.get("look_up", 0.0)
    serving = phase == "serving"
    problems = []
    if not alive:
        last = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time.time() - loop_age_s))
        count = int(status.get("engine_count", 0))
        engines = "1 engine" if count == 1 else f"{count} engines"
        problems.append(f"the daemon is gone: pid {status.get('pid')}, last beat {last} UTC, {engines}")
    elif not serving:
        problems.append(f"{phase} for {loop_age_s:.0f} s")  # without a loop, so no beat
    elif loop_age_s > LOOP_READY_S:
        problems.append(
            f"the main loop hangs: loop_age_s={loop_age_s:.1f} ready<={LOOP_READY_S} alive<={LOOP_HEALTHY_S}"
        )
    if alive and asked_s > CALL_READY_S:
        problems.append(
            f"a question to the master does not come back: age_s={asked_s:.1f} ready<={CALL_READY_S} "
            f"alive<={CALL_HEALTHY_S}"
        )
    if alive and serving and not store_open:
        problems.append("the store is not open: everything is a miss, and engines wait for it")
    elif alive and serving and not status.get("store_answering"):
        problems.append("the store does not answer: new requests are misses")
    problems += map(str, status.get("missing", ()))
    refused = [each for each in status.get("refused", ()) if each.get("engine")]
    if any(each.get("ours") for each in refused):
        problems.append(_refused([each for each in refused if each.get("ours")]))
    healthy = alive and asked_s <= CALL_HEALTHY_S and (not serving or loop_age_s <= LOOP_HEALTHY_S)
    ready = not problems
    problems += filter(None, (str(status.get(f"{name}_fault", "")) for name in ("disk", "log")))
    if others := [each for each in refused if not each.get("ours")]:
        problems.append(_refused(others))
    problems += [
        printable(f"an engine is not attached: engine {each['engine']} waits for {each['waits_for']}")
        for each in status.get("waiting", ())
        if each.get("overdue")
    ][:1]
    if held := status.get("held", ()):
        size = sum(int(each["bytes"]) for each in held)
        problems.append(
            f"memory of engines that left is not free again: bytes={size} engines={len(held)}: {held[-1]['error']}"
        )
    return DaemonHealth(phase, alive, ready, healthy, loop_age_s, call_age_s, store_open, tuple(problems))


def _refused(refused: Sequence[Mapping[str, Any]]) -> str:
    """Name the engine that was refused last, and the reason."""
    last = refused[0]
    others = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    return printable(f"engines are refused: engine {last['engine']}{others}: {last['error']}")
