"""Store work of one engine: look-ups, fetches into slots, saves out of slots, removals; each one blocking job.

Each function turns one job of one engine into store calls for all its ranks.  A block counts only when every rank's
part does.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import NamedTuple

from ...shmring.wire.attach import WorkerInfo
from ..store.client import Medium, Store
from ..store.errors import ErrorClass, StoreUnavailable
from ..store.storage_nodes import Get
from .staging import HostStaging

AT_ONCE = 64  # digests of one call, which then costs little more than that of one
RETRY_S = 0.02  # a replica being written or busy is usually there by then
# After these a put is tried again.
_AGAIN = (ErrorClass.NO_SPACE, ErrorClass.RETRY, ErrorClass.TRANSIENT, ErrorClass.TRANSFER)


@dataclass(frozen=True)
class RankLayout:
    """Where one engine's blocks lie: store key prefix of each rank (fixed at attach) and its staging.

    Ranks with one prefix hold the same bytes. Of them, rank r fills the save slots with slot % factor == turn, where
    (factor, turn) = turns[r].
    """

    key_prefixes: tuple[str, ...]
    turns: tuple[tuple[int, int], ...]
    staging: HostStaging

    @cached_property
    def shards(self) -> list[tuple[str, list[int]]]:
        """Each key prefix and the ranks that hold its bytes."""
        found: dict[str, list[int]] = {}
        for rank, prefix in enumerate(self.key_prefixes):
            found.setdefault(prefix, []).append(rank)
        return list(found.items())

    @classmethod
    def of(cls, workers: Sequence[WorkerInfo], staging: HostStaging) -> RankLayout:
        """The layout of ranks that `check_turns` accepted."""
        turns = tuple((worker.put_factor, worker.put_turn) for worker in workers)
        return cls(tuple(worker.key_prefix for worker in workers), turns, staging)


def check_turns(workers: Sequence[WorkerInfo]) -> None:
    """Raise ValueError unless ranks that share a key prefix have parts of one size, and one of them each save slot."""
    sharing: dict[str, list[tuple[int, int]]] = {}
    sizes: dict[str, set[int]] = {}
    for worker in workers:
        sharing.setdefault(worker.key_prefix, []).append((worker.put_factor, worker.put_turn))
        sizes.setdefault(worker.key_prefix, set()).add(worker.block_bytes)
    for prefix, turns in sharing.items():
        if len(sizes[prefix]) > 1:
            raise ValueError(
                f"ranks with one key prefix must have blocks of one size: key_prefix={prefix!r} "
                f"block_bytes={sorted(sizes[prefix])}"
            )
        if sorted(turns) != [(len(turns), turn) for turn in range(len(turns))]:
            raise ValueError(
                f"ranks with one key prefix must take turns: key_prefix={prefix!r} (put_factor, put_turn)={turns} "
                f"expected=({len(turns)}, 0 to {len(turns) - 1})"
            )


@dataclass(frozen=True)
class SaveResult:
    """Blocks stored now, blocks that were there already, blocks lost, and those to try again: no space, or no store.

    `memory` and `disk` are the slots of the blocks that are in the store now, by medium; only when `locate` asks.
    `digests` are those of the blocks stored now.  `lost`: how many values Mooncake may still read.
    """

    stored: int
    present: int
    failed: int
    again: list[tuple[bytes, int]]
    memory: list[int] = field(default_factory=list)
    disk: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    lost: int = 0


class Found(NamedTuple):
    """How many leading digests of one question the store holds for every rank, and which of these only on disk (1)."""

    run: int
    on_disk: bytes


class _Target(NamedTuple):
    """Where a put reads a value from."""

    slot: int
    address: int
    bytes: int


def look_up(
    store: Store, layout: RankLayout, questions: Sequence[Sequence[bytes]], *, media: bool
) -> list[Found] | None:
    """The answers to several requests' questions; None when the store cannot say now.

    Many digests are asked for in two calls: of a question whose first one is missing the others are not.
    `media`: ask also where the values lie; then an object of another size in the store's memory is a miss here already.
    It costs about 3 us for each block that is there, and a miss nothing.
    """
    try:
        if sum(map(len, questions)) <= AT_ONCE:
            runs = _runs(store, layout, questions)
        else:
            runs = _runs(store, layout, [digests[:1] for digests in questions])
            others = [digests[1:] if run else () for digests, run in zip(questions, runs, strict=True)]
            runs = [run + more for run, more in zip(runs, _runs(store, layout, others), strict=True)]
        if not media:
            return [Found(run, b"") for run in runs]
        prefix, (rank, *_) = layout.shards[0]
        keys = [prefix + digest.hex() for digests, run in zip(questions, runs, strict=True) for digest in digests[:run]]
        where = iter(store.media(keys, layout.staging.block_bytes[rank]))
    except StoreUnavailable:
        return None
    return [_found(list(islice(where, run))) for run in runs]


def _runs(store: Store, layout: RankLayout, questions: Sequence[Sequence[bytes]]) -> list[int]:
    """How many leading digests of each question the store holds for every rank. Raises StoreUnavailable."""
    parts = len(layout.shards)
    keys = [prefix + digest.hex() for digests in questions for digest in digests for prefix, _ in layout.shards]
    present = iter(store.exist(keys))
    here = [list(islice(present, parts * len(digests))) for digests in questions]
    return [(each.index(False) if False in each else len(each)) // parts for each in here]


def _found(where: Sequence[Medium | None]) -> Found:
    run = where.index(None) if None in where else len(where)
    return Found(run, bytes(medium == "disk" for medium in where[:run]))


def fetch(
    store: Store, layout: RankLayout, blocks: Sequence[tuple[bytes, int]], *, get: Get | None = None
) -> list[ErrorClass]:
    """Read (digest, slot) blocks into their slots; what became of each: OK when every rank's part is there.

    A part that several ranks hold is read once and copied to the others. Parts whose class says so are tried once more.
    Who gives this fetch up says so in `get`.
    """
    shards, block_bytes = layout.shards, layout.staging.block_bytes
    places = [layout.staging.addresses(slot) for _, slot in blocks]
    keys = [prefix + digest.hex() for digest, _ in blocks for prefix, _ in shards]
    addresses = [place[ranks[0]] for place in places for _, ranks in shards]
    sizes = [block_bytes[ranks[0]] for _, ranks in shards] * len(blocks)
    slots = [slot for _, slot in blocks for _ in shards]
    try:
        parts = _move(layout, slots, lambda: store.get_into(keys, addresses, sizes, get))
    except StoreUnavailable:
        return [ErrorClass.TRANSIENT] * len(blocks)
    again = [i for i, part in enumerate(parts) if part in (ErrorClass.RETRY, ErrorClass.LOOKUP_AGAIN)]
    if again:
        time.sleep(RETRY_S)
        with contextlib.suppress(StoreUnavailable):  # then they stay as they are, and the others are there
            late = [keys[i] for i in again], [addresses[i] for i in again], [sizes[i] for i in again]
            second = _move(layout, [slots[i] for i in again], lambda: store.get_into(*late, get))
            for i, part in zip(again, second, strict=True):
                parts[i] = part
    for place in places if len(shards) < len(block_bytes) else ():
        for _, (first, *others) in shards:
            for other in others:
                ctypes.memmove(place[other], place[first], block_bytes[first])  # without the GIL
    return [
        next((part for part in parts[i : i + len(shards)] if part is not ErrorClass.OK), ErrorClass.OK)
        for i in range(0, len(parts), len(shards))
    ]


def _move(layout: RankLayout, slots: Sequence[int], call: Callable[[], list[ErrorClass]]) -> list[ErrorClass]:
    """Get or put from and to these slots, one for each result; those that Mooncake may go on using are lost.

    Raises what the call raises.
    """
    try:
        results = call()
    except StoreUnavailable:
        raise  # no transfer is under way
    except BaseException:
        layout.staging.lost.update(slots)  # nothing is known of the transfers
        raise
    if ErrorClass.UNDER_WAY in results:
        lost = zip(slots, results, strict=True)
        layout.staging.lost.update(slot for slot, result in lost if result is ErrorClass.UNDER_WAY)
    return results


def save(store: Store, layout: RankLayout, blocks: Sequence[tuple[bytes, int]], *, locate: bool = False) -> SaveResult:
    """Put (digest, slot) blocks that are not there yet; of ranks that share a key, the one whose turn the slot is.

    With `locate`, also ask in which medium they are now.
    """
    shards = layout.shards
    keys = [prefix + digest.hex() for digest, _ in blocks for prefix, _ in shards]
    targets: dict[str, _Target] = {}
    for digest, slot in blocks:
        place = layout.staging.addresses(slot)
        for prefix, ranks in shards:
            [source] = [rank for rank in ranks if slot % layout.turns[rank][0] == layout.turns[rank][1]]
            targets[prefix + digest.hex()] = _Target(slot, place[source], layout.staging.block_bytes[source])
    names = list(targets)
    try:
        there = store.exist(names)
        missing = [name for name, present in zip(names, there, strict=True) if not present]
        addresses, sizes = [targets[n].address for n in missing], [targets[n].bytes for n in missing]
        slots = [targets[n].slot for n in missing]
        outcome = _move(layout, slots, lambda: store.put_from(missing, addresses, sizes))
    except StoreUnavailable:
        return SaveResult(0, 0, 0, list(blocks))
    written = dict(zip(missing, outcome, strict=True))
    stored = present = failed = 0
    again: list[tuple[bytes, int]] = []
    kept: list[tuple[str, int]] = []
    digests: list[bytes] = []
    for i, block in enumerate(blocks):
        mine = keys[i * len(shards) : (i + 1) * len(shards)]
        results = {written.get(key) for key in mine}  # None: it was there already
        if results <= {None, ErrorClass.OK}:
            if results != {None}:
                stored += 1
                digests.append(block[0])
            present += results == {None}
            kept.append((mine[0], block[1]))
        elif results <= {None, ErrorClass.OK, *_AGAIN}:
            again.append(block)
        else:
            failed += 1
    result = SaveResult(stored, present, failed, again, digests=digests, lost=outcome.count(ErrorClass.UNDER_WAY))
    if locate:
        for (_, slot), medium in zip(kept, _media(store, [key for key, _ in kept]), strict=True):
            (result.disk if medium == "disk" else result.memory).append(slot)
    return result


def _media(store: Store, keys: Sequence[str]) -> Sequence[Medium | None]:
    """Where these values lie. What was just put lies in memory, if the store cannot say."""
    try:
        return store.media(keys)
    except StoreUnavailable:
        return [None] * len(keys)


def remove_all(store: Store, layout: RankLayout, timeout_s: float) -> bool:
    """Remove every key of this engine's namespace; True only when confirmed."""
    return store.remove_matching(sorted(set(layout.key_prefixes)), timeout_s).gone
