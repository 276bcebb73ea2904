"""The simulated daemon's part for an engine's KV groups: what the store has of a prompt, and the planner's questions.

As in daemon/engine/epoch.py and epoch_calls.py, a request gets the longest prefix that is there, and the next shorter
one where a block does not come.  A block's name is its digest and, in a last byte, its group's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.simulate.workload import SimRequest
from kvprefetch.daemon.planning.planner import Planner
from kvprefetch.daemon.planning.requests import Key
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
        ratio, last = groups.ratio(number), bytes([number])
        for block in some:
            yield request.digest((int(block) + 1) * ratio - 1) + last


class Prompts:
    """The prompts of one engine's requests in `planner`."""

    def __init__(self, planner: Planner, groups: Groups) -> None:
        self._planner, self._groups = planner, groups
        self._answers: dict[Key, tuple[set[bytes], Callable[[bytes], bool] | None]] = {}

    def hint(self, key: Key, request: SimRequest, local_blocks: int) -> None:
        planned = self._planner.blocks
        room, blocks = planned.slot_count - planned.quarantined, range(local_blocks, request.blocks)
        prompt = Prompt(self._groups, request.hashes, blocks, room=room, staged=planned.holds)
        self._planner.hint(key, prompt, request.priority, request.seen_ns)

    def looked_up(self, key: Key, request: SimRequest | None, on_disk: Callable[[bytes], bool] | None) -> int:
        """Take the store's answer for `request`, None for no answer; return the blocks of the chosen prefix."""
        self._answers[key] = set[bytes]() if request is None else stored(self._groups, request), on_disk
        return self.choose(key)

    def loaded(self, key: Key, blocks: range) -> list[range]:
        """Return which entries of the slot table the engine loads for these blocks of the prefix."""
        request = self._planner.requests.get(key)
        return [] if request is None else request.prompt.loaded(blocks)

    def end(self, key: Key) -> None:
        self._answers.pop(key, None)

    def choose(self, key: Key) -> int:
        """Choose the longest prefix of which no block is known to be absent or lost; return its blocks."""
        (there, on_disk), request = self._answers[key], self._planner.requests[key]
        while names := request.prompt.next(SLICE):
            lies = b"" if on_disk is None else bytes(map(on_disk, names))
            request.prompt.found(bytes(name in there for name in names), lies)
        return self._planner.choose(request).blocks
