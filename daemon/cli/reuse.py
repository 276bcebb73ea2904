"""How much of the prompts in a log a store of any size would find, in one pass: for `kvprefetchd estimate TRACE`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from ...kv.hashing import block_digests
from ..config.model import ConfigError

FILLED = 0.9  # of its size: Mooncake evicts from 95 % down to 90 %, and some blocks whose prefix it drops are of no use
MOONCAKE_TOKENS = 512  # of a hash in Mooncake's traces, where they do not say it
_VLLM = re.compile(r"prompt_token_ids: \[([\d, ]*)\]")


class LogPrompt(NamedTuple):
    """A prompt's tokens, the names of its full blocks, and the tokens of each."""

    tokens: int
    blocks: Sequence[Hashable]
    block_tokens: int


def prompts(lines: Iterable[str], block_tokens: int) -> Iterator[LogPrompt]:
    """Yield the prompts of a log; its other lines are left out.

    Those of Mooncake's traces (`hash_ids`) and of LMCache's look-ups (`chunk_hashes`) name their blocks.  Token ids, in
    JSON or as `vllm serve --enable-log-requests` logs them at the level DEBUG, are hashed by `block_tokens`.  Raises
    ConfigError for a line that is broken.
    """
    for number, line in enumerate(lines, 1):
        try:
            if found := _VLLM.search(line):
                yield _of_tokens(list(map(int, found[1].split(","))) if found[1] else [], block_tokens)
            elif line.startswith("{"):
                said = json.loads(line)
                if "hash_ids" in said:
                    unit, tokens = int(said.get("block_size", MOONCAKE_TOKENS)), int(said["input_length"])
                    yield LogPrompt(tokens, said["hash_ids"][: tokens // unit], unit)
                elif "chunk_hashes" in said:
                    yield LogPrompt(int(said["seq_len"]), said["chunk_hashes"], int(said["chunk_size"]))
                elif isinstance(given := said.get("prompt_token_ids", said.get("prompt")), list):
                    yield _of_tokens(given, block_tokens)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"estimate: line {number} of the trace is no prompt: {error!r}: {line[:80]!r}") from None


def _of_tokens(tokens: list[int], block_tokens: int) -> LogPrompt:
    return LogPrompt(len(tokens), [*block_digests(tokens, block_tokens)], block_tokens)


class Reuse:
    """The prompts so far, as a store sees them that drops what was not used for longest.

    The blocks of a prompt are used together, the first ones last, so a store that has a block has all before it.  Then
    one number for each block says which sizes find it: how many others were used since.
    """

    def __init__(self) -> None:
        self.prompts = self.tokens = 0
        self._found: Counter[int] = Counter()  # tokens that a store of so many tokens finds, and a smaller one does not
        self._at: dict[Hashable, int] = {}  # of each block, its last use
        self._sizes = [0]  # a tree of sums (Fenwick) of the tokens of the blocks by last use

    def add(self, prompt: LogPrompt) -> None:
        self.prompts, self.tokens, needed = self.prompts + 1, self.tokens + prompt.tokens, 0
        whole = self._sum(len(self._sizes) - 1)
        usable = min(len(prompt.blocks), max(0, prompt.tokens - 1) // prompt.block_tokens)  # the last token is computed
        for block in prompt.blocks[:usable]:
            if (at := self._at.get(block)) is None:
                break
            needed = max(needed, whole - self._sum(at - 1))
            self._found[needed] += prompt.block_tokens
        for block in reversed(dict.fromkeys(prompt.blocks)):
            if (at := self._at.get(block)) is not None:
                self._grow(at, -prompt.block_tokens)
            self._at[block] = len(self._sizes)
            self._append(prompt.block_tokens)

    @property
    def all_tokens(self) -> int:
        return self._sum(len(self._sizes) - 1)

    def found(self, store_tokens: float) -> int:
        """Return how many of all tokens a store found that holds so many."""
        return sum(tokens for needed, tokens in self._found.items() if needed <= store_tokens)

    def _sum(self, last: int) -> int:
        total = 0
        while last > 0:
            total += self._sizes[last]
            last &= last - 1
        return total

    def _grow(self, at: int, tokens: int) -> None:
        while at < len(self._sizes):
            self._sizes[at] += tokens
            at += at & -at

    def _append(self, tokens: int) -> None:
        """Add a last element: its node covers as many as its lowest bit says."""
        at = len(self._sizes)
        below, first = at - 1, at - (at & -at)
        while below > first:
            tokens += self._sizes[below]
            below &= below - 1
        self._sizes.append(tokens)
