"""What a step of the bed's device is made of: requests, what each of them computes, and where its tokens are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.lab.bed import oracle
from tests.lab.bed.layouts import Layer


class Request:
    """A request as the device knows it: its tokens, their prefixes, its block tables."""

    def __init__(self, name: str, tokens: Sequence[int], before: np.uint64) -> None:
        self.name, self.prompt = name, len(tokens)
        self.tokens = np.empty(0, dtype=np.int64)
        self.prefix = np.empty(0, dtype=np.uint64)
        self.known, self.computed, self.blocks = 0, 0, list[list[int]]()
        self.fresh, self.wrong, self.reported = True, False, set[tuple[int, int]]()
        self.drafted: list[int] = []
        # Of a hit whose end vLLM computes again: where that begins, and where the hit ends.
        self.replayed = range(0)
        self.seed = self._before = before
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens that are known from now on."""
        end = self.known + len(tokens)
        if end > len(self.tokens):
            self.tokens = _grown(self.tokens, end)
            self.prefix = _grown(self.prefix, end)
        self.tokens[self.known : end] = tokens
        self.prefix[self.known : end] = oracle.prefixes(tokens, start=self.known, before=self._before)
        self.known = end
        if end:
            self._before = self.prefix[end - 1]

    def truncate(self, known: int) -> None:
        """Forget tokens that the scheduler dropped."""
        self.known = known
        self._before = self.prefix[known - 1]

    def taint(self, since: int) -> None:
        """Make KV and tokens wrong from this position on, as those of a model that read something wrong."""
        with np.errstate(over="ignore"):
            self.prefix[since : self.known] += oracle.SALT
            self._before = self._before + oracle.SALT
        self.wrong = True

    @property
    def last(self) -> np.uint64:
        """Prefix after all known tokens."""
        return self._before


def _grown(array: NDArray[Any], needed: int) -> NDArray[Any]:
    found = np.empty(max(needed + 64, 2 * len(array)), dtype=array.dtype)
    found[: len(array)] = array
    return found


@dataclass
class Work:
    """What one request computes in a step: tokens from `start`, the last of which are drafts."""

    request: Request
    start: int
    count: int
    drafts: list[int]
    sampled: list[int] = field(default_factory=list)

    @property
    def samples(self) -> bool:
        return self.start + self.count - len(self.drafts) >= self.request.known


@dataclass(frozen=True)
class Slots:
    """Places of tokens in a group, as flat arrays; `work` and `position` say whose, `mine` whether on this rank."""

    blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    prefix: oracle.Prefixes
    work: NDArray[np.int64]
    position: NDArray[np.int64]
    mine: NDArray[np.bool_]

    def of(self, layer: Layer) -> Slots:
        """Return this rank's rows; those that are complete, of a layer whose rows stand for several tokens."""
        size = layer.row_tokens
        kept = self.mine & ((self.position + 1) % size == 0)
        if size == 1 and kept.all():
            return self
        every = (self.blocks, self.offsets // size, self.prefix, self.work, self.position, self.mine)
        return Slots(*(each[kept] for each in every))


@dataclass
class Plan:
    """A step: what each request computes, and per group what it reads and writes."""

    work: list[Work]
    reads: list[Slots]
    writes: list[Slots]
    copied: Counter[str]
    """By request, bytes of the blocks that it came with and no step of the device had filled: a connector did."""
    bad: set[int] = field(default_factory=set)
