"""Requests of a load: arrivals, prompts as chains of digests, their blocks in the store, aborts, priorities."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.simulate.events import ns
from kvprefetch.connector.policy import Wait

HASH_BYTES = 8
_DIGEST = struct.Struct(">II")  # node of the prefix tree, block in it


@dataclass(frozen=True, slots=True)
class Load:
    """The arrivals. A prompt has `shared_blocks` of tree levels, then blocks of its own, then a tail."""

    requests: int = 100_000
    rate_per_s: float = 20.0
    burst: int = 1
    """Requests per burst; bursts arrive as a Poisson process of `rate_per_s / burst`. 1: plain Poisson."""
    shared_blocks: tuple[int, ...] = ()
    """Blocks of each level of the prefix tree, from the root."""
    fan_out: tuple[int, ...] = ()
    """Branches below one node, of each level."""
    own_blocks: tuple[int, int] = (48, 64)
    """Fewest and most blocks of a prompt that no other request has."""
    tail_tokens: tuple[int, int] = (64, 320)
    """Tokens after the last block that the store may hold; the engine always computes them."""
    output_tokens: tuple[int, int] = (64, 192)
    miss_share: float = 0.0
    """Requests without any own block in the store."""
    lost_share: float = 0.0
    """Blocks that the look-up finds and the fetch does not."""
    abort_share: float = 0.0
    abort_after_s: float = 5.0
    """Mean time from arrival to an abort (exponential)."""
    urgent_share: float = 0.0
    """Requests of priority -1; the others have 0."""
    disk_share: float = 0.0
    """Nodes of the tree and own parts of prompts that lie on disk."""
    arrivals_s: tuple[float, ...] = ()
    """Explicit arrivals, in place of `requests`, `rate_per_s` and `burst`."""


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request and its course. Times are simulated nanoseconds; 0: it did not happen."""

    index: int
    arrival_ns: int
    hashes: bytes
    found: int
    """Leading blocks that the store holds."""
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    abort_ns: int = 0
    # The connector's state:
    key: tuple[int, int] | None = None
    hinted_local: int = 0
    late_hints: int = 0
    asked_ns: int = 0
    wait: Wait | None = None
    pending: bool = False
    claimed: int = 0
    settled: bool = False
    # the engine's state:
    state: str = "waiting"
    visible: bool = False
    held_blocks: int = 0
    remaining: int = 0
    # and what the run reports.
    seen_ns: int = 0
    looked_up_ns: int = 0
    claimed_ns: int = 0
    local_blocks: int = 0
    loaded_blocks: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    outcome: str = ""

    @property
    def blocks(self) -> int:
        """Blocks of the prompt that have a digest."""
        return len(self.hashes) // HASH_BYTES

    def digest(self, block: int) -> bytes:
        return self.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]


class StoreContents:
    """Where the store holds the nodes of the prefix tree."""

    def __init__(self, seed: int, lost_share: float) -> None:
        self._disk: set[int] = set()
        self._seed, self._lost_share = seed, lost_share

    def put_on_disk(self, node: int) -> None:
        self._disk.add(node)

    def on_disk(self, digest: bytes) -> bool:
        return _DIGEST.unpack_from(digest)[0] in self._disk

    def lost(self, digest: bytes) -> bool:
        """Whether the fetch of this block fails although its look-up found it."""
        if self._lost_share == 0.0:
            return False
        node, block = _DIGEST.unpack_from(digest)
        group = int.from_bytes(digest[HASH_BYTES:], "big")  # of a block of several KV groups (groups.py)
        number = group << 128 | self._seed << 64 | node << 32 | block
        return random.Random(number).random() < self._lost_share


def chain(node: int, blocks: int) -> bytes:
    """Return the digests of a node's first `blocks` blocks."""
    return b"".join(_DIGEST.pack(node, block) for block in range(blocks))


def arrivals_ns(load: Load, rng: random.Random) -> Iterator[int]:
    """Yield arrival times in order, from 1 ns on: 0 means that something did not happen."""
    if load.arrivals_s:
        yield from (1 + ns(each) for each in sorted(load.arrivals_s))
        return
    now, left = 0.0, load.requests
    while left > 0:
        now += rng.expovariate(load.rate_per_s / load.burst)
        for _ in range(min(load.burst, left)):
            yield 1 + ns(now)
        left -= load.burst


def generate(load: Load, block_tokens: int, contents: StoreContents, seed: int) -> Iterator[SimRequest]:
    """Yield the requests in order of arrival; equal seeds give equal requests."""
    rng = random.Random(seed)
    clock = random.Random(seed + 1)  # of its own: loads that differ in one trait arrive at equal times
    tree: dict[tuple[int, ...], int] = {}
    nodes = 0

    def new_node() -> int:
        nonlocal nodes
        nodes += 1
        if rng.random() < load.disk_share:
            contents.put_on_disk(nodes)
        return nodes

    for index, arrival in enumerate(arrivals_ns(load, clock)):
        hashes = b""
        path: tuple[int, ...] = ()
        for blocks, branches in zip(load.shared_blocks, load.fan_out, strict=True):
            # A few branches get most requests, as in real prompts with shared documents.
            path += (min(int(rng.paretovariate(0.7)), branches),)
            if path not in tree:
                tree[path] = new_node()
            hashes += chain(tree[path], blocks)
        own = rng.randint(*load.own_blocks)
        shared = len(hashes) // HASH_BYTES
        node = new_node()
        tail = rng.randint(*load.tail_tokens)
        hashes += chain(node, own + tail // block_tokens)
        found = shared + own
        if rng.random() < load.miss_share:
            found = shared
        tokens = (shared + own) * block_tokens + tail
        # The engine has to compute one token at least, so a full last block is not loaded.
        usable = (tokens - 1) // block_tokens
        output = rng.randint(*load.output_tokens)
        priority = -1 if rng.random() < load.urgent_share else 0
        aborted = rng.random() < load.abort_share
        patience = rng.expovariate(1.0 / load.abort_after_s)
        request = SimRequest(
            index, arrival, hashes[: usable * HASH_BYTES], min(found, usable), tokens, output, priority
        )
        request.abort_ns = arrival + 1 + ns(patience) if aborted else 0
        yield request


def fixed(lengths: Sequence[tuple[int, int, int]], arrivals: Sequence[float], block_tokens: int) -> list[SimRequest]:
    """Return requests of (prompt tokens, blocks in the store, output tokens), with arrivals in s and nothing shared."""
    requests = []
    for index, ((tokens, found, output), arrival) in enumerate(zip(lengths, arrivals, strict=True)):
        usable = (tokens - 1) // block_tokens
        requests.append(
            SimRequest(index, 1 + ns(arrival), chain(index + 1, usable), min(found, usable), tokens, output)
        )
    return requests
