"""Formats a daemon's Status as rows and lines, for `status` and `top`."""

from __future__ import annotations

import pwd
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...shmring.wire.admin import Status
from ..config.sizes import size
from ..store.fill import StoreFill
from .causes import label
from .health import DaemonHealth
from .pretty import amount, count, number, printable

Numbers = Mapping[str, int | str]
_GROWING = ("hints", "fetched_blocks", "transfer_ms", "hidden_ms")
_PATHS = {"memory": "fetches from memory", "disk": "fetches from disk", "save": "puts"}
_WINDOWS = {"5m": "last 5 min", "hour": "last hour"}
COLUMNS = (
    "ENGINE",
    "PEND",
    "FETCH",
    "PINNED",
    "IDLE",
    "FREE",
    "SAVES",
    "HINTS",
    "HIT",
    "HIDDEN",
    "WASTED",
    "DROP",
    "BAD",
)


class NodeRates(NamedTuple):
    """Rates per second between two answers of one daemon; `hidden` is None when nothing was fetched."""

    hints: float
    fetched_bytes: float
    hidden: float | None


def as_status(
    shown: Mapping[str, Any],
    health: DaemonHealth,
    now_ns: int | None = None,
    slowest: list[dict[str, str | int | float]] | None = None,
) -> Status:
    """Return the Status of what a daemon shows of itself (control/report.py), with its health and ages until now."""
    now_ns = time.monotonic_ns() if now_ns is None else now_ns
    fields = {"version": "?", "pid": 0, "store_open": False, "engines": [], **shown}
    return Status.model_validate(
        {
            **{name: value for name, value in fields.items() if value is not None},
            "alive": health.alive,
            "ready": health.ready,
            "healthy": health.healthy,
            "problems": list(health.problems),
            "uptime_s": (now_ns - int(fields.get("started_ns", now_ns))) / 1e9,
            "calls": dict(health.call_age_s),
            "slowest": slowest or [],
        }
    )


def rates(before: Status | None, now: Status, seconds: float) -> NodeRates:
    """Compare two answers, engine by engine (by epoch); an engine that is new counts from zero."""
    older = {engine["epoch"]: engine for engine in (before.engines if before is not None else [])}
    if before is None or before.pid != now.pid or seconds <= 0:
        return NodeRates(0.0, 0.0, hidden_fraction(now.engines))
    hints = fetched_bytes = 0
    grown = []
    for engine in now.engines:
        old = older.get(engine["epoch"], {})
        grew = {name: max(0, count(engine, name) - count(old, name)) for name in _GROWING}
        grown.append(grew)
        hints += grew["hints"]
        fetched_bytes += grew["fetched_blocks"] * count(engine, "block_bytes")
    return NodeRates(hints / seconds, fetched_bytes / seconds, hidden_fraction(grown))


def hidden_fraction(engines: Sequence[Numbers]) -> float | None:
    """Return the share of look-up and transfer that made no scheduler wait."""
    transfer = sum(count(engine, "transfer_ms") for engine in engines)
    return sum(count(engine, "hidden_ms") for engine in engines) / transfer if transfer else None


def row(engine: Numbers) -> list[str]:
    """Return one engine's cells, in the order of COLUMNS."""
    hit, miss = count(engine, "hit_blocks"), count(engine, "miss_blocks")
    fetched, unused = count(engine, "fetched_blocks"), count(engine, "blocks_wasted") + count(engine, "slots_unused")
    counts = ("requests", "orders", "blocks_pinned", "slots_idle", "slots_free", "saves_queued", "hints")
    return [
        printable(str(engine.get("engine", "?"))),
        *(str(count(engine, name)) for name in counts),
        percent(hit / (hit + miss) if hit + miss else None),
        percent(hidden_fraction([engine])),
        percent(unused / fetched if fetched else None),
        str(count(engine, "dropped_hints")),
        str(count(engine, "bad_records")),
    ]


def heading(status: Status) -> list[str]:
    """Return the lines that come first: what is wrong before all else, unless the daemon is ready with it."""
    state, problems = [headline(status)], [*map(printable, status.problems)]
    return [*state, *problems] if status.ready else [*problems, *state]


def headline(status: Status) -> str:
    store = "open" if status.store_open else "NOT open: everything is a miss"
    if status.store_open and not status.store_answering:
        store = "does NOT answer: new requests are misses"
    calls = ", ".join(f"{kind} {number(age_s)} s" for kind, age_s in sorted(status.calls.items()))
    return ("" if status.alive else "it showed last: ") + (
        f"kvprefetchd {status.version}, protocol {status.protocol or '?'}, pid {status.pid}, "
        f"up {duration(status.uptime_s)}; mode {status.mode}; store {store}; store calls in flight: {calls or 'none'}"
    )


def traffic(status: Status, rates: NodeRates | None = None) -> list[str]:
    """Return lines on the store, the rates after an earlier answer, those of each path, and what made requests slow."""
    now = [pace(rates)] if rates is not None else []
    full = [f"store: {filled(StoreFill.model_validate(status.store))}"] if status.store is not None else []
    return [*full, *now, *known_rates(status), *slow_causes(status)]


