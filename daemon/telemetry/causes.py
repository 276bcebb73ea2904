"""Names the cause of a slow request: a `request.done` record in, one word and its sentence out. Pure.

For a request that loaded, the cause is that of the longest part of its time, where the engine's own parts count half;
for one that did not, what kept its blocks away.  Times are in milliseconds.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ..config.sizes import size
from .events import Ending
from .pretty import figures, number, printable

SLOW_SHARE = 0.25  # of the rate of the hour before: well below
_SLOW_MS = 20.0  # shorter parts have no cause
_MASTER_MS = 500.0  # a look-up this long is worse than the miss that it says
_FIGURES = (
    *("hint_blocks", "local_blocks", "found_blocks", "loaded_blocks", "bytes", "store_bytes_s", "hour_bytes_s"),
    *("room_ms", "exposed_ms", "visited_ms", "hint_seen_ms", "looked_up_ms", "answered_ms", "claimed_ms", "loaded_ms"),
    "ended_ms",
)
Record = Mapping[str, Any]
Figures = Mapping[str, float]


class Cause(enum.Enum):
    """The closed vocabulary of `cause`: its words for a table, and its sentence with the values of `_values`."""

    label: str
    text: str

    def __new__(cls, value: str, label: str, text: str) -> Cause:
        member = object.__new__(cls)
        member._value_, member.label, member.text = value, label, text
        return member

    DAEMON = "daemon", "daemon late", "the daemon read its hint after {daemon} ms; it is short of CPU."
    MASTER = "master", "slow master", "the store's master was slow or away: the look-up ended after {master} ms."
    NODE = "storage_node", "storage node", "a storage node did not deliver: {owners}."
    LINK = "link", "slow link", "the link was slow: {gave}."
    DISK = "disk", "slow disk", "the disk was slow: {gave}."
    TRANSFER = "transfer", "transfer", "the transfer took long at the store's usual pace: {gave}."
    STAGING = "staging", "staging full", "staging was too small: its next fetch waited {room} ms for slots, or {part}."
    STEP = "engine_step", "long step", "the engine's step of other requests, a long prefill, went on for {step} ms."
    PLACES = "places", "places full", "the engine's places or tokens went to other requests for {places} ms."
    PREFILL = "prefill", "long prefill", "the engine computed for {prefill} ms: {absent} blocks of it were nowhere."
    COPY = "copy", "copy", "all of it was there: its copy, and the step that did it, took {prefill} ms."
    ABSENT = "absent", "absent", "{absent} blocks of it were nowhere."
    LEASE = "lease", "lost lease", "the store lost its blocks between look-up and fetch: their lease ended."
    VALUE = "bad_value", "bad value", "values in the store were of another size, or corrupt."


_FAILED = {
    **dict.fromkeys(("transfer", "under_way", "overdue"), Cause.NODE),
    **dict.fromkeys(("lease", "lookup_again", "miss", "retry"), Cause.LEASE),
    **dict.fromkeys(("corrupt", "foreign"), Cause.VALUE),
    "no_room": Cause.STAGING,
    "transient": Cause.MASTER,
}
_OWN = (Cause.PLACES, Cause.PREFILL)
_WAITED = (Ending.TIMED_OUT.value, Ending.RECOMPUTED.value, Ending.ABORTED.value)


def cause(record: Record) -> str | None:
    """Return the value of the request's Cause; None where nothing of it was slow."""
    found = _cause(record)
    return found.value if found is not None else None


def sentence(record: Record) -> str:
    """Say the cause; empty without one."""
    found = _cause(record)
    return f"Cause: {found.text.format(**_values(record))}" if found is not None else ""


def label(value: str) -> str:
    """Return the words of a cause for a table, which may come from another release."""
    return next((each.label for each in Cause if each.value == value), printable(value))


