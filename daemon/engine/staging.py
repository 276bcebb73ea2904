"""Host staging: one shared-memory segment per rank, cut into equal slots; slot n of every rank belongs together."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterator, Sequence

from ...shmring.segment import Segment
from ..config.sizes import size_text
from ..store.client import Store
from ..store.errors import StoreError, StoreUnavailable

_kept: list[Segment] = []  # memory that stays mapped until the process ends
FILL_BYTES = 4 << 20  # reserved at a time: two to ten milliseconds
MAX_SLOTS = 1 << 22  # of an engine: what the daemon keeps of each adds up, and an engine may name blocks of one byte


def slots_for(budget_bytes: int, block_bytes: Sequence[int]) -> int:
    """Return how many slots the budget holds, at most MAX_SLOTS. Raises ValueError for none."""
    per_slot = sum(block_bytes)
    if budget_bytes < per_slot:
        raise ValueError(
            "staging is smaller than one block: "
            f"staging={size_text(budget_bytes)} block={size_text(per_slot)} (all ranks)"
        )
    return min(MAX_SLOTS, budget_bytes // per_slot)


class HostStaging:
    """The staging segments of one engine. The store reads and writes them at addresses of this process.

    `quarantined`: slots that a transfer may still read or write after Mooncake gave it up (store/give_up.py).  No
    call uses such a slot again, and with the first one the memory stays registered and mapped until the process ends.
    The thread of a store call adds its slots before the result is known.  `page_bytes`: of a mapped page, the mean.
    `sum_bytes`: with them, each slot has a checksum, behind all slots of its rank.  `held`: why the store did not let
    go of the memory, or "".
    """

    def __init__(self, slot_count: int, block_bytes: Sequence[int], sum_bytes: int = 0) -> None:
        self.slot_count, self.sum_bytes = slot_count, sum_bytes
        self.block_bytes = list(block_bytes)
        self.quarantined: set[int] = set()
        self.page_bytes = 0
        self.held = ""
        self.segments: list[Segment] = []
        self._registered: list[tuple[Store, int]] = []
        try:
            for size in self.block_bytes:
                self.segments.append(Segment.sparse(slot_count * (size + sum_bytes)))
        except BaseException:
            self.close()
            raise

    def fill(self) -> Iterator[int]:
        """Reserve the memory, slice by slice; yield the bytes of each. Raises SegmentError."""
        filled = faults = 0
        for segment in self.segments:
            for start in range(0, segment.size_bytes, FILL_BYTES):
                stop, before = min(start + FILL_BYTES, segment.size_bytes), _page_faults()
                segment.fill(start, stop)
                filled += stop - start
                faults += _page_faults() - before
                yield stop - start
        self.page_bytes = max(mmap.PAGESIZE, filled // max(1, faults))

    def areas(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of each rank's segment."""
        return [(segment.address, segment.size_bytes) for segment in self.segments]

    def register(self, store: Store) -> None:
        """Register the memory with the store (RDMA needs it, and locks the pages, in seconds).

        Raises StoreError, StoreUnavailable; `unregister` undoes what was registered until then.
        """
        for address, length in self.areas():
            store.register(address, length)
            self._registered.append((store, address))

    @property
    def size_bytes(self) -> int:
        """Return the size of all slots, with their checksums."""
        return self.slot_count * sum(size + self.sum_bytes for size in self.block_bytes)

    @property
    def kept_bytes(self) -> int:
        """Return the size of memory with quarantined slots, which neither `unregister` nor `close` gives back."""
        return self.size_bytes if self.quarantined else 0

    def unregister(self) -> bool:
        """Undo `register`, unless slots are quarantined. With RDMA this unlocks the pages, which takes long.

        Return False where the store did not let go of all of it, and set `held`.
        """
        if not self.quarantined:
            self.held = ""
            for store, address in list(self._registered):
                try:
                    store.unregister(address)
                except (StoreError, StoreUnavailable) as error:
                    self.held = str(error)
                except Exception as error:  # whatever it is, the memory may be registered still
                    self.held = repr(error)
                else:
                    self._registered.remove((store, address))
        return not self.held

    def addresses(self, slot: int) -> list[int]:
        return [each.address + slot * size for each, size in zip(self.segments, self.block_bytes, strict=True)]

    def sum_addresses(self, slot: int) -> list[int]:
        ends = zip(self.segments, self.block_bytes, strict=True)
        return [each.address + self.slot_count * size + slot * self.sum_bytes for each, size in ends]

    def close(self) -> bool:
        """Unregister and unmap, unless slots are quarantined; only when no store call names the memory.

        Return False where the store did not let go of all of it: that part stays mapped, because Mooncake refuses
        other memory at the same address.  Call again then.
        """
        self.unregister()
        held = {address for _, address in self._registered}
        for segment in self.segments:
            if self.quarantined:
                _kept.append(segment)
            elif segment.address not in held:
                segment.close()
        self.segments = [each for each in self.segments if each.address in held and not self.quarantined]
        return not self.segments


def _page_faults() -> int:
    """Count the page faults of this thread, one for each page that it mapped."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
