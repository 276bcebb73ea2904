"""Sizes as people write them, in the configuration and in what is said about it: 512MiB, 4GB, 65536."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30,
          "ti": 1 << 40}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)


def parse_size(text: object) -> int:
    """Bytes of a size such as 512MiB, 4GB or 65536. ValueError when it is none."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text).strip())
    if match is None or match.group(2).lower() not in _UNITS:
        raise ValueError("should be a size such as 512MiB, 4GB or 65536")
    return int(Decimal(match.group(1)) * _UNITS[match.group(2).lower()])


def size_text(count: int) -> str:
    """The shortest text that `parse_size` reads as so many bytes without rounding: 1GiB, 1000."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count and count % (1 << power) == 0:
            return f"{count >> power}{unit}"
    return str(count)


def whole_mib(count: int) -> str:
    """What was measured, beside what was written: rounded down, 3071MiB."""
    return size_text(max(0, count) >> 20 << 20)
