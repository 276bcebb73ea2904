"""Why an engine's requests wait or miss: what the store gave meanwhile, whether staging had room, who lost a block.

Pure, as the parts that it asks.  It remembers the blocks that were stored through this daemon: one that was stored and
is not there was evicted since, or purged, or the store lost it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from ..planning.requests import Failure
from ..planning.runs import Lane
from ..store.errors import ErrorClass
from ..telemetry.trace import Missing, Work
from ..work.rates import Rates

ENTRIES = 1 << 19  # 2 MiB
NAMESPACES = 16  # the last used
LOST = "lost"
_OF_A_NODE = (ErrorClass.TRANSFER, ErrorClass.UNDER_WAY)


class StoredBefore:
    """Remembers a digest until another one takes its entry, so its counts are a lower bound."""

    def __init__(self, entries: int = ENTRIES) -> None:
        """`entries`: a power of two."""
        self._mask = entries - 1
        self._tags = np.zeros(entries, np.uint32).data

    def count(self, digests: Iterable[bytes]) -> int:
        """Enter digests that were stored just now; return how many had been entered before."""
        before = 0
        for digest in digests:
            number = hash(digest)
            entry, tag = number & self._mask, number >> 32 & 0xFFFFFFFF
            before += self._tags[entry] == tag
            self._tags[entry] = tag
        return before

    def __contains__(self, digest: bytes) -> bool:
        number = hash(digest)
        return bool(self._tags[number & self._mask] == number >> 32 & 0xFFFFFFFF)


class Histories:
    """What each user stored in each namespace since the daemon started. No user learns what another one stored.

    The namespaces of an engine are one text, its names one after the other.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, str], StoredBefore] = OrderedDict()

    def of(self, uid: int, namespaces: Sequence[str]) -> StoredBefore:
        """Return the history of these namespaces of a user, from the user's first engine with them on."""
        namespace = ", ".join(namespaces)
        if (history := self._known.pop((uid, namespace), None)) is None:
            history = StoredBefore()
        self._known[uid, namespace] = history
        if len(self._known) > NAMESPACES:
            self._known.popitem(last=False)
        return history

    def holder(self, digest: bytes, uid: int, besides: StoredBefore) -> str:
        """Return another namespace in which this user stored the block; empty if there is none."""
        mine = ((name, each) for (user, name), each in self._known.items() if user == uid and each is not besides)
        return next((name for name, each in mine if digest in each), "")


class Reasons:
    """Of one engine. Times in ns, of one clock."""

    def __init__(self, rates: Rates, histories: Histories, uid: int, namespaces: Sequence[str]) -> None:
        self._rates, self._histories, self._uid = rates, histories, uid
        self.stored = histories.of(uid, namespaces)
        self._starved_ns, self._since_ns = [0, 0], [0, 0]  # by lane; since when it is: 0, it is not

    def moved(self, namespaces: Sequence[str]) -> None:
        """Note that the engine's blocks are in these namespaces from now on."""
        self.stored = self._histories.of(self._uid, namespaces)

    def note_room(self, lane: Lane, now_ns: int, *, starved: bool) -> None:
        """Enter whether the lane's next fetch waits for room in staging."""
        if since_ns := self._since_ns[lane]:
            self._starved_ns[lane] += now_ns - since_ns
        self._since_ns[lane] = now_ns if starved else 0

    def work(self, lane: Lane, now_ns: int) -> Work:
        """Return what the lane did since the daemon started."""
        since_ns, meter = self._since_ns[lane], self._rates.fetches[lane]
        starved_ns = self._starved_ns[lane] + (now_ns - since_ns if since_ns else 0)
        return Work(lane, *meter.total(now_ns), starved_ns, meter.known.get("hour"))

    def missing(self, name: bytes, aside: Collection[str], *, keeps: bool = False) -> Missing:
        """Say why the store lacks this block, while it sets the storage nodes `aside`.

        `keeps`: the store neither evicted a value, nor was told to remove one.
        """
        if name in self.stored:
            return Missing("storage_node", owners=_names(aside)) if aside else Missing(LOST if keeps else "evicted")
        if namespace := self._histories.holder(name, self._uid, self.stored):
            return Missing("other_namespace", namespace)
        return Missing("never_stored")


def failure(outcome: Sequence[ErrorClass], aside: Collection[str]) -> Failure:
    """Say why a fetch failed: by its first block that did not come."""
    why = next(each for each in outcome if each is not ErrorClass.OK)
    return Failure(why.value, _names(aside) if why in _OF_A_NODE else "")


def _names(owners: Collection[str]) -> str:
    return " ".join(sorted(owners))
