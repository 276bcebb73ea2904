"""Hint-ring records and flag states: the protocol of engine and daemon in shared memory.

`PROTOCOL` changes with every change of a record, a state or an engine's message; two sides with different numbers
refuse each other at the hello.

Flag states, and which side may make each transition (a compare-and-swap with the generation):

    engine   FREE -> HINTED                          a hint is about to be pushed
    daemon   HINTED,k -> HINTED,k'   -> READY,n      blocks [local_blocks, k') staged; READY: no more will come
    daemon   HINTED | READY -> HINTED,0              taken back: others need the room; the blocks are fetched again
    engine   HINTED | READY -> CLAIMED,n             the engine answers n blocks (n <= count) and owns them
    engine   CLAIMED -> READY                        the answer was not used in this pass
    engine   CLAIMED -> RELEASED                     every rank copied the blocks (or none ever will)
    engine   HINTED | READY -> CANCELLED             the request needs no blocks any more
    daemon   HINTED | READY -> EXPIRED               void: the engine's weights change
    engine   EXPIRED -> FREE                         seen
    daemon   RELEASED | CANCELLED -> FREE            unpinned
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..layout import PAGE_ENTRIES

PROTOCOL = 17
MAX_REQUEST_ID_BYTES = 256
MAX_HASH_BYTES = 64  # the longest digest that vLLM's hash algorithms make has 32
MAX_SAVED_BLOCKS = 4096  # of one SAVED record; the slots of one put fit a control message


NO_TRACE = bytes(24)
NO_SESSION = bytes(16)


class ProtocolError(Exception):
    """A record or message breaks the protocol; the text has field, value and bound."""


class FlagState(enum.IntEnum):
    """States of a completion flag; the module's docstring has the transitions."""

    FREE = 0
    HINTED = 1
    READY = 2
    CLAIMED = 3
    RELEASED = 4
    CANCELLED = 5
    EXPIRED = 6


class RecordKind(enum.IntEnum):
    HINT = 1
    ASK = 2
    DONE = 3
    SAVED = 4
    USED = 5


class Outcome(enum.IntEnum):
    """The end of a hinted request for the engine (DONE records, `request.done` log lines).

    TIMED_OUT: nothing was ready when its wait ran out. RECOMPUTED: nothing was ready, and recomputing was sooner.
    LOCAL_GAP: the engine evicted local blocks that the hint had counted on.
    """

    LOADED = 0
    MISS = 1
    TIMED_OUT = 2
    ABORTED = 3
    UNUSED = 4
    LOCAL_GAP = 5
    VOIDED = 6
    RECOMPUTED = 7


# As Pusher.hint writes it (shmring/_ring.c); test_hint_in_c.py compares both.
# version (behind it a byte of early and, from bit 1 on, named_by), hash bytes, request-id bytes, pages, flag, blocks,
# local blocks, priority, prompt tokens, generation, arrival ns, trace id and parent span id, digest of the session's id
NAMED_BY = ("", "cache_salt", "adapter", "cache_salt and adapter")
HINT_HEAD, EARLY_AT = struct.Struct("<BxHHHIIIiIQQ24s16s"), 1
# version, stop, flag, generation, asked ns
_ASK = struct.Struct("<BBxxIQQ")
# version, outcome, flag, loaded from, loaded blocks, missing, generation; asked, waited, claimed, loaded and cost ns
_DONE = struct.Struct("<BBxxIIIIxxxxQQQQQQQ")
# version, hash bytes, blocks
_USED = struct.Struct("<BxHI")
# version, bytes of a name, dropped, blocks, reset generation, save id
_SAVED = struct.Struct("<BxHBxxxIxxxxQQ")


