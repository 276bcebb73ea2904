"""Checksums behind values: xxh3 of 64 bits, for stores and disks that lose bits without a word."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator

import xxhash

SUM_BYTES = 8


def write(values: Iterable[tuple[int, int, int]]) -> None:
    """Write the checksum of each value: its address, its bytes, and the address of its checksum."""
    for address, size, place in values:
        ctypes.memmove(place, _digest(address, size), SUM_BYTES)


def wrong(values: Iterable[tuple[int, int, int]]) -> Iterator[int]:
    """Yield the numbers of the values that have another checksum."""
    for number, (address, size, place) in enumerate(values):
        if _digest(address, size) != ctypes.string_at(place, SUM_BYTES):
            yield number


def _digest(address: int, size: int) -> bytes:
    return xxhash.xxh3_64_digest((ctypes.c_char * size).from_address(address))
