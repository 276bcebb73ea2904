"""Draws one request's trace and says in a sentence where its time went: a `request.done` record in, text out."""

from __future__ import annotations

from typing import NamedTuple

from ..config.sizes import size
from . import causes
from .events import Ending
from .pretty import amount, count, figure, number, printable
from .reader import Record

WIDTH = 56
COPY = "copy, until its step ends"
ELSEWHERE = "scheduler elsewhere"
UNSEEN = "answered, step goes on"
_SHOWN = 0.05  # smaller shares of a wait, or of the whole, are left out
_DURING = {
    "hint to daemon": "until the daemon read the hint",
    "look-up": "for the look-up",
    "first fetch": "for its first fetch",
    "the other fetches": "for the other fetches",
    "fetch that failed": "for a fetch that failed",
    "fetch not over": "for a fetch that was not over",
    "staged, not yet taken": "after it was staged, until the scheduler looked again",
    UNSEEN: "after it was answered, until the scheduler looked again",
}


class Span(NamedTuple):
    """Part of a trace, in milliseconds since the request arrived."""

    name: str
    start_ms: float
    end_ms: float


def explain(record: Record) -> str:
    return "\n".join([*headline(record), "", *picture(record), "", *said(record)])


def said(record: Record) -> list[str]:
    return [text for text in (sentence(record), causes.sentence(record)) if text]


def headline(record: Record) -> list[str]:
    hinted, local, found = (count(record, f"{name}_blocks") for name in ("hint", "local", "found"))
    ended = str(record.get("ts", "?"))[:23].replace("T", " ")
    lines = [
        printable(f"request {record.get('request_id')} of engine {record.get('engine', '?')}: {record.get('outcome')}"),
        printable(f"ended {ended} UTC"),
        f"{hinted} blocks ({count(record, 'prompt_tokens')} tokens): {local} local, {found - local} more in the store,"
        f" {hinted - found} nowhere; {count(record, 'loaded_blocks')} loaded",
    ]
    if record.get("bytes"):
        groups = count(record, "kv_groups")
        of_groups = f" for {groups} KV groups" if groups > 1 else ""
        lines.append(
            f"{size(count(record, 'bytes'))} fetched{of_groups}: {size(count(record, 'bytes_memory'))} from memory, "
            f"{size(count(record, 'bytes_disk'))} from disk"
        )
    if times := count(record, "taken_back"):
        lines.append(f"its room went to more urgent requests {'once' if times == 1 else f'{times} times'}")
    return lines


def spans(record: Record) -> list[Span]:
    """Return the parts that the request went through, in the order of their starts."""
    names = ("hint_seen", "looked_up", "first_byte", "last_byte", "answered", "visited", "claimed", "loaded", "ended")
    seen, looked_up, first, last, answered, asked, claimed, loaded, ended = (
        figure(record, f"{name}_ms") for name in names
    )
    turn = asked if asked is not None else claimed if claimed is not None else ended
    came = last if last is not None else looked_up
    ready = answered if answered is not None else came
    end = claimed if claimed is not None else ended
    left = (
        None if asked is None else asked + amount(record, "exposed_ms")
    )  # drawn in one piece, though it may have gaps
    elsewhere = left is not None and end is not None and end - left >= _SHOWN * end
    unseen = amount(record, "unseen_ms")
    outcome = record.get("outcome")
    staged = last is not None or outcome == Ending.LOADED.value
    if outcome in (Ending.TIMED_OUT.value, Ending.RECOMPUTED.value) and answered is None:
        after = ("fetch not over", ready, end)
    elif staged:
        after = ("staged, not yet taken", ready, end)
    else:
        after = (UNSEEN, ready if unseen else None, left)
    found = [
        ("in the engine's queue", 0.0, turn),
        ("hint to daemon", 0.0, seen),
        ("look-up", seen, looked_up),
        ("first fetch", looked_up, first),
        ("the other fetches", first, last if last != first else None),
        ("fetch that failed", came, answered if record.get("failed") else None),
        after,
        ("scheduler waits", asked, left),
        (ELSEWHERE, left if elsewhere else None, end),
        (COPY, claimed, loaded),
    ]
    return [Span(name, at, max(at, till)) for name, at, till in found if at is not None and till is not None]


def picture(record: Record) -> list[str]:
    """Return a bar for each part, on one scale."""
    parts = spans(record)
    end = max((part.end_ms for part in parts), default=0.0) or 1.0
    left = max((len(part.name) for part in parts), default=0)
    scale = f"{'':{left}}  {'':>9}  0{f'{number(end)} ms':>{WIDTH - 1}}"
    lines = [scale]
    for part in parts:
        start, stop = (round(WIDTH * max(0.0, at) / end) for at in (part.start_ms, part.end_ms))
        start = min(start, WIDTH - 1)
        bar = " " * start + ("█" * (stop - start) or "▏")
        lines.append(f"{part.name:{left}}  {number(part.end_ms - part.start_ms):>6} ms  {bar}")
    return lines


