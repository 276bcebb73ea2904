"""Host staging: one shared-memory segment per rank, cut into equal slots; slot n of every rank belongs together."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence

from ...shmring.segment import Segment
from ..config.sizes import size_text
from ..store.client import Store
from ..store.errors import StoreError, StoreUnavailable

_kept: list[Segment] = []  # memory that stays mapped until the process ends
MAX_SLOTS = 1 << 22  # of an engine: what the daemon keeps of each adds up, and an engine may name blocks of one byte


class StagingTooSmall(ValueError):
    """The budget does not hold one block."""


def slots_for(budget_bytes: int, block_bytes: Sequence[int]) -> int:
    """Return how many slots the budget holds, at most MAX_SLOTS. Raises StagingTooSmall for none."""
    per_slot = sum(block_bytes)
    if budget_bytes < per_slot:
        raise StagingTooSmall(
            "staging is smaller than one block: "
            f"staging={size_text(budget_bytes)} block={size_text(per_slot)} (all ranks)"
        )
    return min(MAX_SLOTS, budget_bytes // per_slot)


class HostStaging:
    """The staging segments of one engine. The store reads and writes them at addresses of this process.

    `lost`: slots that a transfer may still read or write after Mooncake gave it up (store/give_up.py).  Nobody uses
    such a slot again, and with the first one the memory stays registered and mapped until the process ends.  The
    thread of a store call adds its slots before the call's result is known.
    """

    def __init__(self, slot_count: int, block_bytes: Sequence[int]) -> None:
        self.slot_count = slot_count
        self.block_bytes = list(block_bytes)
        self.lost: set[int] = set()
        self.segments: list[Segment] = []
        self._bases: list[int] = []
        self._registered: list[tuple[Store, int]] = []
        try:
            for size in self.block_bytes:
                segment = Segment.create(slot_count * size)
                self.segments.append(segment)
                # The array object only serves to learn the address; the segment keeps the memory mapped.
                self._bases.append(ctypes.addressof(ctypes.c_char.from_buffer(segment.buffer)))
        except BaseException:
            self.close()
            raise

    def areas(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of each rank's segment."""
        return [(base, segment.size_bytes) for base, segment in zip(self._bases, self.segments, strict=True)]

    def register(self, store: Store) -> None:
        """Register the memory with an open store, once (RDMA needs it).

        Raises StoreError, StoreUnavailable; `unregister` undoes what was registered until then.
        """
        for address, length in self.areas() if not self._registered else ():
            store.register(address, length)
            self._registered.append((store, address))

    @property
    def kept_bytes(self) -> int:
        """Return the size of memory with lost slots, which neither `unregister` nor `close` gives back."""
        return self.slot_count * sum(self.block_bytes) if self.lost else 0

    def unregister(self) -> None:
        """Undo `register`, unless slots are lost. With RDMA this unlocks the pages, which takes long."""
        if self.lost:
            return
        registered, self._registered = self._registered, []
        for store, address in registered:
            # A store that forgot the memory or closed must not keep it mapped, nor end other epochs.
            with contextlib.suppress(StoreError, StoreUnavailable):
                store.unregister(address)

    def addresses(self, slot: int) -> list[int]:
        """Return where the slot begins, per rank."""
        return [base + slot * size for base, size in zip(self._bases, self.block_bytes, strict=True)]

    def close(self) -> None:
        """Unregister and unmap, unless slots are lost; only when no store call names the memory."""
        self.unregister()
        for segment in self.segments:
            if self.lost:
                _kept.append(segment)
            else:
                segment.close()
        self.segments = []
