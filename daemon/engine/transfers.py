"""Store calls of one engine: look-ups, fetches into slots, saves out of slots, removals. Each function blocks.

A function makes the store calls for all ranks.  A block counts only when every rank's part does.
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


class _Part(NamedTuple):
    """One value, and where it lies in staging."""

    key: str
    slot: int
    address: int
    size_bytes: int


@dataclass(frozen=True)
class RankLayout:
    """Where one engine's blocks lie: the store key prefix of each rank (fixed at attach) and its staging.

    Ranks with one prefix are replicas: they hold the same bytes.  Rank r fills the save slots with slot % count ==
    index, where (count, index) = replicas[r].
    """

    key_prefixes: tuple[str, ...]
    replicas: tuple[tuple[int, int], ...]
    staging: HostStaging

    @cached_property
    def shards(self) -> list[tuple[str, list[int]]]:
        """Return each key prefix and the ranks that hold its bytes."""
        found: dict[str, list[int]] = {}
        for rank, prefix in enumerate(self.key_prefixes):
            found.setdefault(prefix, []).append(rank)
        return list(found.items())

    @classmethod
    def of(cls, workers: Sequence[WorkerInfo], staging: HostStaging) -> RankLayout:
        """Return the layout of ranks that `check_replicas` accepted."""
        replicas = tuple((worker.put_factor, worker.put_turn) for worker in workers)
        return cls(tuple(worker.key_prefix for worker in workers), replicas, staging)

    def parts(self, digest: bytes, slot: int, *, saving: bool = False) -> list[_Part]:
        """Return a block's parts, one for each key: in the first replica's slot, or in the one that filled the slot."""
        addresses, parts = self.staging.addresses(slot), []
        for prefix, ranks in self.shards:
            filled = (rank for rank in ranks if slot % self.replicas[rank][0] == self.replicas[rank][1])
            rank = next(filled) if saving else ranks[0]
            parts.append(_Part(prefix + digest.hex(), slot, addresses[rank], self.staging.block_bytes[rank]))
        return parts


def check_replicas(workers: Sequence[WorkerInfo]) -> None:
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
    """Count blocks stored now, present before and failed; `again` are those to try again: no space, or no store.

    `memory` and `disk`: slots of the blocks that are in the store now, by medium, where `locate` asks.  `digests`: of
    the blocks stored now.  `lost`: how many values Mooncake may still read.
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
    """The store holds `run` leading digests of a question for every rank; `on_disk` has a 1 for each on disk alone."""

    run: int
    on_disk: bytes


def look_up(
    store: Store, layout: RankLayout, questions: Sequence[Sequence[bytes]], *, media: bool
) -> list[Found] | None:
    """Return the answers to several requests' questions; None if the store cannot say now.

    Many digests take two calls: the second asks for the rest of the questions whose first digest is there.
    `media`: ask also where the values lie, about 3 us for each hit.  An object of another size is a miss then.
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
    """Count the leading digests of each question that the store holds for every rank. Raises StoreUnavailable."""
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
    """Read (digest, slot) blocks into their slots; a block is OK when every rank's part is there.

    A part that several ranks hold is read once and copied to the others.  A part that may be there soon is tried once
    more.  The caller sets `get.late` when it gives this fetch up.
    """
    parts = [part for block in blocks for part in layout.parts(*block)]

    def read(parts: Sequence[_Part]) -> list[ErrorClass]:
        return _move(layout, parts, lambda keys, addresses, sizes: store.get_into(keys, addresses, sizes, get))

    try:
        results = read(parts)
    except StoreUnavailable:
        return [ErrorClass.TRANSIENT] * len(blocks)
    if again := [i for i, each in enumerate(results) if each in (ErrorClass.RETRY, ErrorClass.LOOKUP_AGAIN)]:
        time.sleep(RETRY_S)
        with contextlib.suppress(StoreUnavailable):  # then they stay as they are, and the others are there
            for i, each in zip(again, read([parts[i] for i in again]), strict=True):
                results[i] = each
    per_block, block_bytes = len(layout.shards), layout.staging.block_bytes
    for _, slot in blocks if per_block < len(block_bytes) else ():
        addresses = layout.staging.addresses(slot)
        for _, (first, *others) in layout.shards:
            for other in others:
                ctypes.memmove(addresses[other], addresses[first], block_bytes[first])  # without the GIL
    return [
        next((each for each in results[i : i + per_block] if each is not ErrorClass.OK), ErrorClass.OK)
        for i in range(0, len(results), per_block)
    ]


def _move(layout: RankLayout, parts: Sequence[_Part], call: Callable[..., list[ErrorClass]]) -> list[ErrorClass]:
    """Get or put these parts; slots that Mooncake may go on using are lost. Raises what the call raises."""
    try:
        results = call(*([part[i] for part in parts] for i in (0, 2, 3)))
    except StoreUnavailable:
        raise  # no transfer is under way
    except BaseException:
        layout.staging.lost.update(part.slot for part in parts)  # nothing is known of the transfers
        raise
    lost = [part.slot for part, each in zip(parts, results, strict=True) if each is ErrorClass.UNDER_WAY]
    layout.staging.lost.update(lost)
    return results


def save(store: Store, layout: RankLayout, blocks: Sequence[tuple[bytes, int]], *, locate: bool = False) -> SaveResult:
    """Put (digest, slot) blocks that are not there yet, each part from the replica that filled the slot.

    With `locate`, also ask in which medium they are now.
    """
    parts = [layout.parts(*block, saving=True) for block in blocks]
    named = {part.key: part for each in parts for part in each}
    try:
        there = store.exist(list(named))
        missing = [part for part, present in zip(named.values(), there, strict=True) if not present]
        outcome = _move(layout, missing, store.put_from)
    except StoreUnavailable:
        return SaveResult(0, 0, 0, list(blocks))
    written = {part.key: each for part, each in zip(missing, outcome, strict=True)}
    stored: list[bytes] = []
    again: list[tuple[bytes, int]] = []
    kept: list[_Part] = []
    present = failed = 0
    for block, (first, *others) in zip(blocks, parts, strict=True):
        results = {written.get(part.key) for part in (first, *others)}  # None: it was there already
        if results <= {None, ErrorClass.OK}:
            kept.append(first)
            if results == {None}:
                present += 1
            else:
                stored.append(block[0])
        elif results <= {None, ErrorClass.OK, *_AGAIN}:
            again.append(block)
        else:
            failed += 1
    lost = outcome.count(ErrorClass.UNDER_WAY)
    result = SaveResult(len(stored), present, failed, again, digests=stored, lost=lost)
    if locate:
        for part, medium in zip(kept, _media(store, [part.key for part in kept]), strict=True):
            (result.disk if medium == "disk" else result.memory).append(part.slot)
    return result


def _media(store: Store, keys: Sequence[str]) -> Sequence[Medium | None]:
    """Ask where these values lie. If the store cannot say, they lie in memory, since they were just put."""
    try:
        return store.media(keys)
    except StoreUnavailable:
        return [None] * len(keys)


def remove_all(store: Store, layout: RankLayout, timeout_s: float) -> bool:
    """Remove every key of this engine's namespace; True only when confirmed."""
    return store.remove_matching(sorted(set(layout.key_prefixes)), timeout_s).gone
