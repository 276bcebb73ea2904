"""Hashes prompts as each attached engine does."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from ...kv.hashing import BlockHasher, CannotHash
from ...shmring.wire.admin import Engine
from .envelope import Bad

KEPT = 64  # hashers, one for each way to hash


class Hashers:
    """Any thread may call."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: dict[tuple[str, str, str, int], BlockHasher] = {}

    def hash(self, engine: Engine, token_ids: Sequence[int], cache_salt: str | None) -> tuple[bytes, int]:
        """Return the digests of the prompt's blocks, joined, and the bytes of each. Raises Bad."""
        key = engine.hash_algorithm, engine.hash_start, engine.hash_probe, engine.hash_tokens
        with self._lock:
            hasher = self._known.get(key)
        if hasher is None:
            algorithm, start, probe, tokens = key
            try:
                hasher = BlockHasher(algorithm, bytes.fromhex(start), tokens, bytes.fromhex(probe))
            except CannotHash as error:
                raise Bad(422, f"engine {engine.engine}: {error}") from None
            with self._lock:
                self._known = {**dict(list(self._known.items())[-KEPT:]), key: hasher}
        return hasher(token_ids, cache_salt), hasher.digest_bytes