class Hint(NamedTuple):
    """A request arrived: `hashes` holds raw digests of `hash_bytes`, one per `hash_tokens`, in order: `Groups.digests`.

    A block has the tokens of `Groups.unit_tokens`.  Blocks [0, local_blocks) were in the engine's own prefix cache.
    Times are CLOCK_MONOTONIC nanoseconds.  `pages` of the segment are the flag's slot table, as many as entries for all
    blocks that are not local would need, in every KV group; the entries are those of the blocks to load, group by
    group.  `trace`: the request's place in a trace, as W3C's Trace Context has it: 16 bytes of trace id and 8 of the
    parent span's; zeros without one.  `session`: as `session_digest` has it; zeros without one.  `early`: the scheduler
    does not have the request yet; it says when it does (Handle.adopt).
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
    hashes: bytes
    pages: Sequence[int]
    trace: bytes = NO_TRACE
    session: bytes = NO_SESSION
    early: bool = False
    named_by: int = 0  # what names its blocks but tokens: of NAMED_BY


class Ask(NamedTuple):
    """The scheduler reached the request and found it pending.

    `stop`: another thing, that recomputing overtakes the fetch: order nothing more for the request. What is under way
    is still of use to it, unless it is claimed.
    """

    flag: int
    generation: int
    asked_ns: int
    stop: bool = False


class Done(NamedTuple):
    """The engine finished with a flag (now RELEASED or CANCELLED); the record carries its half of the timeline.

    Blocks [loaded_from, loaded_from + loaded_blocks) were copied out of staging. A time is 0 where the event did not
    happen. `waited_ns` is the scheduler's wait since `asked_ns`, which may have pauses. `missing` blocks were not there
    when the engine ceased to wait for all, and recomputing them costs it `cost_ns`; 0: it did not.  `spared_ns`: what
    computing the loaded blocks would have taken; 0: not known.
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
    missing: int = 0
    cost_ns: int = 0
    spared_ns: int = 0


class Saved(NamedTuple):
    """Every rank copied these blocks into their save slots; with `dropped` none did, and the slots come back.

    A block's name is its digest and, in a last byte, the number of its KV group.  At most MAX_SAVED_BLOCKS.
    """

    save_id: int
    reset_generation: int
    dropped: bool
    slots: list[int]
    names: list[bytes]


class Used(NamedTuple):
    """A request uses so many leading blocks of the engine's own cache, and no hint says so. `hashes`: as in a hint.

    The daemon asks the store for them, so that it keeps them; the engine repeats this for a prefix twice a lease.
    """

    blocks: int
    hash_bytes: int
    hashes: bytes


def session_digest(session_id: str) -> bytes:
    """Return the 16 bytes that stand for a session's id in a hint."""
    return hashlib.blake2b(session_id.encode(errors="replace"), digest_size=len(NO_SESSION)).digest()


