"""A model whose KV bytes are a hash of all before them, so that one wrong byte anywhere changes all that follows.

The KV of a position in a layer is the hash of the KV bytes that the layer reads (of all positions before it, of a
window, of a chunk), and of what the layer below says of this position; the next token is a hash of every layer's.  A
layer with a state has one instead, which fills a page: the hash of the state before and of what the layer below says.
Equal bytes therefore prove that the same tokens were computed, in this order, by these weights, on the right KV:
nothing else can have written them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from kvprefetch.kv.groups import Group, Groups, Kind

LAYERS = 2  # of each KV group
VOCAB = 50
BLOCK = 4  # tokens of the smallest block, and of a digest
PAGE_BYTES = 128  # of a block in one layer: groups of larger blocks have narrower layers
BLOCK_BYTES = LAYERS * PAGE_BYTES

FULL = Group(Kind.FULL, BLOCK)
ONE_GROUP = Groups((FULL,), BLOCK)

Rows = list[list[bytes]]


def width(group: Group) -> int:
    """KV bytes of one position in one layer of a group, or of its state."""
    return PAGE_BYTES if group.kind is Kind.STATE else PAGE_BYTES // group.block_tokens


def first_read(group: Group, position: int) -> int:
    """The first position whose KV a layer of the group reads at `position`; it reads all from there."""
    if group.kind is Kind.WINDOW:
        return max(0, position - group.window_tokens + 1)
    if group.kind is Kind.CHUNK:
        return position // group.window_tokens * group.window_tokens
    return 0


def forward(
    groups: Groups, seed: str, start: int, tokens: Sequence[int], before: Callable[[int, int, int], bytes]
) -> Rows:
    """KV of `tokens` from position `start` on, as [group * LAYERS + layer][position]; of states each position's.

    `before(group, layer, first)` are the KV bytes of positions [first, start), or the state before `start`.
    """
    inputs = [token.to_bytes(4, "little", signed=True) for token in tokens]
    rows: Rows = []
    for number, group in enumerate(groups.groups):
        for layer in range(LAYERS):
            first = first_read(group, start)
            inputs = _layer(group, f"{seed}/{number}.{layer}", start, inputs, bytearray(before(number, layer, first)))
            rows.append(inputs)
    return rows


def _layer(group: Group, key: str, start: int, inputs: Sequence[bytes], past: bytearray) -> list[bytes]:
    if group.kind is Kind.STATE:
        return _states(key, start, inputs, bytes(past))
    size, empty = width(group), hashlib.blake2b(digest_size=width(group), key=key.encode().ljust(16, b"\0"))
    first = start - len(past) // size
    all_read, row = empty.copy(), []
    all_read.update(past)
    for position, below in enumerate(inputs, start):
        if group.kind is Kind.FULL:
            own = all_read.copy()
        else:
            own = empty.copy()
            own.update(past[(first_read(group, position) - first) * size :])
        own.update(below + position.to_bytes(4, "little"))
        row.append(own.digest())
        past += row[-1]
        all_read.update(row[-1])
    return row


def _states(key: str, start: int, inputs: Sequence[bytes], state: bytes) -> list[bytes]:
    row = []
    for position, below in enumerate(inputs, start):
        text = b"".join((key.encode().ljust(16, b"\0"), state, position.to_bytes(4, "little"), below))
        state = hashlib.shake_128(text).digest(PAGE_BYTES)
        row.append(state)
    return row


def sample(newest: Sequence[bytes]) -> int:
    """The next token from the newest position's KV: of every layer, of every rank."""
    return int.from_bytes(hashlib.blake2b(b"".join(newest), digest_size=4).digest(), "little") % VOCAB


class Truth:
    """The results of a run without any cache, for `ranks` ranks; computed once.

    `replicas` neighbouring ranks hold the same bytes, as ranks do that share a KV head.
    """

    def __init__(self, ranks: int, replicas: int = 1, groups: Groups = ONE_GROUP) -> None:
        self.ranks, self.replicas, self.groups = ranks, replicas, groups
        self._known: dict[tuple[int, tuple[int, ...]], list[Rows]] = {}

    def forward(
        self, weights: int, rank: int, start: int, tokens: Sequence[int], before: Callable[[int, int, int], bytes]
    ) -> Rows:
        """KV that a rank computes, as `forward` has it."""
        return forward(self.groups, f"{weights}/{rank // self.replicas}", start, tokens, before)

    def kv(self, weights: int, tokens: Sequence[int]) -> list[Rows]:
        """KV bytes of each rank."""
        key = (weights, tuple(tokens))
        if key not in self._known:
            self._known[key] = [self.forward(weights, rank, 0, tokens, lambda *_: b"") for rank in range(self.ranks)]
        return self._known[key]

    def block(self, weights: int, tokens: Sequence[int], rank: int, group: int) -> bytes:
        """The stored value of the last full block of `tokens` of a group: [layer][position][byte], or the states."""
        size = self.groups.groups[group].block_tokens
        assert len(tokens) % size == 0
        rows = self.kv(weights, tokens)[rank][group * LAYERS : (group + 1) * LAYERS]
        if self.groups.groups[group].kind is Kind.STATE:
            return b"".join(row[-1] for row in rows)
        return b"".join(b"".join(row[-size:]) for row in rows)

    def next_token(self, weights: int, tokens: Sequence[int]) -> int:
        return sample([row[-1] for rows in self.kv(weights, tokens) for row in rows])
