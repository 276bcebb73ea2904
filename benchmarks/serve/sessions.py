"""What sessions bring: whether the stored blocks of a turn that comes back were there before it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.serve.trace import Slice

Line = Mapping[str, Any]  # of the daemon's `request.done`


def of_requests(names: Sequence[str], lines: Sequence[Line]) -> Iterator[tuple[int, Line]]:
    """Yield each line with the number of its request, whose id begins with this one's of `names`."""
    known = {name: number for number, name in enumerate(names)}
    for line in lines:
        name = next((each for each in known if line["request_id"].startswith(f"{each}-")), line["request_id"])
        if name in known:
            yield known[name], line


def returning(some: Slice) -> list[int]:
    """The requests whose session had one before, by number."""
    first: dict[object, int] = {}
    for number, call in enumerate(some.calls):
        first.setdefault(call.session, number)
    return [number for number, call in enumerate(some.calls) if first[call.session] != number]


def staged_share(lines: Sequence[tuple[int, Line]], some: Slice, block: int, block_bytes: int) -> float | None:
    """Return which share of the stored blocks of returning turns were there when these came; None without any.

    Blocks in the engine's own cache aside, and those that the trace did not have before: nobody could know of them, and
    the store has them for later turns.  What a turn's request fetched itself was not there.  `block`: tokens.
    """
    came_back, stored, there = set(returning(some)), 0, 0
    for number, line in lines:
        if number in came_back:
            found, local = line["found_blocks"], line["local_blocks"]
            known = min(found, len(some.known[number]) * some.chunk // block)
            stored += max(0, known - local)
            there += max(0, min(known, found - line["bytes"] // block_bytes) - local)
    return round(there / stored, 4) if stored else None