def sentence(record: Record) -> str:
    return _told(record) + _verdict(record) + _early(record) + _announced(record)


def _told(record: Record) -> str:
    outcome = str(record.get("outcome"))
    waited = amount(record, "exposed_ms")
    if outcome == Ending.LOADED.value:
        return _loaded(record, waited)
    if outcome == Ending.MISS.value:
        return f"{_missed(record)} {_wait(record, waited)}"
    if outcome == Ending.TIMED_OUT.value:
        return f"The engine's patience ended before its blocks came, and it was recomputed. {_wait(record, waited)}"
    meaning = next((ending.meaning for ending in Ending if ending.value == outcome), "an outcome unknown here")
    return f"It did not load, because {meaning}. {_wait(record, waited)}"


def _loaded(record: Record, waited: float) -> str:
    fetched = bool(record.get("bytes"))
    seen, looked_up, last = (figure(record, f"{name}_ms") for name in ("hint_seen", "looked_up", "last_byte"))
    ready = last if last is not None else looked_up
    work = "look-up and transfer" if fetched else "the look-up (its blocks were staged already)"
    took = f"{number((ready or 0.0) - (seen or 0.0))} ms"
    if waited < 0.05:
        queue = next((part.end_ms for part in spans(record) if part.name == "in the engine's queue"), 0.0)
        said = f"The scheduler did not wait: {work} took {took} of the {number(queue)} ms that it queued in the engine."
    else:
        hidden = 100 * amount(record, "hidden_fraction")
        said = f"Of {work}, which took {took}, the queue hid {hidden:.0f} %. {_wait(record, waited)}"
    return said + _step(record)


def _step(record: Record) -> str:
    """Say so where most of the time was the engine's own."""
    parts = spans(record)
    took = sum(part.end_ms - part.start_ms for part in parts if part.name == COPY)
    if 2 * took <= max((part.end_ms for part in parts), default=0.0):
        return ""
    return f" Most of the time, {number(took)} ms, was the engine's step that copied it, its computing included."


def _missed(record: Record) -> str:
    if record.get("store_unavailable"):
        return "The store did not answer, and it was recomputed."
    if count(record, "found_blocks") > count(record, "local_blocks"):
        return "What the store had could not be fetched, and it was recomputed."
    return "The store had nothing beyond what the engine held itself, and it was recomputed."


def _wait(record: Record, waited: float) -> str:
    """Say how the time at the head of the queue divides among the daemon's work."""
    asked, found = figure(record, "visited_ms"), spans(record)
    others = sum(part.end_ms - part.start_ms for part in found if part.name == ELSEWHERE)
    more = f" For {number(others)} ms more the engine's places or tokens went to others." if others else ""
    if asked is None or waited < 0.05:
        return f"The scheduler did not wait for it.{more}"
    if 2 * (unseen := amount(record, "unseen_ms")) >= waited:
        answer = "answer, a miss," if record.get("outcome") == Ending.MISS.value else "answer"
        return (
            f"Its {answer} came {number(max(0.0, waited - unseen))} ms after the scheduler had asked. The scheduler "
            f"came back after {number(waited)} ms, when its step had ended: the request waited for the engine, not for "
            f"the store.{more}"
        )
    until = asked + waited
    during = []
    for part in found:
        overlap = min(until, part.end_ms) - max(asked, part.start_ms)
        if part.name in _DURING and overlap >= _SHOWN * waited:
            during.append((overlap, part.name))
    parts = ", ".join(f"{number(overlap)} ms {_DURING[name]}" for overlap, name in sorted(during, reverse=True))
    return f"The scheduler waited {number(waited)} ms for it{f': {parts}' if parts else ''}.{more}"


def _verdict(record: Record) -> str:
    """Say what the engine compared where it did not wait for all blocks."""
    missing, cost = count(record, "missing_blocks"), figure(record, "recompute_ms")
    if not missing or cost is None:
        return ""
    blocks = "1 missing block" if missing == 1 else f"{missing} missing blocks"
    return f" It waited no longer for all: recomputing {blocks} would cost {number(cost)} ms."


def _early(record: Record) -> str:
    """Say by how much its hint came before the scheduler had it, where that is worth a word."""
    adopted = amount(record, "adopted_ms")
    return f" Its hint came {number(adopted)} ms before the scheduler had it." if adopted >= 1.0 else ""


def _announced(record: Record) -> str:
    """Say since when the request was announced, and how much of it was there."""
    if (before := figure(record, "announced_ms")) is None:
        return ""
    staged, blocks = count(record, "announced_staged"), count(record, "announced_blocks")
    return f" It was announced {number(before)} ms before it arrived: {staged} of {blocks} blocks were there."
