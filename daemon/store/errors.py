"""The store's errors: the exceptions, and the one table of the meaning of Mooncake's result codes."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from .give_up import UNDER_WAY

LIBRARIES = "as root: apt-get install -y libibverbs1 libcurl4 libnuma1"  # what Mooncake's own need


class StoreError(Exception):
    """The store or its private master cannot be started, or a buffer cannot be registered; one line."""


class StoreUnavailable(Exception):
    """A whole call failed for a passing reason, the breaker is open, or the store is not open."""


class ErrorClass(enum.Enum):
    """The meaning of one key's result for the caller."""

    OK = "ok"
    MISS = "miss"
    RETRY = "retry"
    LOOKUP_AGAIN = "lookup_again"
    TRANSIENT = "transient"
    TRANSFER = "transfer"  # this storage node does not deliver; says nothing of others, or of the master
    UNDER_WAY = "under_way"  # as TRANSFER, and Mooncake may still use the memory: nobody may use it again (give_up.py)
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"  # its file cannot be read, and others of that disk can (unreadable.py)
    BUG = "bug"
    NO_SPACE = "no_space"
    WRITE = "write"
    FOREIGN = "foreign"  # an object of another size lies under our key; no Mooncake code says so, `classify_get` does


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


def of_a_disk(code: int) -> bool:
    """Whether files, buckets or the offload of a storage node's disk are the reason."""
    return -1400 < code <= -1100


def classify(code: int) -> ErrorClass:
    """Return the class of a Mooncake code (mooncake-store `types.h`): 0 and above is OK, unknown ones TRANSIENT."""
    if of_a_disk(code):
        return ErrorClass.TRANSFER
    return ErrorClass.OK if code >= 0 else _CLASSES.get(code, ErrorClass.TRANSIENT)


def classify_get(client: Any, keys: Sequence[str], sizes: Sequence[int], codes: Sequence[int]) -> list[ErrorClass]:
    """Return the classes of a get's codes; a code of 0 or more is the number of bytes that arrived.

    Mooncake answers a wrong size with -600 or -800, and a disk that hangs with -901, all of which also mean other
    things; one `get_size` decides.
    """
    if codes == sizes:  # what follows takes time for each key
        return [ErrorClass.OK] * len(codes)
    results = []
    ask = True
    for key, size, code in zip(keys, sizes, codes, strict=True):
        result = classify(code)
        if code >= 0 and code != size:
            result = ErrorClass.FOREIGN
        elif code in (-600, -800, -900, -901):  # the last two come from a disk as well
            actual = client.get_size(key) if ask else -1
            # A master that is away answers each question after its timeout: one such answer is enough.
            ask = ask and classify(actual) is not ErrorClass.TRANSIENT
            if actual >= 0:
                result = ErrorClass.TRANSFER if actual == size else ErrorClass.FOREIGN
            else:
                result = ErrorClass.MISS if classify(actual) is ErrorClass.MISS else ErrorClass.TRANSIENT
        results.append(result)
    return results
