"""KV events of stored blocks: published once the store has them, and taken back at the end of a lifetime.

The daemon reports over the control connection which blocks of a save are in the store, and in which medium.  Nobody
reports what the store evicts.  So each announced block has a lifetime: a save, a load, or a use that the daemon asks
the store about begins it again.  At its end, at a reset and at the epoch's end the block counts as removed.

vLLM takes events with steps: an engine that is idle publishes what has ended with its next step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from ...shmring.wire.attach import Stored
from .geometry import Geometry

KEPT = 8  # saves of a slot whose reports may still come: reports are read with steps
MAX_ANNOUNCED = 1 << 16  # blocks; with more, the lifetime of the oldest ends


class _Announced(NamedTuple):
    until_ns: int
    digest: Any
    medium: str
    group: int


class SavedBlocks:
    """Events of the blocks in the store, and on their way there; but for its medium, each equals the engine's own.

    `saving`: of each slot the last KEPT saves that filled it, the block's name, and its event without its medium; None
    for one that is saved again.  A report may come after the slot was filled often; a lost one leaves no more.
    """

    def __init__(self, geometry: Geometry, lifetime_s: int) -> None:
        self._geometry, self._lifetime_ns = geometry, lifetime_s * 1_000_000_000
        self.saving: dict[int, deque[tuple[int, bytes, BlockStored | None]]] = {}
        self._announced: dict[bytes, _Announced] = {}  # by name; what ends first comes first
        self._events: list[BlockStored | BlockRemoved] = []  # to publish

    def describe(self, request: Any, blocks: range, group: int) -> BlockStored:
        """The event of some of a request's full blocks of a KV group, without its medium."""
        hashes, groups = request.block_hashes, self._geometry.groups
        size, ratio = groups.groups[group].block_tokens, groups.ratio(group)
        kind, window = self._geometry.spec_kinds[group]
        lora = request.lora_request
        # From feature 0 on: the function skips features that end before the block.
        extra = [generate_block_hash_extra_keys(request, at * size, (at + 1) * size, 0)[0] for at in blocks]
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in _of(hashes, blocks, ratio)],
            parent_block_hash=maybe_convert_block_hash(hashes[blocks.start * ratio - 1]) if blocks.start else None,
            token_ids=list(request.all_token_ids[blocks.start * size : blocks.stop * size]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=None,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=self._geometry.number(group),
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            session_id=request.session_id,
        )

    def loaded(self, request: Any, digests: list[bytes], blocks: range, *, disk: bool, now_ns: int) -> None:
        """Blocks came from the store, some of them from its disk or none: whoever put them there.

        `digests`: those that a prompt's blocks are stored under.  `request`: None where it has ended.
        """
        self.used(digests, blocks.start, now_ns)
        for group, items in enumerate(self._items(blocks)):
            names = self._names(digests, group, items)
            if request is None or self._announced.keys() >= set(names):
                self._renew(names, now_ns)
            else:
                medium = MEDIUM_STORAGE if disk else MEDIUM_CPU
                self._announce(self.describe(request, items, group), names, medium, now_ns)

    def used(self, digests: list[bytes], blocks: int, now_ns: int) -> None:
        """A request uses so many leading blocks: the daemon asks for them, and what is lost is saved again."""
        for group, items in enumerate(self._items(range(blocks))):
            self._renew(self._names(digests, group, items), now_ns)

    def _items(self, blocks: range) -> list[range]:
        unit = self._geometry.block_tokens
        return self._geometry.groups.items(blocks.start * unit, blocks.stop * unit)

    def _names(self, digests: list[bytes], group: int, blocks: range) -> list[bytes]:
        suffix = bytes([group])
        return [bytes(digest) + suffix for digest in _of(digests, blocks, self._geometry.groups.ratio(group))]

    def _announce(self, event: BlockStored, names: Sequence[bytes], medium: str, now_ns: int) -> None:
        event.medium = medium
        for name, digest in zip(names, event.block_hashes, strict=True):
            before = self._announced.pop(name, None)
            if before is not None and before.medium != medium:
                self._remove([before])
            self._announced[name] = _Announced(now_ns + self._lifetime_ns, digest, medium, event.group_idx)
        self._events.append(event)

    def _renew(self, names: Iterable[bytes], now_ns: int) -> None:
        for name in names:
            if (block := self._announced.pop(name, None)) is not None:
                self._announced[name] = block._replace(until_ns=now_ns + self._lifetime_ns)

    def _remove(self, blocks: Iterable[_Announced]) -> None:
        """Publish their removal: one event for each medium and KV group."""
        of: dict[tuple[str, int], list[Any]] = {}
        for block in blocks:
            of.setdefault((block.medium, block.group), []).append(block.digest)
        self._events += [BlockRemoved(found, medium, group_idx=group) for (medium, group), found in of.items()]

    def forget(self) -> None:
        """The store has no block any more that was announced, or not for this engine."""
        self.saving.clear()
        self._remove(self._announced.values())
        self._announced.clear()

    def take(self, reports: Iterable[Stored], now_ns: int) -> list[BlockStored | BlockRemoved]:
        """Return the events since the last call, in order: of blocks that the reports place in the store, each once."""
        for stored in reports:
            for medium, which in ((MEDIUM_CPU, stored.memory), (MEDIUM_STORAGE, stored.disk), (None, stored.failed)):
                for slot in which:
                    if (found := self.drop(stored.save_id, slot)) is None or medium is None:
                        continue
                    _, name, event = found
                    if event is None:
                        self._renew([name], now_ns)
                    else:
                        self._announce(event, [name], medium, now_ns)
        ended = list[bytes]()
        for name, block in self._announced.items():
            if block.until_ns > now_ns and len(self._announced) - len(ended) <= MAX_ANNOUNCED:
                break
            ended.append(name)
        self._remove([self._announced.pop(name) for name in ended])
        events, self._events = self._events, []
        return events

    def begin(self, save_id: int, slot: int, name: bytes, event: BlockStored | None) -> None:
        """A block is copied into this slot."""
        self.saving.setdefault(slot, deque(maxlen=KEPT)).append((save_id, name, event))

    def drop(self, save_id: int, slot: int) -> tuple[int, bytes, BlockStored | None] | None:
        """Forget what this save has in the slot, and return it; None where it was dropped, or its epoch ended."""
        held = self.saving.get(slot, deque())
        if (found := next((each for each in held if each[0] == save_id), None)) is not None:
            held.remove(found)
        return found


def _of(digests: list[bytes], blocks: range, ratio: int) -> list[bytes]:
    """Return the digests of these blocks: a block's own one is the last of its hashes."""
    return digests[(blocks.start + 1) * ratio - 1 : blocks.stop * ratio : ratio]