def hint_bytes(digests: int, hash_bytes: int, items: int, request_id: str | None = None) -> int:
    """Return the size of a HINT record's payload, with a slot table for so many items; without an id its bound."""
    id_bytes = MAX_REQUEST_ID_BYTES if request_id is None else len(request_id.encode(errors="replace"))
    return (
        HINT_HEAD.size + min(id_bytes, MAX_REQUEST_ID_BYTES) - (-items // PAGE_ENTRIES) * 4 + digests * hash_bytes
    )  # as pages_of


def decode_hint(payload: memoryview) -> Hint:
    """Parse a HINT record, whose engine may write to it meanwhile. Raises ProtocolError."""
    _, hash_bytes, id_bytes, page_count, *numbers, trace, session = _unpack(HINT_HEAD, payload)
    flag, blocks, local, priority, tokens, generation, arrival = numbers
    pages_at = HINT_HEAD.size + id_bytes
    hashes_at = pages_at + 4 * page_count
    size = len(payload) - hashes_at
    if not 1 <= hash_bytes <= MAX_HASH_BYTES or size <= 0 or id_bytes > MAX_REQUEST_ID_BYTES:
        raise ProtocolError(f"hint size differs: bytes={len(payload)} hashes_at={hashes_at} hash_bytes={hash_bytes}")
    if local > blocks or blocks == 0 or page_count == 0:
        raise ProtocolError(f"hint out of bounds: local_blocks={local} blocks={blocks} pages={page_count}")
    name = bytes(payload[HINT_HEAD.size : pages_at]).decode(errors="replace")
    if not name.isprintable():  # it is for logs and terminals
        name = "".join(each if each.isprintable() else "?" for each in name)
    pages = struct.unpack_from(f"<{page_count}I", payload, pages_at)
    hashes = bytes(payload[hashes_at:])
    place = flag, generation, name, blocks, local, priority, tokens, arrival
    return Hint(*place, hash_bytes, hashes, pages, trace, session, bool(payload[EARLY_AT] & 1), payload[EARLY_AT] >> 1)


def encode_ask(ask: Ask) -> bytes:
    return _ASK.pack(PROTOCOL, ask.stop, ask.flag, ask.generation, ask.asked_ns)


def decode_ask(payload: memoryview) -> Ask:
    _, stop, flag, generation, asked = _unpack(_ASK, payload)
    return Ask(flag, generation, asked, bool(stop))


def encode_done(done: Done) -> bytes:
    flag, generation, outcome, start, blocks, asked, waited, claimed, loaded, missing, *costs = done
    times = (asked, waited, claimed, loaded, *costs)
    return _DONE.pack(PROTOCOL, outcome, flag, start, blocks, missing, generation, *times)


def decode_done(payload: memoryview) -> Done:
    _, outcome, flag, start, blocks, missing, generation, *times = _unpack(_DONE, payload)
    asked, waited, claimed, loaded, cost, spared = times
    try:
        ended = Outcome(outcome)
        return Done(flag, generation, ended, start, blocks, asked, waited, claimed, loaded, missing, cost, spared)
    except ValueError:
        raise ProtocolError(f"unknown outcome: outcome={outcome}") from None


def encode_saved(saved: Saved) -> bytes:
    count, name_bytes = len(saved.slots), len(saved.names[0]) if saved.names else 0
    head = _SAVED.pack(PROTOCOL, name_bytes, saved.dropped, count, saved.reset_generation, saved.save_id)
    return b"".join((head, struct.pack(f"<{count}I", *saved.slots), *saved.names))


def decode_saved(payload: memoryview) -> Saved:
    _, name_bytes, dropped, blocks, reset_generation, save_id = _unpack(_SAVED, payload)
    wanted = _SAVED.size + blocks * 4 + (0 if dropped else blocks * name_bytes)
    if len(payload) != wanted or name_bytes > MAX_HASH_BYTES + 1 or (not dropped and name_bytes < 2):
        raise ProtocolError(f"saved size differs: bytes={len(payload)} expected={wanted} name_bytes={name_bytes}")
    if blocks > MAX_SAVED_BLOCKS:
        raise ProtocolError(f"too many blocks are saved at once: blocks={blocks} max={MAX_SAVED_BLOCKS}")
    slots = list(struct.unpack_from(f"<{blocks}I", payload, _SAVED.size))
    starts = [] if dropped else range(_SAVED.size + blocks * 4, wanted, name_bytes)
    names = [bytes(payload[start : start + name_bytes]) for start in starts]
    return Saved(save_id, reset_generation, bool(dropped), slots, names)


def encode_used(blocks: int, hashes: Sequence[bytes]) -> bytes:
    return b"".join((_USED.pack(PROTOCOL, len(hashes[0]), blocks), *hashes))


def decode_used(payload: memoryview) -> Used:
    """Parse a USED record. Raises ProtocolError."""
    _, hash_bytes, blocks = _unpack(_USED, payload)
    size = len(payload) - _USED.size
    if not 1 <= hash_bytes <= MAX_HASH_BYTES or size <= 0 or size % hash_bytes or blocks == 0:
        raise ProtocolError(f"used size differs: bytes={len(payload)} hash_bytes={hash_bytes} blocks={blocks}")
    return Used(blocks, hash_bytes, bytes(payload[_USED.size :]))


def _unpack(record: struct.Struct, payload: memoryview) -> tuple[Any, ...]:
    """Return the fields, after a check of the first: the version."""
    if len(payload) < record.size:
        raise ProtocolError(f"record too short: bytes={len(payload)} min={record.size}")
    fields = record.unpack_from(payload, 0)
    if fields[0] != PROTOCOL:
        raise ProtocolError(f"record protocol differs: protocol={fields[0]} expected={PROTOCOL}")
    return fields
