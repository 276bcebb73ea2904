"""What a Mooncake result code means for one key: the one table of codes."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from .give_up import UNDER_WAY

LIBRARIES = "on Debian install libibverbs1 libcurl4 libnuma1"  # what Mooncake's own need


class ErrorClass(enum.Enum):
    """What the caller should make of one key's result."""

    OK = "ok"
    MISS = "miss"
    RETRY = "retry"
    LOOKUP_AGAIN = "lookup_again"
    TRANSIENT = "transient"
    TRANSFER = "transfer"  # the owner of these bytes does not deliver; says nothing of other owners, or of the master
    UNDER_WAY = "under_way"  # as TRANSFER, and Mooncake may still use the memory: nobody may use it again (give_up.py)
    CORRUPT = "corrupt"
    BUG = "bug"
    NO_SPACE = "no_space"
    WRITE = "write"
    FOREIGN = "foreign"  # an object of another size lies under our key; no Mooncake code says so, `get_into` finds out


_CLASSES: dict[int, ErrorClass] = {
    code: kind
    for kind, codes in {
        ErrorClass.MISS: (-704, -712),
        ErrorClass.RETRY: (-703, -714),
        ErrorClass.LOOKUP_AGAIN: (-707, -710),
        ErrorClass.TRANSFER: (-800,),
        ErrorClass.UNDER_WAY: (UNDER_WAY,),
        ErrorClass.TRANSIENT: (-900, -901, -101, -1010, -1600, -1601),
        ErrorClass.CORRUPT: (-801,),
        ErrorClass.BUG: (-10, -400, -600, -601, -702),
        ErrorClass.NO_SPACE: (-200,),
        ErrorClass.WRITE: (-705, -706, -1700),
    }.items()
    for code in codes
}


def classify(code: int) -> ErrorClass:
    """Class of a Mooncake result code (mooncake-store `types.h`): zero or more is OK, unlisted negatives TRANSIENT."""
    if -1400 < code <= -1100:  # files, buckets, offload: one owner's disk
        return ErrorClass.TRANSFER
    return ErrorClass.OK if code >= 0 else _CLASSES.get(code, ErrorClass.TRANSIENT)


def classify_get(client: Any, keys: Sequence[str], sizes: Sequence[int], codes: Sequence[int]) -> list[ErrorClass]:
    """Classes of a get call's codes, which are the bytes that arrived where they are not negative.

    Mooncake answers a wrong size with -600 or -800, and a disk tier that hangs with -901, all of which also mean other
    things; one `get_size` tells them apart.
    """
    results = []
    ask = True
    for key, size, code in zip(keys, sizes, codes, strict=True):
        result = classify(code)
        if code >= 0 and code != size:
            result = ErrorClass.FOREIGN
        elif code in (-600, -800, -900, -901):  # the last two come from the owner of a disk tier as well
            actual = client.get_size(key) if ask else -1
            # A master that is away answers each question after its timeout: one such answer is enough.
            ask = ask and classify(actual) is not ErrorClass.TRANSIENT
            if actual >= 0:
                result = ErrorClass.TRANSFER if actual == size else ErrorClass.FOREIGN
            else:
                result = ErrorClass.MISS if classify(actual) is ErrorClass.MISS else ErrorClass.TRANSIENT
        results.append(result)
    return results
