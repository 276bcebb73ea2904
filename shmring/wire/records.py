"""What engine and daemon say to each other through shared memory: hint-ring records and the meaning of flag states.

Both sides import this module and attach.py; the rest of shmring does not (it knows nothing of KV).  `PROTOCOL`
changes whenever a record, a state or a message does; two sides of different protocol refuse each other at the start.

Flag states and who may make each transition (always a compare-and-swap, always carrying the generation):

    engine   FREE -> HINTED                          a hint is about to be pushed
    daemon   HINTED,k -> HINTED,k'   -> READY,n      blocks [local_blocks, k') staged; READY: no more will come
    daemon   HINTED | READY -> HINTED,0              taken back: the room was needed; the blocks will be fetched again
    engine   HINTED | READY -> CLAIMED,n             the engine answers n blocks (n <= count); they are its
    engine   CLAIMED -> READY                        the answer was not used in this pass
    engine   CLAIMED -> RELEASED                     every rank copied the blocks (or none ever will)
    engine   HINTED | READY -> CANCELLED             the request does not want them any more
    daemon   HINTED | READY -> EXPIRED               void: the engine's weights change
    engine   EXPIRED -> FREE                         seen
    engine   HINTED -> FREE                          the ring was full: the hint was never pushed
    daemon   RELEASED | CANCELLED -> FREE            unpinned
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

PROTOCOL = 7
MAX_REQUEST_ID_BYTES = 512
GROUPS = 1  # of KV caches of one engine that are served


class ProtocolError(Exception):
    """A record or message that does not follow the protocol; the text names field, value and bound."""


class FlagState(enum.IntEnum):
    """States of a completion flag; the transitions stand in the module's docstring."""

    FREE = 0
    HINTED = 1
    READY = 2
    CLAIMED = 3
    RELEASED = 4
    CANCELLED = 5
    EXPIRED = 6


class RecordKind(enum.IntEnum):
    """Kinds of hint-ring records."""

    HINT = 1
    ASK = 2
    DONE = 3
    SAVED = 4


class Outcome(enum.IntEnum):
    """How a hinted request ended for the engine (DONE records, `request.done` log lines).

    LATE: nothing was ready at the bound of its wait; RECOMPUTED: nothing was ready, and recomputing was sooner.
    """

    LOADED = 0
    MISS = 1
    LATE = 2
    ABORTED = 3
    UNUSED = 4
    EVICTED = 5
    LOST = 6
    RECOMPUTED = 7


# version, groups, hash bytes, request-id bytes, flag, blocks, local blocks, priority, prompt tokens, generation,
# arrival ns
_HINT = struct.Struct("<BBHHxxIIIiIQQ")
_ASK = struct.Struct("<BxxxIQQ")
# version, outcome, flag, loaded from, loaded blocks, generation, asked ns, waited ns, claimed ns, loaded ns
_DONE = struct.Struct("<BBxxIIIQQQQQ")
# version, groups, hash bytes, dropped, blocks, reset generation, save id
_SAVED = struct.Struct("<BBHBxxxIxxxxQQ")


class Hint(NamedTuple):
    """A request arrived: `hashes` holds `blocks` raw digests of `hash_bytes`, one per block_size chunk, in order.

    Blocks [0, local_blocks) were in the engine's own prefix cache; times are CLOCK_MONOTONIC nanoseconds.
    """

    flag: int
    generation: int
    request_id: str
    blocks: int
    local_blocks: int
    priority: int
    prompt_tokens: int
    arrival_ns: int
    hash_bytes: int
    hashes: memoryview

    def digest(self, block: int) -> bytes:
        start = block * self.hash_bytes
        return bytes(self.hashes[start : start + self.hash_bytes])


class Ask(NamedTuple):
    """The scheduler reached the request and found it pending."""

    flag: int
    generation: int
    asked_ns: int


class Done(NamedTuple):
    """The engine is done with a flag (now RELEASED or CANCELLED): a nudge, and the engine's half of the timeline.

    Blocks [loaded_from, loaded_from + loaded_blocks) were copied out of staging; times are 0 where the event did not
    happen. `waited_ns` is a duration: how long the scheduler waited, from `asked_ns` on and not always in one piece.
    """

    flag: int
    generation: int
    outcome: Outcome
    loaded_from: int
    loaded_blocks: int
    asked_ns: int
    waited_ns: int
    claimed_ns: int
    loaded_ns: int


class Saved(NamedTuple):
    """Every rank copied these blocks into their save slots; with `dropped` none did, and the slots come back."""

    save_id: int
    reset_generation: int
    dropped: bool
    slots: list[int]
    hashes: list[bytes]


