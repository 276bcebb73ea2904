"""The saver of one engine: slots granted, copied blocks put into the store, slots granted again.

Pure.  One put runs at a time, as large as its caller allows, so that slots come back early, and the caller decides when
loads go first.  A full store slows saving down through the credits and nothing else: slots whose blocks find no space
stay out while their put is tried again.  A reset drops every block of older weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field

from ...shmring.wire.attach import Stored
from ...shmring.wire.records import ProtocolError, Saved
from .transfers import SaveResult

PAUSE_NS = (100_000_000, 2_000_000_000)
TRIES = 8  # in a row without a block getting in: about ten seconds of a full store
ENDS = 64  # at a time of puts that are given up: each has a line
FORGET_NS = 60_000_000_000  # after a try, however it ended: then a row begins anew


@dataclass
class Save:
    """One save of the engine's: how many of its `puts` have not ended, and what became of the others' blocks.

    `generation`: that of the weights which computed its blocks.
    """

    save_id: int
    puts: int
    generation: int = 0
    stored: int = 0
    present: int = 0
    failed: int = 0
    tries: int = 0


@dataclass(eq=False)
class Put:
    """Part of a save: `blocks` are still to put, and the counts say what became of the others."""

    save: Save
    slots: list[int]
    blocks: list[tuple[bytes, int]] = field(default_factory=list)
    stored: int = 0
    present: int = 0
    failed: int = 0
    tries: int = 0
    last: bool = False  # of its save to end
    memory: list[int] = field(default_factory=list)
    disk: list[int] = field(default_factory=list)

    def cut(self, blocks: int) -> Put:
        """Keep so many blocks of a put that was not tried yet; return a put of the others."""
        rest = Put(self.save, self.slots[blocks:], self.blocks[blocks:])
        del self.slots[blocks:], self.blocks[blocks:]
        self.save.puts += 1
        return rest

    @property
    def notice(self) -> Stored:
        """What became of its slots, for an engine that publishes KV events."""
        there = {*self.memory, *self.disk}
        failed = [slot for slot in self.slots if slot not in there]
        return Stored(save_id=self.save.save_id, memory=self.memory, disk=self.disk, failed=failed)


class Saver:
    """Owns the save `slots` of one engine. A slot that is in `quarantined` when it comes back is never granted again.

    `generation`: of its weights (`Reset`).
    """

    def __init__(self, slots: range, quarantined: Set[int], generation: int = 0) -> None:
        self._slots, self._quarantined_now = slots, quarantined
        self.generation = generation
        self._granted: set[int] = set()
        self.returned: list[int] = list(slots)  # to be granted when saving is on
        self._quarantined = 0
        self.puts: deque[Put] = deque()
        self.given_up: deque[Put] = deque()  # nothing of them is stored: `ended` has more while there are some
        self._running: Put | None = None
        self.records = 0  # SAVED records that it took
        self._not_before_ns = 0
        self._pause_ns = PAUSE_NS[0]
        self._fruitless = 0  # tries in a row in which no block got in, the last one at `_tried_ns`
        self._tried_ns = 0

    # --- saves ------------------------------------------------------------------------------------------------------

    def saved(self, record: Saved, *, saving: bool) -> list[Put]:
        """Every rank copied these blocks, or dropped them; return puts that fail at once.

        Raises ProtocolError for slots that are not granted.
        """
        self.records += 1
        slots = record.slots
        if len(set(slots)) != len(slots) or not self._granted.issuperset(slots):
            raise ProtocolError(f"slots were not granted: slots={slots[:8]}")
        self._granted.difference_update(slots)
        if record.dropped:
            self._take_in(slots)
            return []
        save = Save(record.save_id, 1, record.reset_generation)
        if record.reset_generation < self.generation or not saving:
            return [self._end(Put(save, slots, failed=len(slots)))]
        self.puts.append(Put(save, slots, list(zip(record.names, slots, strict=True))))
        return []

    def next_grant(self) -> list[int]:
        """Return the slots to grant. Without saving they stay here: soon the engine has none left to fill."""
        slots, self.returned = self.returned, []
        self._granted.update(slots)
        return slots

    def waiting(self, now_ns: int) -> bool:
        """Whether a put waits for next_put(): none runs, and a full store's pause is over."""
        return self._running is None and bool(self.puts) and now_ns >= self._not_before_ns

    def next_put(self, most_blocks: int) -> Put | None:
        """Return the put that waits, of at most so many blocks; None where that is 0."""
        if most_blocks <= 0:
            return None
        self._running = put = self.puts.popleft()
        if len(put.blocks) > most_blocks and not put.tries:
            self.puts.appendleft(put.cut(most_blocks))
        return put

    def stored(self, put: Put, result: SaveResult, now_ns: int, *, saving: bool) -> list[Put]:
        """A put came back; return the puts that ended with it.

        Later keys do not name the values of older weights, so the engine hears that they failed.
        """
        self._running, older = None, put.save.generation < self.generation
        if now_ns - self._tried_ns > FORGET_NS:
            self._fruitless, self._pause_ns = 0, PAUSE_NS[0]
        self._tried_ns = now_ns
        put.tries += 1
        self._fruitless = 0 if result.stored or result.present or not result.again else self._fruitless + 1
        put.stored += result.stored
        put.present += result.present
        put.failed += result.failed
        put.memory = [] if older else put.memory + result.memory
        put.disk = [] if older else put.disk + result.disk
        if result.again:
            self._not_before_ns = now_ns + self._pause_ns
            self._pause_ns = min(2 * self._pause_ns, PAUSE_NS[1])
        else:
            self._pause_ns = PAUSE_NS[0]
        if result.again and self._fruitless < TRIES and saving and not older:
            put.blocks = result.again
            self.puts.appendleft(put)
            return []
        put.failed += len(result.again)
        # A store that is gone for all the tries of one put keeps no slots of those behind it.
        if self._fruitless >= TRIES:
            self._give_up()
        return [self._end(put), *self.ended()]

    def putting(self) -> set[bytes]:
        """Return the names of all blocks that are being put, or wait for it."""
        puts = [*self.puts, *filter(None, [self._running])]
        return {name for put in puts for name, _ in put.blocks}

    def _give_up(self) -> None:
        """Store nothing of what waits."""
        self.given_up += self.puts
        self.puts.clear()

    def ended(self) -> list[Put]:
        """Return puts of which nothing is stored, a few at a time: an engine may have a put for each slot."""
        ends = list[Put]()
        while self.given_up and len(ends) < ENDS:
            put = self.given_up.popleft()
            put.failed += len(put.blocks)
            ends.append(self._end(put))
        return ends

    def _end(self, put: Put) -> Put:
        save = put.save
        save.puts -= 1
        put.last = not save.puts
        save.stored += put.stored
        save.present += put.present
        save.failed += put.failed
        save.tries += put.tries
        self._take_in(put.slots)
        return put

    def _take_in(self, slots: list[int]) -> None:
        kept = [slot for slot in slots if slot not in self._quarantined_now]
        self._quarantined += len(slots) - len(kept)
        self.returned += kept

    def reset(self, generation: int) -> list[Put]:
        """Drop the saves of older weights; return their puts, but for the one that runs."""
        self.generation = max(self.generation, generation)
        self._give_up()
        return self.ended()

    def gauges(self) -> dict[str, int]:
        """Count save slots: those that are neither busy nor quarantined are granted."""
        return {
            "save_slots": len(self._slots),
            "save_slots_busy": len(self._slots) - len(self._granted) - self._quarantined,
            "save_slots_quarantined": self._quarantined,
            "saves_queued": len(self.puts) + len(self.given_up) + (self._running is not None),
        }
