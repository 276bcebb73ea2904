"""Seeded prompts as token ids: distinct from their first block on, so that none is a prefix of another."""

from __future__ import annotations

import random


def make_prompts(count: int, tokens: int, *, vocab: int = 2048, seed: int = 0) -> list[list[int]]:
    """``count`` prompts of ``tokens`` random token ids each; ids below 16 stay out (special tokens)."""
    source = random.Random(seed)
    return [[source.randrange(16, vocab) for _ in range(tokens)] for _ in range(count)]