def filled(now: StoreFill) -> str:
    """Format used and capacity by medium, and evictions."""

    def used(count: int, capacity: int) -> str:
        return f"{size(count)} of {size(capacity)} ({percent(count / capacity if capacity else None)})"

    evicted = f"{size(now.memory_evicted_bytes)} evicted" if now.memory_evicted_bytes else "nothing evicted"
    parts = [f"memory {used(now.memory_used_bytes, now.memory_bytes)}, {evicted}"]
    if now.disk_bytes:
        evicted = f"made room {now.disk_evictions} times" if now.disk_evictions else "nothing evicted"
        parts.append(f"disk {used(now.disk_used_bytes, now.disk_bytes)}, {evicted}")
    return "; ".join(parts)


def slowest(status: Status) -> list[list[str]]:
    """Return rows of the requests that waited longest: waited, outcome, cause, bytes, how long ago, engine, id."""
    rows = []
    for each in status.slowest:
        waited, fetched, ago_s = (amount(each, name) for name in ("exposed_ms", "fetched_bytes", "ago_s"))
        outcome, cause, *ids = (
            printable(str(each.get(name, ""))) for name in ("outcome", "cause", "engine", "request_id")
        )
        rows.append([f"{number(waited)} ms", outcome, label(cause), size(fetched), f"{duration(ago_s)} ago", *ids])
    return rows


def others(status: Status) -> list[str]:
    """Return a line that counts the attached engines that are not in this answer."""
    count = status.engine_count - len(status.engines)
    engines = "engine" if count == 1 else "engines"
    return [f"and {count} more {engines}, of other users or beyond those that fit"] if count > 0 else []


def refused(status: Status) -> list[str]:
    lines = []
    for each in status.refused:
        engine = f"engine {each['engine']}, " if each.get("engine") else ""
        who = f"{engine}pid {each.get('pid', '?')}, user {_user(count(each, 'uid'))}"
        lines.append(printable(f"refused: {who}, tried {count(each, 'tries')} times: {each.get('error', '?')}"))
    return lines


def waiting(status: Status) -> list[str]:
    lines = []
    for each in status.waiting:
        who = f"engine {each.get('engine', '?')}, pid {each.get('pid', '?')}, user {_user(count(each, 'uid'))}"
        since = duration(count(each, "for_s"))
        lines.append(printable(f"not attached: {who}, for {since}, waits for: {each.get('waits_for', '?')}"))
    return lines


def held(status: Status) -> list[str]:
    """Return a line for each memory of an engine that left, which the store did not let go of."""
    return [
        printable(
            f"not free again: {size(count(each, 'bytes'))} of epoch {each.get('epoch', '?')}, tried "
            f"{count(each, 'tries')} times: {each.get('error', '?')}"
        )
        for each in status.held
    ]


def names(status: Status) -> list[str]:
    """Return a line for each engine: its model, process, user, age, mode, settings and namespace."""
    return [
        printable(
            f"{engine.get('engine', '?')}: {engine.get('model', '?')}, pid {engine.get('pid', '?')}, user "
            f"{_user(count(engine, 'uid'))}, for {duration(count(engine, 'age_s'))}, {engine.get('mode', '?')}; "
            f"{engine.get('settings') or 'settings not told'}; stores under {engine.get('namespace', '?')}"
        )
        for engine in status.engines
    ]


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # of a container
        return str(uid)


def known_rates(status: Status) -> list[str]:
    """Return a line for each path of the store that had traffic: its rate now, and what it was."""
    return [
        f"{_PATHS.get(path, path)}: "
        + ", ".join(f"{_WINDOWS.get(window, window)} {size(rate)}/s" for window, rate in rates.items())
        for path, rates in status.rates.items()
    ]


def slow_causes(status: Status) -> list[str]:
    """Return a line of what made the latest requests (trace.RECENT) slow, what was waited for longest first."""
    found = sorted(status.causes.items(), key=lambda each: (-each[1][1], -each[1][0]))
    named = ", ".join(f"{label(cause)} {count:.0f} ({number(ms / 1e3)} s)" for cause, (count, ms) in found)
    return [f"slow lately, requests (waited): {named}"] if found else []


def pace(rates: NodeRates) -> str:
    return f"now: {number(rates.hints)} hints/s, fetching {size(rates.fetched_bytes)}/s, hidden {percent(rates.hidden)}"


def describe(status: Status, rates: NodeRates | None = None) -> list[str]:
    """Return the whole answer as lines of text, with `rates` after an earlier answer."""
    lines = [*heading(status), *traffic(status, rates)]
    if status.log:
        lines.append(printable(f"log: {status.log}"))
    if status.engines:
        lines += ["", *aligned([list(COLUMNS), *map(row, status.engines)])]
    elif not status.engine_count:
        lines.append("no engine is attached")
    lines += others(status)
    lines += names(status)
    lines += [*waiting(status), *refused(status)]
    lines += held(status)
    if status.slowest:
        lines += ["", "waited longest lately:", *aligned(slowest(status))]
    return lines


def aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in rows]


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def duration(seconds: float) -> str:
    """42 s, 7 min, 3 h, 12 d."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
