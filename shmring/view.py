"""A read-only view of a live control segment, for operators; it writes nothing and disturbs nobody.

Each number is one load, so two numbers may come from two moments.  Only an impossible geometry raises SegmentCorrupt;
another impossible word is shown as it stands, and `impossible` names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from . import flags
from ._atomics import Words
from .layout import Layout, Line
from .liveness import Liveness, PeerState


def describe(buffer: memoryview, now_ns: int, state_names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """Return the segment's numbers at `now_ns` (CLOCK_MONOTONIC), as plain values that JSON can hold.

    The caller's protocol names the flag states in `state_names`; a state without a name is shown as its number.
    """
    layout, names = Layout.read(buffer), state_names or {}
    words = Words(buffer, writable=False)  # it lets go of the buffer with this call
    impossible: list[str] = []

    def within(name: str, value: int, high: int) -> int:
        if not 0 <= value <= high:
            impossible.append(name)
        return value

    load = words.load_acquire
    # SYNC head: record space free in push
    head = load(Line.HEAD)
    # SYNC tail: record content visible in peek
    tail = load(Line.TAIL)
    # SYNC taken: entry read before it is written again
    taken = load(Line.CREDITS_TAKEN)
    # SYNC credit: slot number visible with the counter
    granted = load(Line.CREDITS_GRANTED)
    states = Counter(flags.states(buffer, layout).tolist())
    return {
        "epoch": layout.epoch,
        "total_bytes": layout.total_bytes,
        "slot_count": layout.slot_count,
        "device_slots": layout.device_slots,
        "ring": {
            "capacity_bytes": layout.ring_bytes,
            # Head is loaded first and both only grow, so a race never under-reports the bytes in use.
            "used_bytes": within("ring.used_bytes", tail - head, layout.ring_bytes),
            "pushed_bytes": tail,
            "consumed_bytes": head,
            "consumer_sleeping": load(Line.SLEEPING) != 0,
        },
        "flags": {
            "count": layout.flag_count,
            "states": {names.get(state, str(state)): states[state] for state in sorted(states)},
        },
        "credits": {
            "entries": layout.credit_entries,
            "granted": granted,
            "taken": taken,
            "outstanding": within("credits.outstanding", granted - taken, layout.credit_entries),
        },
        "consumer": _side(words, now_ns, consumer=True),
        "producer": _side(words, now_ns, consumer=False),
        "hints_dropped": load(Line.HINTS_DROPPED),
        "impossible": impossible,
    }


def _side(words: Words, now_ns: int, *, consumer: bool) -> dict[str, Any]:
    state = words.load_acquire(Line.CONSUMER_STATE if consumer else Line.PRODUCER_STATE)
    beat = words.load_acquire(Line.CONSUMER_BEAT if consumer else Line.PRODUCER_BEAT)
    return {
        "state": PeerState(state).name.lower() if state <= max(PeerState) else str(state),
        "status": Liveness(words, consumer=not consumer).peer(now_ns).name.lower(),
        "beat_age_s": round((now_ns - beat) / 1e9, 3) if beat else None,
    }