def _cause(record: Record) -> Cause | None:
    outcome, failed = record.get("outcome"), _FAILED.get(str(record.get("failed")))
    if failed is Cause.NODE and record.get("medium") == "disk" and not record.get("owners"):
        failed = Cause.DISK  # Mooncake names no node of a disk
    known = figures(record, _FIGURES)
    hinted, found = known.get("hint_blocks", 0), known.get("found_blocks", 0)
    parts = _parts(record, known)
    weighed = {each: took / (2 if each in _OWN else 1) for each, took in parts.items()}
    longest = max(weighed, key=weighed.__getitem__)
    if outcome == Ending.MISS.value:
        if record.get("store_unavailable") or parts[Cause.MASTER] >= _MASTER_MS:
            return Cause.MASTER
        return failed or Cause.ABSENT
    if outcome in _WAITED:
        waits = {each: parts[each] for each in (Cause.DAEMON, Cause.MASTER, Cause.TRANSFER)}
        longest = max(waits, key=lambda each: waits[each])
        if outcome == Ending.ABORTED.value and waits[longest] < _SLOW_MS:
            return None
    elif outcome != Ending.LOADED.value:
        return None
    elif failed is not None and known.get("loaded_blocks", 0) + known.get("local_blocks", 0) < hinted:
        return failed
    elif parts[longest] < _SLOW_MS:
        return None
    if longest is Cause.TRANSFER:
        return failed or _of_fetch(record, known, parts[longest])
    if longest is Cause.PREFILL and found >= hinted:
        return Cause.COPY
    return longest


def _of_fetch(record: Record, known: Figures, took: float) -> Cause:
    """Return the cause of a fetch that took so long: the store's pace, room in staging, or its own size."""
    rate, hour = known.get("store_bytes_s"), known.get("hour_bytes_s")
    if rate is not None and hour is not None and rate < SLOW_SHARE * hour:
        return Cause.DISK if record.get("medium") == "disk" else Cause.LINK
    own = known.get("bytes", 0.0) / rate * 1e3 if rate else 0.0
    return Cause.STAGING if 2 * known.get("room_ms", 0.0) >= took > 2 * own else Cause.TRANSFER


def _parts(record: Record, known: Figures) -> dict[Cause, float]:
    """Return how long each part of the request's life lasted: of a wait, and what the engine did for others.

    A request that waited in vain is judged by all that the daemon did for it.
    """
    end = known.get("claimed_ms", known.get("ended_ms", 0.0))
    turn = known.get("visited_ms", end)
    start, left = turn, turn + known.get("exposed_ms", 0.0)
    if record.get("outcome") in _WAITED:
        start, left = 0.0, end
    marks = [0.0]
    for name in ("hint_seen_ms", "looked_up_ms", "answered_ms"):
        marks.append(max(marks[-1], known.get(name, left)))
    marks.append(max(marks[-1], left))
    waits = [max(0.0, min(left, stop) - max(start, begin)) for begin, stop in pairwise(marks)]
    parts = dict(zip((Cause.DAEMON, Cause.MASTER, Cause.TRANSFER, Cause.STEP), waits, strict=True))
    parts[Cause.PLACES] = turn + max(0.0, end - left)
    parts[Cause.PREFILL] = known.get("loaded_ms", end) - end
    return parts


def _values(record: Record) -> dict[str, str]:
    known = figures(record, _FIGURES)
    rate, hour = known.get("store_bytes_s"), known.get("hour_bytes_s")
    gave = "nothing came in time" if not rate else f"the store gave {size(rate)}/s"
    usual = "" if hour is None else f"; its last hour {size(hour)}/s"
    names = ("hint_blocks", "local_blocks", "loaded_blocks", "found_blocks")
    hinted, local, loaded, found = (int(known.get(name, 0)) for name in names)
    return {
        **{each.value.rpartition("_")[2]: number(took) for each, took in _parts(record, known).items()},
        "gave": gave + usual,
        "owners": printable(str(record.get("owners") or "its name is not known")),
        "room": number(known.get("room_ms", 0.0)),
        "part": f"staging has room for {loaded + local} of its {hinted} blocks",
        "absent": str(hinted - found),
    }
