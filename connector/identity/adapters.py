"""Names of blocks that a LoRA adapter computed: they have the adapter's content, where vLLM's hashes have its name.

vLLM hashes an adapter's name and path.  What was at that path may have been replaced since, and it is another adapter
in another folder, in a repository whose `main` moved on, or on another node.  So this side gives each block of such a
request a name of its own, which everything that compares names then uses: hints, staging, saves and keys.  vLLM's own
prefix cache and KV events keep vLLM's hashes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from ..words.metadata import AdapterRead

if TYPE_CHECKING:
    from ..engine.geometry import Geometry

Key = tuple[str, str]  # what vLLM knows an adapter's KV by: its name and its path
DIGEST_BYTES = 32

log = logging.getLogger("vllm.kvprefetch.scheduler")


class MaskedNames:
    """The names of a request's blocks: vLLM's hashes, exclusive-or a mask, which is the digest of the content.

    `content`: what all ranks have read of adapter `number`, as their load orders name it.

    Two contents under one hash have unlike masks, so unlike names.  Blocks with unlike hashes (other tokens, another
    adapter's name, or none) would share a name only if their hashes differed by exactly the difference of their masks:
    as unlikely as that two hashes are equal.  A request without an adapter has no mask.
    """

    __slots__ = ("_mask", "_names", "_request", "content", "number")

    def __init__(self, request: Any, content: bytes) -> None:
        self.number: int = request.lora_request.adapter_id
        self.content = content
        self._request, self._names, self._mask = request, list[bytes](), np.empty(0, np.uint8)

    def up_to_date(self) -> list[bytes]:
        """Return a name for each of the request's hashes: always the same list, which grows as they do."""
        hashes, names = self._request.block_hashes, self._names
        if new := hashes[len(names) :]:
            size = len(new[0])
            if not len(self._mask):
                mask = hashlib.blake2b(self.content, digest_size=size, person=b"kvprefetch").digest()
                self._mask = np.frombuffer(mask, np.uint8)
            masked = np.frombuffer(b"".join(new), np.uint8).reshape(-1, size) ^ self._mask
            names += masked.view(f"V{size}").ravel().tolist()
        return names


class RequestWithNames(Protocol):
    """A RequestState: `named` gives its blocks other names, and returns whether they were others."""

    request: Any

    def named(self, names: MaskedNames | None) -> bool: ...


_Named = TypeVar("_Named", bound=RequestWithNames)


class Adapters:
    """What the ranks have read of each adapter, and of which ones the KV may be shared.

    An adapter is known once all ranks have read the same.  While one is not, nothing of its requests is hinted, loaded
    or saved.  Another content under an adapter's name and path, or under its number while requests use that, ends this
    until the next reset: vLLM's own prefix cache has blocks of both contents under one hash then.

    `sure`: whether vLLM takes back a load that fails (`kv_load_failure_policy`); otherwise nothing is shared.  `late`:
    whether loads end before the step that computes with the adapter, and may read it again.  `towers`: whether adapters
    change what images become; vLLM keeps that by the adapter's name alone, also after a reset.
    """

    def __init__(self, world_size: int, *, sure: bool = True, late: bool = False, towers: bool = False) -> None:
        self._world_size, self._sure, self._late, self._towers = world_size, sure, late, towers
        self._read: dict[int, dict[int, bytes]] = {}  # number -> rank -> what it read last
        self._keys: dict[int, set[Key]] = {}  # number -> what its requests are hashed with
        self._first: dict[Key, dict[int, bytes]] = {}  # key -> rank -> what it read first
        self._ended: set[Key] = set()

    @classmethod
    def of_engine(cls, vllm_config: Any, geometry: Geometry) -> Adapters:
        lora = vllm_config.lora_config
        return cls(
            geometry.world_size,
            sure=vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute",
            late=not geometry.takes_back_loads,
            towers=lora is not None and lora.enable_tower_connector_lora,
        )

    def names(self, request: Any) -> MaskedNames | None:
        """Return the names of a request with an adapter; None while its KV is not shared."""
        adapter = request.lora_request
        key = self._key(adapter.name, adapter.path)
        self._keys.setdefault(adapter.adapter_id, set()).add(key)
        self._note(key, self._usable(adapter))
        return self.known_names(request)

    def known_names(self, request: Any) -> MaskedNames | None:
        """Return what `names` would now, on any thread: it notes nothing, so the content may be another one since."""
        adapter = request.lora_request
        ended = self._key(adapter.name, adapter.path) in self._ended
        content = b"" if ended else joined(self._usable(adapter))
        return MaskedNames(request, content) if content else None

    def _usable(self, adapter: Any) -> Mapping[int, bytes]:
        """Return what each rank has read of it; nothing while one has not, or where it cannot be relied on."""
        ranks = self._read.get(adapter.adapter_id, {})
        relied = self._sure and len(ranks) == self._world_size and not (self._late and adapter.load_inplace)
        return ranks if relied else {}

    def read(self, reports: Mapping[int, Iterable[AdapterRead]]) -> bool:
        """Ranks have read adapters. Return whether sharing has ended for one of them."""
        before = len(self._ended)
        numbers = set[int]()
        for rank, reads in reports.items():
            for number, name, path, content in reads:
                numbers.add(number)
                self._keys.setdefault(number, set()).add(self._key(name, path))
                self._read.setdefault(number, {})[rank] = content
                for key in self._keys[number]:
                    self._note(key, {rank: content})
        for number in numbers:
            if len(self._read[number]) == self._world_size and not joined(self._read[number]):
                for key in self._keys[number]:
                    self._end(key, "the ranks have not read the same")
        return len(self._ended) > before

    def name(self, states: Iterable[_Named]) -> list[_Named]:
        """Name the blocks of all requests with adapters. Return those that had other names."""
        adapted = [state for state in states if state.request.lora_request is not None]
        return [state for state in adapted if state.named(self.names(state.request))]

    def _key(self, name: str, path: str) -> Key:
        return name, "" if self._towers else path

    def _note(self, key: Key, ranks: Mapping[int, bytes]) -> None:
        """Blocks with the hashes of this key have this content from now on."""
        first = self._first.setdefault(key, {})
        if any(first.setdefault(rank, content) != content for rank, content in ranks.items()):
            self._end(key, "its content has changed")

    def _end(self, key: Key, why: str) -> None:
        if key not in self._ended:
            self._ended.add(key)
            name, path = key
            until = "start" if self._towers else "reset"
            text = "kvprefetch: KV of adapter %r is not shared until the next %s: %s: path=%s"
            log.warning(text, name, until, why, path)

    def reset(self, states: Iterable[RequestWithNames]) -> None:
        """vLLM's own prefix cache is empty, or nothing that was in it is saved. These requests get names anew."""
        if not self._towers:
            self._keys.clear()
            self._first.clear()
            self._ended.clear()
        self.name(states)


def joined(ranks: Mapping[int, bytes]) -> bytes:
    """Return what all ranks have in common, and then what each has for itself; nothing where they disagree."""
    common = {content[:DIGEST_BYTES] for content in ranks.values()}
    if len(common) != 1 or b"" in common:
        return b""
    return b"".join([*common, *(ranks[rank][DIGEST_BYTES:] for rank in sorted(ranks))])


def of_rank(content: bytes, rank: int) -> bytes:
    """Return what this rank has read, where `joined` gave this content."""
    start = DIGEST_BYTES * (rank + 1)
    return content[:DIGEST_BYTES] + content[start : start + DIGEST_BYTES]
