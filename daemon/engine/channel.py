"""The daemon's end of one control segment: ring, flags, credits, liveness, and the bounds of what records may name."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...kv.groups import Groups
from ...shmring._atomics import Words, repeats
from ...shmring.credits import CreditGranter
from ...shmring.errors import SegmentCorrupt
from ...shmring.flags import MAX_COUNT, FlagTable, pack, unpack
from ...shmring.layout import Layout, pages_of
from ...shmring.liveness import Liveness
from ...shmring.ring import Consumer
from ...shmring.segment import Segment
from ...shmring.wire.records import Done, FlagState, Hint, ProtocolError, Saved, Used
from ..planning.requests import Key, Publication

MAX_EXCHANGES = 16  # tries; an honest engine rarely changes the flag between the daemon's load and its exchange
LOOKS = 256  # at flags, in one search for orphans
ADOPTED_WITHIN_NS = 30_000_000_000  # of an early hint's request, or it ends: the engine may never come to it
UNCLAIMED = (FlagState.HINTED, FlagState.READY)
GIVEN_UP = (FlagState.RELEASED, FlagState.CANCELLED)


class Channel:
    """All views of one control segment; close() lets go of them, since each would keep the segment mapped.

    A transition of a flag is a compare-and-swap by generation; it says whether it came before the engine's.
    """

    def __init__(self, segment: Segment, layout: Layout, groups: Groups) -> None:
        self.layout, self._groups = layout, groups
        words = Words(segment.buffer)
        self.ring = Consumer(segment.buffer, words, layout)
        self.table = FlagTable(segment.buffer, words, layout)
        self.credits = CreditGranter(segment.buffer, words, layout)
        self.liveness = Liveness(words, consumer=True)
        self.lent: dict[int, tuple[int, Sequence[int]]] = {}  # generation and pages, by flag, until the request ends
        self._pages_in_use: set[int] = set()
        self._given_up: set[Key] = set()  # by engines, at the last look at each
        self._to_look_at: deque[int] = deque()  # flags
        self._early: dict[Key, int] = {}  # when the early hints of unended requests were pushed, the oldest first

    def close(self) -> None:
        del self.ring, self.table, self.credits, self.liveness

    # --- flags and slot tables ----------------------------------------------------------------------------------------

    def publish(self, publication: Publication, slots: Sequence[int]) -> bool:
        """Enter these slots for its blocks, and publish it; False if the engine has the flag already."""
        request = publication.request
        flag, generation = request.key
        self.table.write_slots(flag, publication.start, slots)
        # A block that is fetched again counts once.
        disk = min(request.disk_blocks, request.blocks) if request.disk_blocks else 0
        self.table.set_disk(flag, request.prompt.in_blocks(disk) if disk else 0)
        state = FlagState.READY if publication.final else FlagState.HINTED
        return self._move(request.key, (FlagState.HINTED,), pack(generation, state, publication.blocks))

    def take_back(self, key: Key) -> bool:
        """Publish nothing of an unclaimed flag any more, for now; False if the engine had it first."""
        return self._move(key, UNCLAIMED, pack(key[1], FlagState.HINTED, 0))

    def expire(self, key: Key) -> bool:
        """End an unclaimed flag; False if the engine had it first."""
        return self._move(key, UNCLAIMED, pack(key[1], FlagState.EXPIRED, 0)) and self._end(key)

    def free(self, key: Key) -> bool:
        """RELEASED or CANCELLED -> FREE: nothing of it is pinned any more, nor will any entry be written."""
        self._end(key)
        return self._move(key, GIVEN_UP, pack(key[1], FlagState.FREE, 0))

    def move(self, key: Key, entries: Sequence[tuple[int, int]]) -> bool:
        """Write (block, slot) entries over published ones of an unclaimed flag; False if the engine had it first."""
        flag = self.table.flag(key[0])
        unclaimed = flag.generation == key[1] and flag.state in UNCLAIMED
        if unclaimed and entries:
            self.table.move(key[0], entries)
        return unclaimed

    def on_device(self, key: Key, blocks: range) -> int:
        """Count the blocks for which the slot table names device slots."""
        slots = self.table.read_slots(key[0], blocks.start, blocks.stop)
        return sum(map(self.layout.slot_count.__le__, slots))

    def orphans(self) -> set[Key]:
        """Return the requests whose flag the engine had given up at two looks in a row, and no record says so.

        Each call looks at a bounded part of the flags, and at all of them in turn.
        """
        if not self._to_look_at:
            self._to_look_at.extend(self.lent)
        found = set[Key]()
        for _ in range(min(LOOKS, len(self._to_look_at))):
            index = self._to_look_at.popleft()
            if (lent := self.lent.get(index)) is None:
                continue
            flag, key = self.table.flag(index), (index, lent[0])
            if flag.generation == lent[0] and flag.state not in (*GIVEN_UP, FlagState.FREE):
                self._given_up.discard(key)
            elif key in self._given_up:
                found.add(key)
            else:
                self._given_up.add(key)
        return found

    def forsaken(self, now_ns: int) -> list[Key]:
        """End the flags of early hints whose request the engine's scheduler did not get in time; return these."""
        found = list[Key]()
        while self._early and now_ns - (since_ns := self._early[key := next(iter(self._early))]) > ADOPTED_WITHIN_NS:
            del self._early[key]
            if self.table.adopted_ns(key[0]) < since_ns and self.expire(key):
                found.append(key)
        return found

    def _move(self, key: Key, states: tuple[FlagState, ...], desired: int) -> bool:
        flag, generation = key
        for _ in range(MAX_EXCHANGES):
            word = self.table.load(flag)
            seen = unpack(word)
            if seen.generation != generation or seen.state not in states:
                return False
            if self.table.exchange(flag, word, desired):
                return True
        raise SegmentCorrupt(f"flag does not stand still: flag={flag} word={self.table.load(flag):#x}")

    # --- bounds -------------------------------------------------------------------------------------------------------

    def check_hint(self, hint: Hint) -> None:
        """Raise ProtocolError for a hint that names what the segment does not have."""
        layout, groups, page = self.layout, self._groups, max(hint.pages)
        digests = groups.digests(hint.blocks)
        names = groups.names(hint.blocks - hint.local_blocks)  # all that may be asked for, of all groups
        if hint.blocks > MAX_COUNT:  # of a flag
            raise ProtocolError(f"hint is too long: blocks={hint.blocks} max={MAX_COUNT}")
        if hint.flag >= layout.flag_count or names > layout.table_entries or page >= layout.page_count:
            raise ProtocolError(
                f"hint out of bounds: flag={hint.flag} max={layout.flag_count - 1} names={names} "
                f"max={layout.table_entries} page={page} max={layout.page_count - 1}"
            )
        if len(hint.hashes) != digests * hint.hash_bytes or len(hint.pages) != max(1, pages_of(names)):
            raise ProtocolError(
                f"hint does not fit its blocks: blocks={hint.blocks} digests={len(hint.hashes) // hint.hash_bytes} "
                f"expected={digests} pages={len(hint.pages)} expected={max(1, pages_of(names))}"
            )
        if repeats(hint.hashes, hint.hash_bytes):
            raise ProtocolError(f"hint names a digest twice, as no prompt does: digests={digests}")

    def lend(self, hint: Hint) -> None:
        """Use the pages of a checked hint as its slot table. Raises ProtocolError for a flag or page that is in use.

        Each page belongs to one request, so an engine's requests have no more blocks than its segment has entries.
        """
        if hint.flag in self.lent:
            raise ProtocolError(f"hint names another request's flag: flag={hint.flag} generation={hint.generation}")
        if len(set(hint.pages)) < len(hint.pages) or not self._pages_in_use.isdisjoint(hint.pages):
            raise ProtocolError(f"hint names a page twice, or another request's: flag={hint.flag} blocks={hint.blocks}")
        self.lent[hint.flag] = hint.generation, hint.pages
        self._pages_in_use.update(hint.pages)
        self.table.lend(hint.flag, hint.pages)
        if hint.early:
            self._early[hint.flag, hint.generation] = hint.arrival_ns

    def _end(self, key: Key) -> bool:
        """Take the pages back: the request has ended."""
        flag, generation = key
        lent, pages = self.lent.get(flag, (-1, ()))
        if lent == generation:
            del self.lent[flag]
            self._given_up.discard(key)
            self._early.pop(key, None)
            self._pages_in_use.difference_update(pages)
        return True

    def check_saved(self, saved: Saved) -> None:
        """Raise ProtocolError for a block of a KV group that the engine does not have."""
        count = len(self._groups.groups)
        if any(name[-1] >= count for name in saved.names):
            raise ProtocolError(f"saved block of an unknown KV group: groups={count}")

    def check_used(self, used: Used) -> None:
        """Raise ProtocolError for a number of digests that is not that of its blocks, and for one that repeats."""
        digests = len(used.hashes) // used.hash_bytes
        if used.blocks > MAX_COUNT or digests != self._groups.digests(used.blocks):
            raise ProtocolError(
                f"used prefix does not fit its blocks: blocks={used.blocks} max={MAX_COUNT} digests={digests}"
            )

    def check_done(self, done: Done) -> None:
        """Raise ProtocolError for an end that names what the segment does not have."""
        if done.flag >= self.layout.flag_count:
            raise ProtocolError(f"flag out of bounds: flag={done.flag} max={self.layout.flag_count - 1}")
        if done.loaded_from + done.loaded_blocks > self.layout.table_entries:
            raise ProtocolError(
                f"loaded blocks out of bounds: from={done.loaded_from} blocks={done.loaded_blocks} "
                f"max={self.layout.table_entries}"
            )
