"""Store calls of one engine: look-ups, fetches into slots, saves out of slots. Each function blocks.

A function makes the store calls for all ranks.  A block counts only when every rank's part does.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, compress, islice
from typing import Any, NamedTuple, TypeVar

from ...kv.keys import name_of, whole_prefix
from ...shmring.wire.attach import WorkerInfo
from ..store.client import Medium, Store
from ..store.errors import ErrorClass, StoreUnavailable
from ..store.storage_nodes import Get
from .staging import HostStaging

_T = TypeVar("_T")
RETRY_S = 0.02  # a replica being written or busy is usually there by then
_SOON = (ErrorClass.RETRY, ErrorClass.LOOKUP_AGAIN)
# After these a put is tried again.
_AGAIN = (ErrorClass.NO_SPACE, ErrorClass.RETRY, ErrorClass.TRANSIENT, ErrorClass.TRANSFER)


class _Values(NamedTuple):
    """Values to read or write: for each its key, where it lies in staging, and its checksum, where there are any."""

    keys: list[str]
    slots: list[int]
    addresses: list[int]
    sizes: list[int]
    sums: list[int]

    def at(self, indices: Sequence[int]) -> _Values:
        columns: Iterable[Any] = self
        return _Values(*([column[i] for i in indices] if column else [] for column in columns))


@dataclass(frozen=True)
class RankLayout:
    """Where one engine's blocks lie: the store key prefixes of the ranks, which a reset replaces, and their staging.

    `prefixes[g][r]`: of rank r's blocks of KV group g.  Ranks with one prefix hold the same bytes of that group.  Rank
    r fills the save slots with slot % count == index, where (count, index) = replicas[r].  `written`: by prefix, what
    is written of values that may have zeros elsewhere (`WorkerInfo.written`).
    """

    prefixes: tuple[tuple[str, ...], ...]
    replicas: tuple[tuple[int, int], ...]
    staging: HostStaging
    written: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def namespaces(self) -> list[str]:
        """Return the namespaces of its keys: one per group, unless ranks differ."""
        return sorted(set(map(name_of, chain.from_iterable(self.prefixes))))

    @cached_property
    def shards(self) -> list[list[list[int]]]:
        """Return, for each group, the ranks that hold the same bytes, for each different part of a block."""
        return [_replicas(prefixes) for prefixes in self.prefixes]

    @classmethod
    def of(
        cls, workers: Sequence[WorkerInfo], staging: HostStaging, *, owner: str = "", weights: str = ""
    ) -> RankLayout:
        """Return the layout of ranks that `check_replicas` accepted. `owner`, `weights`: of their keys (keys.py)."""
        replicas = tuple((worker.replicas, worker.replica_index) for worker in workers)
        summed = staging.sum_bytes > 0
        ranks = [
            [whole_prefix(owner, each, weights, summed=summed) for each in worker.key_prefixes] for worker in workers
        ]
        written = {
            prefix: borders
            for worker, prefixes in zip(workers, ranks, strict=True)
            for group, prefix in enumerate(prefixes)
            if (borders := worker.written_of(group)) != (0, worker.block_bytes)
        }
        return cls(tuple(zip(*ranks, strict=True)), replicas, staging, written)

    @cached_property
    def _prefixes(self) -> list[list[str]]:
        """Return, for each group, the key prefix of each shard."""
        return [
            [prefixes[first] for first, *_ in shards]
            for prefixes, shards in zip(self.prefixes, self.shards, strict=True)
        ]

    @cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        """Return (address of slot 0, bytes of a slot, address of slot 0's checksum) of each rank."""
        staging = self.staging
        return list(zip(staging.addresses(0), staging.block_bytes, staging.sum_addresses(0), strict=True))

    @cached_property
    def _filled(self) -> list[list[list[tuple[int, int, int]]]]:
        """Return, for each group, the same of the rank that filled a slot, for each shard: by slot % their number."""
        turns = range(math.lcm(*(count for count, _ in self.replicas)))
        fills = [[turn % count == index for count, index in self.replicas] for turn in turns]
        return [
            [[self._places[next(rank for rank in ranks if mine[rank])] for ranks in shards] for mine in fills]
            for shards in self.shards
        ]

    def keys(self, names: Sequence[bytes]) -> list[str]:
        """Return the keys of these blocks, block by block: one for each shard."""
        prefixes = self._prefixes
        return [prefix + name[:-1].hex() for name in names for prefix in prefixes[name[-1]]]

    def first_key(self, name: bytes) -> str:
        """Return the key of the block's first shard, which is rank 0's."""
        return self.prefixes[name[-1]][0] + name[:-1].hex()

    def by_block(self, names: Sequence[bytes], parts: Iterable[_T]) -> Iterator[list[_T]]:
        """Yield for each block what is said of each of its `keys`."""
        rest = iter(parts)
        return (list(islice(rest, len(self.shards[name[-1]]))) for name in names)

    def joined(self, names: Sequence[bytes], parts: Sequence[bool]) -> bytearray:
        """Return a byte for each block, from a truth for each of its `keys`: whether all are true."""
        return bytearray(parts if len(parts) == len(names) else map(all, self.by_block(names, parts)))

    def values(self, blocks: Sequence[tuple[bytes, int]], *, saving: bool = False) -> _Values:
        """Return the values of (name, slot) blocks, in the order of `keys`.

        They lie with the first rank of a shard, or with the one that filled the slot.
        """
        keys = self.keys([name for name, _ in blocks])
        if saving:
            filled, turns = self._filled, len(self._filled[0])
            parts = [(slot, place) for name, slot in blocks for place in filled[name[-1]][slot % turns]]
        else:
            firsts = [[self._places[first] for first, *_ in shards] for shards in self.shards]
            parts = [(slot, place) for name, slot in blocks for place in firsts[name[-1]]]
        sum_bytes = self.staging.sum_bytes
        return _Values(
            keys,
            [slot for slot, _ in parts],
            [base + slot * size for slot, (base, size, _) in parts],
            [size for _, (_, size, _) in parts],
            [first + slot * sum_bytes for slot, (_, _, first) in parts] if sum_bytes else [],
        )


def check_replicas(workers: Sequence[WorkerInfo], groups: int) -> None:
    """Raise ValueError unless ranks that share a key prefix write parts of one size, and the same bytes of them.

    No two KV groups may share one.  Of ranks that share those of all groups, one must fill each save slot.
    """
    for worker in workers:
        if len(worker.key_prefixes) != groups:
            raise ValueError(f"number of KV groups differs: groups={len(worker.key_prefixes)} expected={groups}")
    named = list(zip(*(worker.key_prefixes for worker in workers), strict=True))
    sharing = [_replicas(prefixes) for prefixes in named]
    if len(set(chain.from_iterable(named))) != sum(map(len, sharing)):
        raise ValueError(f"no two KV groups may share a key prefix: key_prefixes={sorted(set(named[0]))}")
    for group, ranks in ((group, ranks) for group, shards in enumerate(sharing) for ranks in shards):
        if len(sizes := {workers[rank].block_bytes for rank in ranks}) > 1:
            raise ValueError(
                "ranks with one key prefix must have blocks of one size: "
                f"key_prefix={workers[ranks[0]].key_prefixes[group]!r} block_bytes={sorted(sizes)}"
            )
        if len({workers[rank].written_of(group) for rank in ranks}) > 1:
            raise ValueError(
                "ranks with one key prefix must write the same bytes of a value: "
                f"key_prefix={workers[ranks[0]].key_prefixes[group]!r} ranks={ranks}"
            )
    for ranks in _replicas([worker.key_prefixes for worker in workers]):
        prefix = workers[ranks[0]].key_prefixes[0]
        turns = [(workers[rank].replicas, workers[rank].replica_index) for rank in ranks]
        if sorted(turns) != [(len(turns), turn) for turn in range(len(turns))]:
            raise ValueError(
                f"ranks with one key prefix must take turns: key_prefix={prefix!r} (replicas, replica_index)={turns} "
                f"expected=({len(turns)}, 0 to {len(turns) - 1})"
            )


def _replicas(prefixes: Sequence[str] | Sequence[list[str]]) -> list[list[int]]:
    """Return the ranks that have each prefix, or each list of them."""
    found: dict[str | tuple[str, ...], list[int]] = {}
    for rank, prefix in enumerate(prefixes):
        found.setdefault(prefix if isinstance(prefix, str) else tuple(prefix), []).append(rank)
    return list(found.values())


@dataclass(frozen=True)
class SaveResult:
    """Count blocks stored now, present before and failed; `again` are those to try again: no space, or no store.

    `memory` and `disk`: slots of the blocks that are in the store now, by medium, where `locate` asks.  `quarantined`:
    how many values Mooncake may still read.
    """

    stored: int
    present: int
    failed: int
    again: list[tuple[bytes, int]]
    memory: list[int] = field(default_factory=list)
    disk: list[int] = field(default_factory=list)
    quarantined: int = 0


class Found(NamedTuple):
    """A byte for each digest of a question: whether the store holds it for every rank, and whether on disk alone."""

    present: bytes
    on_disk: bytes


def look_up(
    store: Store, layout: RankLayout, questions: Sequence[Sequence[bytes]], *, media: bool
) -> list[Found] | None:
    """Return the answers to several requests' questions, from one call; None if the store cannot say now.

    `media`: ask also where the values lie, about 3 us for each hit.  An object of another size is a miss then.
    """
    names = list(chain.from_iterable(questions))
    try:
        present = layout.joined(names, store.exist(layout.keys(names)))
        on_disk = bytearray(len(names))
        if media and (held := [at for at, there in enumerate(present) if there]):
            size = layout.staging.block_bytes[0] + layout.staging.sum_bytes
            where = store.media([layout.first_key(names[at]) for at in held], size)
            for at, medium in zip(held, where, strict=True):
                present[at], on_disk[at] = medium is not None, medium == "disk"
    except StoreUnavailable:
        return None
    stops = list(accumulate(map(len, questions)))
    bounds = zip([0, *stops], stops, strict=False)
    return [Found(bytes(present[start:stop]), bytes(on_disk[start:stop])) for start, stop in bounds]


def fetch(
    store: Store, layout: RankLayout, blocks: Sequence[tuple[bytes, int]], *, get: Get | None = None
) -> list[ErrorClass]:
    """Read (name, slot) blocks into their slots; a block is OK when every rank's part is there.

    A part that several ranks hold is read once and copied to the others.  A part that may be there soon is tried once
    more.  The caller sets `get.late` when it gives this fetch up, and `get.dropped` when nobody wants it unless it has
    begun.
    """
    values = layout.values(blocks)

    def get_into(keys: list[str], addresses: list[int], sizes: list[int], sums: list[int]) -> list[ErrorClass]:
        if not layout.written:
            return store.get_into(keys, addresses, sizes, get, sums=sums)
        written = [layout.written.get(key.rpartition("@")[0] + "@") for key in keys]
        return store.get_into(keys, addresses, sizes, get, written=written, sums=sums)

    def read(values: _Values) -> list[ErrorClass]:
        return _move(layout, values, get_into)

    try:
        results = read(values)
    except StoreUnavailable:
        return [ErrorClass.TRANSIENT] * len(blocks)
    again = [i for i, each in enumerate(results) if each in _SOON]
    if again and not (get is not None and get.dropped):
        time.sleep(RETRY_S)
        with contextlib.suppress(StoreUnavailable):  # then they stay as they are, and the others are there
            for i, each in zip(again, read(values.at(again)), strict=True):
                results[i] = each
    block_bytes = layout.staging.block_bytes
    for name, slot in blocks if len(results) < len(blocks) * len(block_bytes) else ():
        addresses = layout.staging.addresses(slot)
        for first, *others in layout.shards[name[-1]]:
            for other in others:
                ctypes.memmove(addresses[other], addresses[first], block_bytes[first])  # without the GIL
    if len(results) == len(blocks):
        return results
    of_blocks = layout.by_block([name for name, _ in blocks], results)
    return [next((each for each in some if each is not ErrorClass.OK), ErrorClass.OK) for some in of_blocks]


def _move(layout: RankLayout, values: _Values, call: Callable[..., list[ErrorClass]]) -> list[ErrorClass]:
    """Get or put these values; slots that Mooncake may go on using are quarantined. Raises what the call raises."""
    try:
        results = call(values.keys, values.addresses, values.sizes, values.sums)
    except StoreUnavailable:
        raise  # no transfer is under way
    except BaseException:
        layout.staging.quarantined.update(values.slots)  # nothing is known of the transfers
        raise
    if ErrorClass.UNDER_WAY in results:
        layout.staging.quarantined.update(compress(values.slots, [each is ErrorClass.UNDER_WAY for each in results]))
    return results


def save(store: Store, layout: RankLayout, blocks: Sequence[tuple[bytes, int]], *, locate: bool = False) -> SaveResult:
    """Put (name, slot) blocks that are not there yet, each part from the replica that filled the slot.

    With `locate`, also ask in which medium they are now.
    """
    values = layout.values(blocks, saving=True)
    try:
        there = store.exist(values.keys)
        missing = {key: i for i, (key, present) in enumerate(zip(values.keys, there, strict=True)) if not present}
        outcome = _move(layout, values.at(list(missing.values())), store.put_from)
    except StoreUnavailable:
        return SaveResult(0, 0, 0, list(blocks))
    written = dict(zip(missing, outcome, strict=True))
    again: list[tuple[bytes, int]] = []
    kept: list[tuple[str, int]] = []
    stored = present = failed = 0
    for block, keys in zip(blocks, layout.by_block([name for name, _ in blocks], values.keys), strict=True):
        results = {written.get(key) for key in keys}  # None: it was there already
        if results <= {None, ErrorClass.OK}:
            kept.append((keys[0], block[1]))
            present += results == {None}
            stored += results != {None}
        elif results <= {None, ErrorClass.OK, *_AGAIN}:
            again.append(block)
        else:
            failed += 1
    gone = outcome.count(ErrorClass.UNDER_WAY)
    result = SaveResult(stored, present, failed, again, quarantined=gone)
    if locate:
        media: Sequence[Medium | None] = [None] * len(kept)  # if the store cannot say: they were just put
        with contextlib.suppress(StoreUnavailable):
            media = store.media([key for key, _ in kept])
        for (_, slot), medium in zip(kept, media, strict=True):
            (result.disk if medium == "disk" else result.memory).append(slot)
    return result
