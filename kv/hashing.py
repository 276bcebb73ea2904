"""Hashes of a prompt's blocks as vLLM makes them, for processes without vLLM.

vLLM 0.31 to 0.33 (vllm/v1/core/kv_cache_utils.py, vllm/utils/hashing.py): a block's hash is H((hash of the block
before, token ids, extra keys)).  Before the first block is the engine's start, H(seed).  Extra keys are None, but in
the first block of a request with a salt they are (("cache_salt", salt),).  H serializes with pickle or as canonical
CBOR, and hashes that with SHA-256 or XXH3.  Images and LoRA adapters are extra keys too; they are not made here.

Other hashes would name nothing in the store.  So an engine sends a probe, its own hash of blocks that both sides know.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

START = "vllm-none-hash"  # what an engine's first block follows, where nothing else is set
RANDOM = "random in each process"
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
# The probe is the hash of the last block of these tokens with this salt.
PROBE_TOKENS, PROBE_BLOCK_TOKENS, PROBE_SALT = (1, 2, 300, 4, 70_000, 6), 3, "salt"
_Hash = Callable[[Any], bytes]


class CannotHash(ValueError):
    """Prompts cannot be hashed as the engine does; the text is one line."""


class BlockHasher:
    """Hashes prompts for one engine, which said its `algorithm`, `start` and `probe`, by `block_tokens`.

    Raises CannotHash.
    """

    def __init__(self, algorithm: str, start: bytes, block_tokens: int, probe: bytes) -> None:
        if not algorithm:
            raise CannotHash("prompts cannot be hashed: the engine did not say how it does; give block hashes")
        if not (start and probe):
            raise CannotHash(
                f"prompts cannot be hashed: the engine's {algorithm} begins with a number that is random in each "
                "process; set PYTHONHASHSEED for the engine, or give block hashes"
            )
        self._hash, self._start, self._block_tokens = _function(algorithm), start, block_tokens
        *_, last = _chain(self._hash, start, PROBE_TOKENS, PROBE_BLOCK_TOKENS, PROBE_SALT)
        if last != probe:
            raise CannotHash(
                f"prompts are hashed otherwise here than in the engine, whose vLLM may be newer: algorithm={algorithm} "
                f"here={last.hex()} engine={probe.hex()}; upgrade kvprefetch, or give block hashes"
            )
        self.digest_bytes = len(last)

    def __call__(self, token_ids: Sequence[int], cache_salt: str | None = None) -> bytes:
        """Return the digests, joined, of the blocks that a request could load: full ones, but never the last token's.

        An empty salt is none, as in vLLM.
        """
        usable = token_ids[: max(0, len(token_ids) - 1)]
        return b"".join(_chain(self._hash, self._start, usable, self._block_tokens, cache_salt))


def seed_of(algorithm: str, start: bytes) -> str:
    """Return PYTHONHASHSEED as one may show and compare it, from an engine's start; nothing where it is not set."""
    with contextlib.suppress(CannotHash):
        if start == _function(algorithm)(START):
            return ""
    return f"set: {hashlib.sha256(start).hexdigest()[:8]}" if start else RANDOM


def block_digests(tokens: Sequence[int], block_tokens: int) -> Iterator[bytes]:
    """Yield the digests of a prompt's full blocks as vLLM has them by default."""
    hashed = _function("sha256")
    return _chain(hashed, hashed(START), tokens, block_tokens, None)


def _chain(hashed: _Hash, start: bytes, tokens: Sequence[int], size: int, salt: str | None) -> Iterator[bytes]:
    """Yield the digest of each full block of `size` tokens."""
    digest, extra = start, (("cache_salt", salt),) if salt else None
    for end in range(size, len(tokens) + 1, size):
        digest, extra = hashed((digest, tuple(tokens[end - size : end]), extra)), None
        yield digest


def _function(algorithm: str) -> _Hash:
    """Return vLLM's hash function of this name. Raises CannotHash."""
    if algorithm not in ALGORITHMS:
        raise CannotHash(
            f"prompts cannot be hashed: unknown algorithm={algorithm!r} known={','.join(ALGORITHMS)}; give block hashes"
        )
    try:
        if algorithm.endswith("_cbor"):
            import cbor2

            encode = functools.partial(cbor2.dumps, canonical=True)
        else:
            encode = functools.partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)
        if algorithm.startswith("xxhash"):
            from xxhash import xxh3_128_digest

            return lambda value: xxh3_128_digest(encode(value))
    except ImportError as error:
        raise CannotHash(
            f"prompts cannot be hashed with {algorithm}, which needs the package {error.name}: install it, or give "
            "block hashes"
        ) from None
    return lambda value: hashlib.sha256(encode(value)).digest()
