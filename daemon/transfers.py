"""Store work of one engine: look-ups, fetches into slots, saves out of slots, removals; each one blocking job.

Each function turns one job of one engine into store calls for all its ranks.  A block counts only when every rank's
part does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..shmring.messages import WorkerShape
from .staging import HostStaging
from .store import Store, StoreUnavailable, Tier
from .store_errors import ErrorClass

RETRY_S = 0.02  # a replica being written or busy is usually there by then
_PASSING = (ErrorClass.TRANSIENT, ErrorClass.TRANSFER)


@dataclass(frozen=True)
class Shape:
    """Where one engine's blocks lie: store key prefix of each rank (fixed at attach) and its staging.

    Ranks with one prefix hold the same bytes. Of them, rank r fills the save slots with slot % factor == turn, where
    (factor, turn) = turns[r].
    """

    key_prefixes: tuple[str, ...]
    turns: tuple[tuple[int, int], ...]
    staging: HostStaging

    @classmethod
    def of(cls, workers: Sequence[WorkerShape], staging: HostStaging) -> Shape:
        """The shape of ranks that `check_turns` accepted."""
        turns = tuple((worker.put_factor, worker.put_turn) for worker in workers)
        return cls(tuple(worker.key_prefix[0] for worker in workers), turns, staging)

    def keys(self, digest: bytes) -> list[str]:
        name = digest.hex()
        return [prefix + name for prefix in self.key_prefixes]


def check_turns(workers: Sequence[WorkerShape]) -> None:
    """Raise ValueError unless every save slot is filled by exactly one of the ranks that share a key prefix."""
    sharing: dict[str, list[tuple[int, int]]] = {}
    for worker in workers:
        sharing.setdefault(worker.key_prefix[0], []).append((worker.put_factor, worker.put_turn))
    for prefix, turns in sharing.items():
        if sorted(turns) != [(len(turns), turn) for turn in range(len(turns))]:
            raise ValueError(
                f"ranks with one key prefix must take turns: key_prefix={prefix!r} (put_factor, put_turn)={turns} "
                f"expected=({len(turns)}, 0 to {len(turns) - 1})"
            )


@dataclass(frozen=True)
class SaveResult:
    """Blocks stored now, blocks that were there already, blocks lost, and those to try again: no space, or no store.

    `memory` and `disk` are the slots of the blocks that are in the store now, by tier; only when `locate` asked for it.
    """

    stored: int
    present: int
    failed: int
    again: list[tuple[bytes, int]]
    memory: list[int] = field(default_factory=list)
    disk: list[int] = field(default_factory=list)


class Found(NamedTuple):
    """How many leading digests of one question the store holds for every rank, and which of these only on disk (1)."""

    run: int
    on_disk: bytes


def look_up(store: Store, shape: Shape, questions: Sequence[Sequence[bytes]], *, tiers: bool) -> list[Found] | None:
    """The answers to several requests' questions; None when the store cannot say now.

    `tiers`: ask also where the values lie. It costs about 2 us for each block that is there, and a miss nothing.
    """
    prefixes = list(dict.fromkeys(shape.key_prefixes))
    parts = len(prefixes)
    keys = [prefix + digest.hex() for digests in questions for digest in digests for prefix in prefixes]
    try:
        present = store.exist(keys)
        runs, at = [], 0
        for digests in questions:
            whole = len(digests) * parts
            missing = next((i for i in range(at, at + whole) if not present[i]), at + whole)
            runs.append((at, (missing - at) // parts))
            at += whole
        if not tiers:
            return [Found(run, b"") for _, run in runs]
        found = [store.tiers(keys[start : start + run * parts : parts]) if run else [] for start, run in runs]
    except StoreUnavailable:
        return None
    return [Found(len(where), bytes(tier == "disk" for tier in where)) for where in found]


def fetch(store: Store, shape: Shape, blocks: Sequence[tuple[bytes, int]]) -> list[ErrorClass]:
    """Read (digest, slot) blocks into their slots; what became of each: OK when every rank's part is there.

    Parts whose class says so are tried once more.
    """
    keys, addresses = _targets(shape, blocks)
    sizes = shape.staging.block_bytes * len(blocks)
    ranks = len(sizes) // len(blocks)
    try:
        parts = store.get_into(keys, addresses, sizes)
        again = [i for i, part in enumerate(parts) if part in (ErrorClass.RETRY, ErrorClass.LOOKUP_AGAIN)]
        if again:
            time.sleep(RETRY_S)
            second = store.get_into([keys[i] for i in again], [addresses[i] for i in again], [sizes[i] for i in again])
            for i, part in zip(again, second, strict=True):
                parts[i] = part
    except StoreUnavailable:
        return [ErrorClass.TRANSIENT] * len(blocks)
    return [
        next((part for part in parts[i * ranks : (i + 1) * ranks] if part is not ErrorClass.OK), ErrorClass.OK)
        for i in range(len(blocks))
    ]


def save(store: Store, shape: Shape, blocks: Sequence[tuple[bytes, int]], *, locate: bool = False) -> SaveResult:
    """Put (digest, slot) blocks that are not there yet; of ranks that share a key, the one whose turn the slot is.

    With `locate`, also ask in which tier they are now.
    """
    ranks = len(shape.key_prefixes)
    keys, addresses = _targets(shape, blocks)
    targets: dict[str, tuple[int, int]] = {}
    for i, (key, address) in enumerate(zip(keys, addresses, strict=True)):
        factor, turn = shape.turns[i % ranks]
        if blocks[i // ranks][1] % factor == turn:
            targets[key] = (address, shape.staging.block_bytes[i % ranks])
    names = list(targets)
    try:
        there = store.exist(names)
        missing = [name for name, present in zip(names, there, strict=True) if not present]
        outcome = store.put_from(missing, [targets[n][0] for n in missing], [targets[n][1] for n in missing])
    except StoreUnavailable:
        return SaveResult(0, 0, 0, list(blocks))
    written = dict(zip(missing, outcome, strict=True))
    stored = present = failed = 0
    again: list[tuple[bytes, int]] = []
    kept: list[tuple[str, int]] = []
    for i, block in enumerate(blocks):
        results = {written.get(key) for key in keys[i * ranks : (i + 1) * ranks]}  # None: it was there already
        if results <= {None, ErrorClass.OK}:
            stored += results != {None}
            present += results == {None}
            kept.append((keys[i * ranks], block[1]))
        elif results <= {None, ErrorClass.OK, ErrorClass.NO_SPACE, ErrorClass.RETRY, *_PASSING}:
            again.append(block)
        else:
            failed += 1
    result = SaveResult(stored, present, failed, again)
    if locate:
        for (_, slot), tier in zip(kept, _tiers(store, [key for key, _ in kept]), strict=True):
            (result.disk if tier == "disk" else result.memory).append(slot)
    return result


def _tiers(store: Store, keys: Sequence[str]) -> Sequence[Tier | None]:
    """Where these values lie. What was just put lies in memory, if the store cannot say."""
    try:
        return store.tiers(keys)
    except StoreUnavailable:
        return [None] * len(keys)


def remove_all(store: Store, shape: Shape, timeout_s: float) -> bool:
    """Remove every key of this engine's namespace; True only when confirmed."""
    try:
        return store.remove_matching(sorted(set(shape.key_prefixes)), timeout_s)
    except StoreUnavailable:
        return False


def _targets(shape: Shape, blocks: Sequence[tuple[bytes, int]]) -> tuple[list[str], list[int]]:
    keys = [key for digest, _ in blocks for key in shape.keys(digest)]
    addresses = [address for _, slot in blocks for address in shape.staging.addresses(slot)]
    return keys, addresses
