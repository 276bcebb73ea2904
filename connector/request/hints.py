"""One hint and its flag, from the engine's side: does it fit, ask, stop, give back. Its handle looks and claims, in C.

Every function works on the handle's own epoch, so a handle of an ended epoch is harmless: its memory stays mapped
and nobody reads it.  A flag in a state that only this side writes raises SegmentCorrupt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...shmring import _atomics
from ...shmring.errors import SegmentCorrupt
from ...shmring.flags import Flag, pack
from ...shmring.wire.records import (
    NO_TRACE,
    Ask,
    Done,
    FlagState,
    Outcome,
    RecordKind,
    encode_ask,
    encode_done,
    hint_bytes,
)
from ..attach.epoch import SchedulerEpoch
from ..engine.geometry import Geometry

# The daemon publishes progress, or takes it back, while we exchange: each try loses against at most one such step.
_TRIES = 16
# Plain numbers: with cold caches, as in a hook of the engine, a member of an enum costs several looks more.
FREE, HINTED, READY, CLAIMED, RELEASED, CANCELLED, EXPIRED = map(int, FlagState)
_TRACEPARENT = re.compile("[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_ASK, _DONE = int(RecordKind.ASK), int(RecordKind.DONE)


# A flag this engine holds, and its hint: `epoch`, `flag`, `generation`, `blocks`, `local_blocks`, and `digests`, of
# which the first ones were hinted.  Times are CLOCK_MONOTONIC ns, 0 where the event did not happen: `asked_ns`,
# `claimed_ns`, and `waited_ns`, how long the scheduler waited for it.  `missing`, `cost_ns` and
# `spared_ns`: as in Done.
# `stopped`: the daemon orders no more blocks.  In C (_handle.c), both raising SegmentCorrupt:
#
# * `look()`: the flag, by one acquire load.
# * `claim(state, count, taken, start, stop, now_ns)`: take blocks [0, taken) of a HINTED or READY flag as seen.
#   Return the slots of entries [start, stop), read under the claim; None when the daemon moved the flag meanwhile.
Handle = _atomics.Handle[SchedulerEpoch]


def trace_of(headers: Mapping[str, str]) -> bytes:
    """Return the trace of a request's W3C Trace Context headers; NO_TRACE where it is not sampled, or not understood.

    https://www.w3.org/TR/trace-context/: `traceparent` is version-trace_id-parent_id-flags, in hex digits.
    """
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    return bytes.fromhex(found[1] + found[2]) if found is not None and int(found[3], 16) & 1 else NO_TRACE


def fits(epoch: SchedulerEpoch, request: Any, usable: int, geometry: Geometry) -> bool:
    """Whether a hint at so many blocks finds room now: a flag, its pages, and bytes in the ring."""
    names = geometry.groups.names(usable)
    length = hint_bytes(geometry.groups.digests(usable), len(request.block_hashes[0]), names, request.request_id)
    return epoch.producer.fits(length) and epoch.flags.room(names)


def ask(handle: Handle, now_ns: int) -> None:
    """Tell the daemon, once, that the scheduler waits for this request."""
    if handle.asked_ns == 0 and handle.epoch.producer.push(
        _ASK, encode_ask(Ask(handle.flag, handle.generation, now_ns))
    ):
        handle.asked_ns = now_ns


def stop(handle: Handle, now_ns: int) -> bool:
    """Tell the daemon to order no more blocks for this hint; False when the ring is full, and then nothing changes."""
    ask = Ask(handle.flag, handle.generation, now_ns, stop=True)
    handle.stopped = handle.epoch.producer.push(_ASK, encode_ask(ask))
    return handle.stopped


def unclaim(handle: Handle) -> None:
    """Let the daemon take the blocks back: the answer was not used in this pass."""
    seen = handle.look()
    if seen.state == CLAIMED and not _exchange(handle, seen, READY, seen.count):
        raise SegmentCorrupt(f"a claimed flag was moved: flag={handle.flag}")


def finish(handle: Handle, outcome: Outcome, *, loaded: range = range(0), loaded_ns: int = 0) -> None:
    """Give the flag back, whatever its state; `loaded`: the blocks that were copied.

    A full ring loses the nudge and the timeline, never the release.
    """
    for _ in range(_TRIES):
        seen = handle.look()
        if seen.state == EXPIRED:
            after = FREE
        else:
            after = RELEASED if seen.state == CLAIMED else CANCELLED
        if _exchange(handle, seen, after, 0 if after == FREE else seen.count):
            break
    else:
        raise SegmentCorrupt(f"flag does not rest: flag={handle.flag} generation={handle.generation}")
    epoch = handle.epoch
    epoch.flags.give_back(handle.flag)
    if after != FREE:
        times = (handle.asked_ns, handle.waited_ns, handle.claimed_ns, loaded_ns)
        verdict = handle.missing, handle.cost_ns, handle.spared_ns if loaded else 0
        done = Done(handle.flag, handle.generation, outcome, loaded.start, len(loaded), *times, *verdict)
        epoch.producer.push(_DONE, encode_done(done))


def _exchange(handle: Handle, seen: Flag, state: int, count: int) -> bool:
    # SYNC flag: slot table and found word visible with the count
    expected, desired = pack(*seen), pack(seen.generation, state, count)
    return handle.epoch.flags.exchange(handle.flag, expected, desired)
