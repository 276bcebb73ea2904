"""The simulated daemon's part for an engine with several KV groups: the real rules of whole prefixes, on the planner.

As daemon/engine/epoch.py and epoch_calls.py, a request is hinted whole, gets the longest prefix that is there, and the
next shorter one where a block does not come.  A block's name is its digest and, in a last byte, its group's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.simulate.workload import SimRequest
from kvprefetch.daemon.planning.planner import Planner
from kvprefetch.daemon.planning.requests import Broken, Key
from kvprefetch.kv.groups import Groups, Kind
from kvprefetch.kv.prompts import SLICE, Prompt


def names(groups: Groups, request: SimRequest, start: int, stop: int) -> list[bytes]:
    """Return the names of the blocks to load for blocks [start, stop) of a prefix."""
    unit = groups.unit_tokens
    return list(_names(groups, request, groups.items(start * unit, stop * unit)))


def stored(groups: Groups, request: SimRequest) -> set[bytes]:
    """Return the names of what the store holds: what is saved of a prompt that ended one token after `found` blocks."""
    end = request.found * groups.unit_tokens
    saved: list[range | np.ndarray] = list(groups.saved(0, end, end + 1, 0))
    for number, group in enumerate(groups.groups):
        if group.kind is Kind.STATE:  # vLLM offers a state where the prompt ends
            saved[number] = groups.items(0, end)[number]
    return set(_names(groups, request, saved))


def _names(groups: Groups, request: SimRequest, blocks: list[range] | list[range | np.ndarray]) -> Iterator[bytes]:
    for number, some in enumerate(blocks):
        for at in groups.digests(number, some).tolist():
            yield request.digest(at) + bytes([number])


class Wholes:
    """The whole requests of one engine, in `planner`."""

    def __init__(self, planner: Planner, groups: Groups) -> None:
        self._planner, self._groups = planner, groups
        self._answers: dict[Key, tuple[set[bytes], Callable[[bytes], bool] | None]] = {}

    def hint(self, key: Key, request: SimRequest, local_blocks: int) -> None:
        blocks, holds = range(local_blocks, request.blocks), self._planner.blocks.holds
        prompt = Prompt(self._groups, request.hashes, blocks, room=self._room, staged=holds)
        self._planner.hint_whole(key, prompt, request.priority, request.seen_ns)

    def looked_up(self, key: Key, request: SimRequest | None, on_disk: Callable[[bytes], bool] | None) -> int:
        """Take the store's answer for `request`, None for no answer; return the blocks of the chosen prefix."""
        self._answers[key] = set[bytes]() if request is None else stored(self._groups, request), on_disk
        return self._choose(key)

    def broken(self, change: Broken) -> int:
        """Choose a shorter prefix without the lost blocks; return its blocks."""
        assert change.request.prompt is not None
        change.request.prompt.lost(change.blocks)
        return self._choose(change.request.key)

    def loaded(self, key: Key, blocks: range) -> list[range]:
        """Return which entries of the slot table the engine loads for these blocks of the prefix."""
        request = self._planner.requests.get(key)
        return [] if request is None or request.prompt is None else request.prompt.loaded(blocks)

    def end(self, key: Key) -> None:
        self._answers.pop(key, None)

    @property
    def _room(self) -> int:
        return self._planner.blocks.disk_slots - self._planner.blocks.lost

    def _choose(self, key: Key) -> int:
        (there, on_disk), request = self._answers[key], self._planner.requests[key]
        prompt = request.prompt
        assert prompt is not None
        while names := prompt.next(SLICE):
            lies = b"" if on_disk is None else bytes(map(on_disk, names))
            prompt.found(bytes(name in there for name in names), lies)
        choice = prompt.choose()
        self._planner.choose(request, choice.names, choice.name_bytes, choice.blocks, choice.on_disk)
        return choice.blocks
