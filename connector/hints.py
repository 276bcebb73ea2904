"""One hint and its completion flag, from the engine's side: push, look, ask, claim, give back.

Every function works on the handle's own session, so a handle of an ended epoch is harmless: its memory stays mapped
and nobody reads it.  A flag in a state that only this side writes raises SegmentCorrupt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..shmring import _atomics
from ..shmring.errors import SegmentCorrupt
from ..shmring.flags import GENERATION_SHIFT, STATE_SHIFT, Flag
from ..shmring.groups import Groups
from ..shmring.wire.records import (
    NO_TRACE,
    PROTOCOL,
    Ask,
    Done,
    FlagState,
    Outcome,
    RecordKind,
    encode_ask,
    encode_done,
    hint_bytes,
)
from .session import SchedulerSession

# The daemon publishes progress, or takes it back, while we exchange: each try loses against at most one such step.
_TRIES = 16
# Plain numbers: with cold caches, as in a hook of the engine, a member of an enum costs several looks more.
_HINTED, _READY, _CLAIMED, _EXPIRED = (
    int(state) for state in (FlagState.HINTED, FlagState.READY, FlagState.CLAIMED, FlagState.EXPIRED)
)
_FREE, _RELEASED, _CANCELLED = int(FlagState.FREE), int(FlagState.RELEASED), int(FlagState.CANCELLED)
_MINE = (_HINTED, _READY, _CLAIMED, _EXPIRED)
_TRACEPARENT = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_HINT, _ASK, _DONE = int(RecordKind.HINT), int(RecordKind.ASK), int(RecordKind.DONE)


# A flag this engine holds, and its hint: `session`, `flag`, `generation`, `blocks`, `local_blocks`, and `digests`, of
# which the first ones were hinted.  Times are CLOCK_MONOTONIC ns, 0 where the event did not happen: `asked_ns`,
# `claimed_ns`, and `waited_ns`, how long the scheduler waited for it.
Handle = _atomics.Handle[SchedulerSession]


def push(
    session: SchedulerSession,
    request: Any,
    digests: list[bytes],
    local_blocks: int,
    now_ns: int,
    groups: Groups | None = None,
) -> Handle | None:
    """Hint at `digests`, in order, of more than local_blocks. None when there is no flag or no room.

    One per block; with several KV groups one per `hash_tokens`. Without room the cost does not depend on the number of
    blocks.
    """
    if groups is None:
        blocks = items = count = min(len(digests), session.flags.table_entries)
    else:
        count = len(digests)
        blocks, items = _whole(groups, count, local_blocks)
    if blocks <= local_blocks:
        return None
    headers = request.trace_headers
    return session.producer.hint(
        _HINT,
        PROTOCOL,
        _HINTED,
        items,
        count,
        blocks,
        local_blocks,
        request.num_prompt_tokens,
        now_ns,
        session,
        session.allocator,
        digests,
        request.request_id,
        request.priority,
        NO_TRACE if headers is None else trace_of(headers),
    )


def trace_of(headers: Mapping[str, str]) -> bytes:
    """Return the trace of a request's W3C Trace Context headers; NO_TRACE where it is not sampled, or not understood.

    https://www.w3.org/TR/trace-context/: `traceparent` is version-trace_id-parent_id-flags, in hex digits.
    """
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return bytes.fromhex(found[1] + found[2]) if found is not None and int(found[3], 16) & 1 else NO_TRACE


def room(
    session: SchedulerSession, request_id: str, digests: int, hash_bytes: int, groups: Groups | None = None
) -> bool:
    """Whether a hint at so many digests finds room now: a flag, its pages, and bytes in the ring."""
    if groups is None:
        items = digests = min(digests, session.flags.table_entries)
    else:
        _, items = _whole(groups, digests, 0)
    return session.producer.fits(hint_bytes(digests, hash_bytes, items, request_id)) and session.allocator.room(items)


def _whole(groups: Groups, digests: int, local_blocks: int) -> tuple[int, int]:
    """Return the blocks that these digests cover, and a bound for the items that they take in a slot table."""
    unit, tokens = groups.unit_tokens, digests * groups.hash_tokens
    return tokens // unit, groups.most_items(local_blocks * unit, tokens)


def look(handle: Handle) -> Flag:
    """Return the flag's state and absolute block count: one acquire load. Raises SegmentCorrupt."""
    flag = handle.session.flags.flag(handle.flag)
    if flag.generation != handle.generation or flag.state not in _MINE or flag.count > handle.blocks:
        raise SegmentCorrupt(
            f"flag cannot be so: flag={handle.flag} state={flag.state} count={flag.count} blocks={handle.blocks} "
            f"generation={flag.generation} expected={handle.generation}"
        )
    return flag


def ask(handle: Handle, now_ns: int) -> None:
    """Tell the daemon, once, that the scheduler waits for this request."""
    if handle.asked_ns == 0 and handle.session.producer.push(
        _ASK, encode_ask(Ask(handle.flag, handle.generation, now_ns))
    ):
        handle.asked_ns = now_ns


def claim(handle: Handle, seen: Flag, count: int, now_ns: int) -> bool:
    """Take blocks [0, count) of a HINTED or READY flag as seen; False when the daemon moved it meanwhile."""
    use = handle.generation << GENERATION_SHIFT
    expected, desired = use | seen.state << STATE_SHIFT | seen.count, use | _CLAIMED << STATE_SHIFT | count
    if not handle.session.flags.exchange(handle.flag, expected, desired):  # as _exchange: one call less
        return False
    handle.claimed_ns = now_ns
    return True


def unclaim(handle: Handle) -> None:
    """Let the daemon take the blocks back: the answer was not used in this pass."""
    seen = look(handle)
    if seen.state == _CLAIMED and not _exchange(handle, seen, _READY, seen.count):
        raise SegmentCorrupt(f"a claimed flag was moved: flag={handle.flag}")


def finish(handle: Handle, outcome: Outcome, *, loaded: range = range(0), loaded_ns: int = 0) -> None:
    """Give the flag back, whatever its state; `loaded`: the blocks that were copied.

    A full ring loses the nudge and the timeline, never the release.
    """
    for _ in range(_TRIES):
        seen = look(handle)
        if seen.state == _EXPIRED:
            after = _FREE
        else:
            after = _RELEASED if seen.state == _CLAIMED else _CANCELLED
        if _exchange(handle, seen, after, 0 if after == _FREE else seen.count):
            break
    else:
        raise SegmentCorrupt(f"flag does not rest: flag={handle.flag} generation={handle.generation}")
    session = handle.session
    session.allocator.give_back(handle.flag)
    if after != _FREE:
        times = (handle.asked_ns, handle.waited_ns, handle.claimed_ns, loaded_ns)
        done = Done(handle.flag, handle.generation, outcome, loaded.start, len(loaded), *times)
        session.producer.push(_DONE, encode_done(done))


def _exchange(handle: Handle, seen: Flag, state: int, count: int) -> bool:
    # SYNC flag: slot table and found word visible with the count
    use = handle.generation << GENERATION_SHIFT
    expected, desired = use | seen.state << STATE_SHIFT | seen.count, use | state << STATE_SHIFT | count
    return handle.session.flags.exchange(handle.flag, expected, desired)
