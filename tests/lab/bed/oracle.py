"""The bytes that belong into a KV cache, a keyed hash over (whole prefix, layer, head, token), and what else is there.

Pure: arrays in, arrays out.  A prefix is the running sum of mixed (token, position), so one number stands for all
tokens up to a position.  A row is what one layer keeps of one token and one head.  Its words are the mixed (prefix,
layer, head), each with a pattern of its column, so that each column of a row is checked.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Words = NDArray[Any]  # unsigned, 1 to 8 bytes each
Prefixes = NDArray[np.uint64]

_KEY = np.uint64(0x9E3779B97F4A7C15)
_TOKEN = np.uint64(0xD1342543DE82EF95)
_HEAD = np.uint64(0xA0761D6478BD642F)
NOTHING = np.uint64(0)
"""The prefix before the first token, without an adapter."""
SALT = np.uint64(0xE7037ED1A0B428DB)
"""Added to the prefixes of a request after a wrong block: neither its tokens nor its KV are right from there on."""

FIRST_TOKEN = 16
"""Tokens below are special ones: none is sampled."""
REMEMBERED = 20_000
"""Requests whose prefixes `Witness` knows."""


def mix(values: Any) -> Prefixes:
    """Return well mixed 64-bit values (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        found: Prefixes = np.asarray(values, dtype=np.uint64) + _KEY
        found ^= found >> np.uint64(30)
        found *= np.uint64(0xBF58476D1CE4E5B9)
        found ^= found >> np.uint64(27)
        found *= np.uint64(0x94D049BB133111EB)
        found ^= found >> np.uint64(31)
    return found


def key_of(name: str) -> np.uint64:
    """Return the number of a name, of a layer or a LoRA adapter; 0 for an empty one."""
    return (
        np.uint64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")) if name else NOTHING
    )


def prefixes(tokens: Sequence[int] | NDArray[Any], *, start: int = 0, before: np.uint64 = NOTHING) -> Prefixes:
    """Return the prefix at each of these tokens, the first of which is at position `start`, after prefix `before`."""
    ids = np.asarray(tokens, dtype=np.int64).astype(np.uint64)
    with np.errstate(over="ignore"):
        mixed = mix(ids * _TOKEN + np.arange(start, start + len(ids), dtype=np.uint64))
        return np.cumsum(mixed, dtype=np.uint64) + before


def token_after(prefix: np.uint64, vocab: int) -> int:
    """Return the token that is sampled after a prefix."""
    return FIRST_TOKEN + int(mix(prefix ^ _HEAD)) % (vocab - FIRST_TOKEN)


def answer(prompt: Sequence[int], count: int, vocab: int, *, before: np.uint64 = NOTHING) -> list[int]:
    """Return the tokens that an engine answers to a prompt, as long as no block is wrong."""
    prefix = prefixes(prompt, before=before)[-1]
    found: list[int] = []
    for position in range(len(prompt), len(prompt) + count):
        found.append(token_after(prefix, vocab))
        prefix = prefixes(found[-1:], start=position, before=prefix)[-1]
    return found


def pattern(words: int) -> Prefixes:
    return mix(np.arange(words, dtype=np.uint64) * _TOKEN)


def rows(prefix: Prefixes, layer: np.uint64, heads: Sequence[int], words: int, dtype: Any = np.uint64) -> Words:
    """Return what a layer keeps of tokens with these prefixes: (tokens, heads, words)."""
    with np.errstate(over="ignore"):
        offsets = layer + np.asarray(heads, dtype=np.uint64) * _HEAD
        mixed = mix(prefix[:, None] + offsets[None, :])
    size = np.dtype(dtype).itemsize
    found: Words = mixed[:, :, None] ^ pattern(-(-words * size // 8))[None, None, :]
    return found if size == 8 else found.view(dtype)[:, :, :words]


class Holder(Protocol):
    """Who has the prefixes of a request, `known` of them."""

    @property
    def prefix(self) -> Prefixes: ...
    @property
    def known(self) -> int: ...


class Witness:
    """Knows the prefixes of the last requests, to say whose KV was found where other KV belongs."""

    def __init__(self, layers: Mapping[str, np.uint64], heads: int) -> None:
        self._layers, self._heads = dict(layers), heads
        self._known: OrderedDict[str, Holder] = OrderedDict()

    def remember(self, request: str, holder: Holder) -> None:
        """Keep the holder of a request's prefixes, which may still grow."""
        self._known.pop(request, None)
        self._known[request] = holder
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def found(self, row: Words) -> str:
        """Say what a row, as `rows` writes it, is: zeros, KV of another token, parts of two, or nothing known."""
        if not row.any():
            return "nothing: all bytes are 0"
        whole = row.tobytes()[: row.nbytes // 8 * 8]
        mixed = np.frombuffer(whole, dtype=np.uint64) ^ pattern(len(whole) // 8)
        kinds, counts = np.unique(mixed, return_counts=True)
        if len(kinds) == 1:
            return self._whose(kinds[0]) or "bytes that the oracle never wrote"
        parts = [
            f"{count} words of {self._whose(kind) or 'unknown bytes'}"
            for kind, count in zip(kinds[:3], counts[:3], strict=True)
        ]
        return f"a torn row: {', '.join(parts)}{' and others' if len(kinds) > 3 else ''}"

    def _whose(self, mixed: Any) -> str:
        for request, holder in reversed(self._known.items()):
            prefix = holder.prefix[: holder.known]
            for layer, key in self._layers.items():
                found = rows(prefix, key, range(self._heads), 1) ^ pattern(1)
                hits = np.argwhere(found[:, :, 0] == mixed)
                if len(hits):
                    position, head = map(int, hits[0])
                    return f"KV of request {request}, token {position}, layer {layer}, head {head}"
        return ""