def encode_hint(hint: Hint) -> tuple[bytes, bytes, memoryview]:
    """The parts of a HINT record, in order; the hashes are not copied."""
    request_id = hint.request_id.encode(errors="replace")[:MAX_REQUEST_ID_BYTES]
    head = _HINT.pack(
        PROTOCOL, GROUPS, hint.hash_bytes, len(request_id), hint.flag, hint.blocks, hint.local_blocks,
        max(-(1 << 31), min((1 << 31) - 1, hint.priority)), hint.prompt_tokens, hint.generation, hint.arrival_ns,
    )  # fmt: skip
    return head, request_id, hint.hashes


def decode_hint(payload: memoryview) -> Hint:
    """Parse a HINT record; `hashes` is a view into it. Raises ProtocolError."""
    _, groups, hash_bytes, id_bytes, flag, blocks, local, priority, tokens, generation, arrival = _unpack(
        _HINT, payload
    )
    _check_groups(groups)
    wanted = _HINT.size + id_bytes + blocks * hash_bytes
    if not 1 <= hash_bytes <= 64 or len(payload) != wanted or id_bytes > MAX_REQUEST_ID_BYTES:
        raise ProtocolError(f"hint size differs: bytes={len(payload)} expected={wanted} hash_bytes={hash_bytes}")
    if local > blocks or blocks == 0:
        raise ProtocolError(f"local_blocks out of bounds: local_blocks={local} blocks={blocks}")
    name = bytes(payload[_HINT.size : _HINT.size + id_bytes]).decode(errors="replace")
    hashes = payload[_HINT.size + id_bytes :]
    return Hint(flag, generation, name, blocks, local, priority, tokens, arrival, hash_bytes, hashes)


def encode_ask(ask: Ask) -> bytes:
    return _ASK.pack(PROTOCOL, ask.flag, ask.generation, ask.asked_ns)


def decode_ask(payload: memoryview) -> Ask:
    _, flag, generation, asked = _unpack(_ASK, payload)
    return Ask(flag, generation, asked)


def encode_done(done: Done) -> bytes:
    return _DONE.pack(
        PROTOCOL, done.outcome, done.flag, done.loaded_from, done.loaded_blocks, done.generation, done.asked_ns,
        done.waited_ns, done.claimed_ns, done.loaded_ns,
    )  # fmt: skip


def decode_done(payload: memoryview) -> Done:
    _, outcome, flag, start, blocks, generation, asked, waited, claimed, loaded = _unpack(_DONE, payload)
    try:
        return Done(flag, generation, Outcome(outcome), start, blocks, asked, waited, claimed, loaded)
    except ValueError:
        raise ProtocolError(f"unknown outcome: outcome={outcome}") from None


def encode_saved(saved: Saved) -> bytes:
    hash_bytes = len(saved.hashes[0]) if saved.hashes else 0
    head = _SAVED.pack(
        PROTOCOL, GROUPS, hash_bytes, saved.dropped, len(saved.slots), saved.reset_generation, saved.save_id
    )
    return b"".join((head, struct.pack(f"<{len(saved.slots)}I", *saved.slots), *saved.hashes))


def decode_saved(payload: memoryview) -> Saved:
    _, groups, hash_bytes, dropped, blocks, reset_generation, save_id = _unpack(_SAVED, payload)
    _check_groups(groups)
    wanted = _SAVED.size + blocks * 4 + (0 if dropped else blocks * hash_bytes)
    if len(payload) != wanted or hash_bytes > 64 or (not dropped and hash_bytes == 0):
        raise ProtocolError(f"saved size differs: bytes={len(payload)} expected={wanted} hash_bytes={hash_bytes}")
    slots = list(struct.unpack_from(f"<{blocks}I", payload, _SAVED.size))
    hashes: list[bytes] = []
    if not dropped:
        base = _SAVED.size + blocks * 4
        hashes = [bytes(payload[base + i * hash_bytes : base + (i + 1) * hash_bytes]) for i in range(blocks)]
    return Saved(save_id, reset_generation, bool(dropped), slots, hashes)


def _unpack(record: struct.Struct, payload: memoryview) -> tuple[Any, ...]:
    """The fields, of which the first, the version, is right."""
    if len(payload) < record.size:
        raise ProtocolError(f"record too short: bytes={len(payload)} min={record.size}")
    fields = record.unpack_from(payload, 0)
    if fields[0] != PROTOCOL:
        raise ProtocolError(f"record protocol differs: protocol={fields[0]} expected={PROTOCOL}")
    return fields


def _check_groups(groups: int) -> None:
    if groups != GROUPS:
        raise ProtocolError(f"only one KV-cache group is served: groups={groups} max={GROUPS}")
