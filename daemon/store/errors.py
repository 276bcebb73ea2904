"""What a Mooncake result code means for one key: the one table of codes."""

from __future__ import annotations

import enum

LIBRARIES = "on Debian install libibverbs1 libcurl4 libnuma1"  # what Mooncake's own need


class ErrorClass(enum.Enum):
    """What the caller should make of one key's result."""

    OK = "ok"
    MISS = "miss"
    RETRY = "retry"
    LOOKUP_AGAIN = "lookup_again"
    TRANSIENT = "transient"
    TRANSFER = "transfer"  # the owner of these bytes does not deliver; says nothing of other owners, or of the master
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
