"""The bytes of a HINT record by another writer than the engine's, which is in C; also of hints that no engine sends."""

from __future__ import annotations

import struct

from kvprefetch.shmring.wire.records import EARLY_AT, HINT_HEAD, MAX_REQUEST_ID_BYTES, PROTOCOL, Hint


def encode_hint(hint: Hint) -> bytes:
    name = hint.request_id.encode(errors="replace")[:MAX_REQUEST_ID_BYTES]
    head = bytearray(HINT_HEAD.size)
    HINT_HEAD.pack_into(
        head,
        0,
        PROTOCOL,
        hint.hash_bytes,
        len(name),
        len(hint.pages),
        hint.flag,
        hint.blocks,
        hint.local_blocks,
        max(-(1 << 31), min(hint.priority, (1 << 31) - 1)),
        hint.prompt_tokens,
        hint.generation,
        hint.arrival_ns,
        hint.trace,
        hint.session,
    )
    head[EARLY_AT] = hint.early
    return b"".join((head, name, struct.pack(f"<{len(hint.pages)}I", *hint.pages), hint.hashes))
