"""Sizes as people write them, in the configuration and in messages about it: 512MiB, 4GB, 65536.

pydantic's ByteSize refuses `8Gi` and takes `4GB x` for 4GB: it would need checks of its own, and save no line.
"""

from __future__ import annotations

import re
from decimal import Decimal

_POWERS = "kmgt"
_SIZE = re.compile(rf"(\d+(?:\.\d+)?)\s*(?:([{_POWERS}])(i?))?b?", re.IGNORECASE)


def parse_size(text: object) -> int:
    """Return the bytes of a size such as 512MiB, 4GB or 65536. Raises ValueError for other text."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise ValueError("should be a size such as 512MiB, 4GB or 65536")
    number, unit, binary = match.groups("")
    power = _POWERS.index(unit.lower()) + 1 if unit else 0
    return int(Decimal(number) * (1024 if binary else 1000) ** power)


def size_text(count: int) -> str:
    """Return the shortest text that `parse_size` reads as exactly these bytes: 1GiB, 1000."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count and count % (1 << power) == 0:
            return f"{count >> power}{unit}"
    return str(count)


def size(count: float) -> str:
    """Format bytes for a screen, in the units of `size_text`, rounded: 512 B, 7.9 MiB, 1 GiB."""
    units = iter(("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if round(abs(count), 1) < 1024:
            return f"{count:.1f}".removesuffix(".0") + f" {unit}"
        count /= 1024
    return f"{count:.1f}".removesuffix(".0") + " TiB"


def whole_mib(count: int) -> str:
    """Return the text of a measured size, rounded down: 3071MiB."""
    return size_text(max(0, count) >> 20 << 20)
