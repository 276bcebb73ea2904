"""The bytes of a HINT record by another writer than the engine's, which is in C; also of hints that no engine sends."""

from __future__ import annotations

import struct

from kvprefetch.shmring.wire.records import HINT_HEAD, MAX_REQUEST_ID_BYTES, PROTOCOL, Hint


def encode_hint(hint: Hint) -> bytes:
    name = hint.request_id.encode(errors="replace")[:MAX_REQUEST_ID_BYTES]
    head = HINT_HEAD.pack(
        PROTOCOL,
        hint.early,
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
    return b"".join((head, name, struct.pack(f"<{len(hint.pages)}I", *hint.pages), hint.hashes))
