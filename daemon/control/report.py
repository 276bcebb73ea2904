"""The answers to status and stat queries, from epochs, segments and the snapshot. Runs on the main loop."""

from __future__ import annotations

import heapq
import os
from collections.abc import Sequence
from typing import Any

from kvprefetch import __version__

from ...shmring import view
from ...shmring.errors import SegmentCorrupt
from ...shmring.wire.admin import MAX_NAMESPACE_BYTES, Segments, Status
from ...shmring.wire.records import PROTOCOL, FlagState
from ..engine.epoch import Epoch
from ..telemetry.events import Ending
from ..telemetry.health import judge
from ..telemetry.logs import place
from ..telemetry.overview import as_status
from ..telemetry.snapshot import Snapshot
from .epochs import Shared
from .refusals import LISTED

MAX_ENGINES = 32  # in one answer, which must fit a control message
MAX_PLACE = 1024  # characters of the log's path
SLOWEST = 10
SLOWEST_NS = 300_000_000_000
_NONE: dict[str, int | str] = {}
_FLAG_STATES = {state.value: state.name.lower() for state in FlagState}


def numbers(epoch: Epoch, now_ns: int) -> dict[str, int | str]:
    """Return one engine's gauges and counters by name; `transfer_ms` and `hidden_ms` make its hidden fraction."""
    return {
        "engine": epoch.engine.engine_id,
        "namespace": ", ".join(epoch.parts.ranks.namespaces).encode()[:MAX_NAMESPACE_BYTES].decode(errors="ignore"),
        "model": epoch.engine.model.encode()[:MAX_NAMESPACE_BYTES].decode(errors="ignore"),
        "pid": epoch.engine.pid,
        "uid": epoch.engine.uid,
        "mode": epoch.mode,
        "settings": epoch.engine.scheduler.settings,
        "age_s": (now_ns - epoch.since_ns) // 1_000_000_000,
        "epoch": epoch.number,
        "block_bytes": epoch.memory.block_bytes,
        "transfer_ms": int(epoch.counters.counts["transfer_seconds"] * 1e3),
        "hidden_ms": int(epoch.counters.counts["hidden_seconds"] * 1e3),
        **epoch.numbers(),
    }


def at_start(snapshot: Snapshot) -> dict[str, Any]:
    """Return what the daemon shows of itself before it serves."""
    said = {"version": __version__, "protocol": PROTOCOL, "pid": os.getpid()}
    return said | {"phase": snapshot.phase, "started_ns": snapshot.started_ns, "log": place()[:MAX_PLACE]}


def daemon(shared: Shared, epochs: Sequence[Epoch], engine_count: int, uid: int | None, now_ns: int) -> dict[str, Any]:
    """Return what the daemon shows of itself and of these epochs: the fields of a Status, but for ages and request ids.

    `engine_count` counts the engines of all users.  `uid`: whose refusals are listed; None: all.
    """
    snapshot = shared.snapshot
    return {
        **at_start(snapshot),
        "mode": shared.mode,
        "master_http": shared.master_http,
        "store_open": shared.store.is_open,
        "store_answering": shared.store.answering,
        "disk_fault": snapshot.disk_fault,
        "log_fault": snapshot.log_fault(now_ns),
        "store": snapshot.fill.model_dump() if snapshot.fill is not None else None,
        "engines": [said for each in epochs if (said := each.contain(numbers, _NONE, each, now_ns))],
        "engine_count": engine_count,
        "refused": shared.refusals.listed(uid),
        "waiting": [each for each in shared.waiting if uid in (None, each["uid"])][:LISTED],
        "missing": snapshot.missing,
        "held": snapshot.held[:MAX_ENGINES],
        "calls_ns": shared.pools.running(),
        "causes": _causes(epochs, now_ns),
        "rates": {path: dict(rates) for path, rates in shared.pools.rates.known().items()},
    }


def status(shared: Shared, epochs: Sequence[Epoch], engine_count: int, uid: int | None, now_ns: int) -> Status:
    """Return the answer for a user who may see these epochs. The loop that makes it lives."""
    shown = daemon(shared, epochs, engine_count, uid, now_ns)
    shown["engines"] = shown["engines"][:MAX_ENGINES]
    return as_status(shown, judge(shown, now_ns, now_ns), now_ns, _slowest(epochs, now_ns))


def segments(epochs: Sequence[Epoch], now_ns: int) -> Segments:
    """Return the content of the control segments, which engines may write; a corrupt one has the error instead."""
    shown = []
    for epoch in epochs[:MAX_ENGINES]:
        try:
            content = view.describe(epoch.memory.control.buffer, now_ns, _FLAG_STATES)
        except SegmentCorrupt as error:
            content = {"corrupt": str(error)}
        shown.append({"engine": epoch.engine.engine_id, **content})
    return Segments(engines=shown)


def _causes(epochs: Sequence[Epoch], now_ns: int) -> dict[str, list[float]]:
    """Return, for each cause of a slow request, how many requests had it lately, and their waits together (ms)."""
    found: dict[str, list[float]] = {}
    for epoch in epochs:
        for at_ns, line in epoch.parts.recent:
            if line["cause"] is not None and now_ns - at_ns < SLOWEST_NS:
                sums = found.setdefault(line["cause"], [0, 0.0])
                sums[0], sums[1] = sums[0] + 1, round(sums[1] + line["exposed_ms"], 3)
    return found


def _slowest(epochs: Sequence[Epoch], now_ns: int) -> list[dict[str, str | int | float]]:
    """Return the requests that waited longest, but for aborted ones: their wait ended when the client left."""
    waited = (
        (line["exposed_ms"], -at_ns, epoch.engine.engine_id, line)
        for epoch in epochs
        for at_ns, line in epoch.parts.recent
        if line["exposed_ms"] > 0 and line["outcome"] != Ending.ABORTED.value and now_ns - at_ns < SLOWEST_NS
    )
    return [
        {
            "request_id": line["request_id"],
            "engine": engine,
            "outcome": line["outcome"],
            "cause": line["cause"] or "",
            "exposed_ms": exposed_ms,
            "fetched_bytes": line["bytes"],
            "ago_s": (now_ns + negative_ns) / 1e9,
        }
        for exposed_ms, negative_ns, engine, line in heapq.nlargest(SLOWEST, waited, key=lambda each: each[:2])
    ]
