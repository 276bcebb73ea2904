"""The pieces of `make bench`: each is a question, an axis with its points, and a load. A new sweep is ten lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.bench.setting import Setting
from benchmarks.bench.variants import DEFAULT, LOCAL, ON_DEMAND, OURS

BASE = Setting()


@dataclass(frozen=True, slots=True)
class Piece:
    """A sweep. `vary` makes the setting of a point from `base` and the point's place on the axis.

    `quick` are the points of a short run; `unit` of the axis is written behind a number.
    """

    name: str
    question: str
    axis: str
    points: tuple[float, ...]
    quick: tuple[float, ...]
    vary: Callable[[Setting, float], Setting]
    base: Setting = BASE
    variants: tuple[str, ...] = DEFAULT
    rounds: int = 3
    logarithmic: bool = False
    quick_share: int = 2
    """A short run has so much less requests."""

    def settings(
        self, *, quick: bool, requests: int | None = None, points: Sequence[float] = ()
    ) -> list[tuple[float, Setting]]:
        """The points and their settings; `requests` instead of the piece's own, of which a quick run has half."""
        base = self.base.but(
            requests=requests or (self.base.requests // self.quick_share if quick else self.base.requests)
        )
        return [(point, self.vary(base, point)) for point in points or (self.quick if quick else self.points)]


PIECES = {
    piece.name: piece
    for piece in (
        Piece(
            "hide",
            "How much of a fetch does the wait for a place hide?",
            "wait for a place / time to fetch (W/F)",
            (0.1, 0.25, 0.5, 1, 2, 4, 10),
            (0.5, 2),
            lambda base, at: base.but(level=at),
            Setting(arrivals="behind", requests=6, places=1, output_tokens=(8, 8), link_mbit=150),
            variants=(LOCAL, ON_DEMAND, "kvprefetch-wait"),
            rounds=2,
            logarithmic=True,
        ),
        Piece(
            "prompt",
            "Does the length of prompts matter?",
            "prompt tokens",
            (250, 500, 1000, 2000, 3500),
            (500, 2000),
            lambda base, at: base.but(prompt_tokens=int(at)),
            Setting(requests=12, link_mbit=250),
        ),
        Piece(
            "hits",
            "What if the store has only a part of each prompt?",
            "share of the prompt that the store has",
            (0, 0.25, 0.5, 0.75, 1),
            (0, 0.5),
            lambda base, at: base.but(hit=at),
            Setting(requests=10, level=0.5),
        ),
        Piece(
            "pool",
            "What if the engine has room for the KV of requests that wait?",
            "requests for which the KV pool has room beyond those that run",
            (1, 4, 16),
            (1, 8),
            lambda base, at: base.but(spare=int(at)),
        ),
        Piece(
            "engines",
            "What if several engines share a node, a daemon and a link?",
            "engines on the node, same load in all",
            (1, 2, 4),
            (2,),
            lambda base, at: base.but(engines=int(at)),
            Setting(requests=24),
            variants=(LOCAL, "upstream-async", OURS),
        ),
    )
}


def chosen(names: Sequence[str], table: Mapping[str, Piece] = PIECES) -> list[Piece]:
    """The pieces of these names, all without one; raises ValueError for a name that is none."""
    if unknown := [each for each in names if each not in table]:
        raise ValueError(f"no such piece: {', '.join(unknown)}: choose from {', '.join(table)}")
    return [table[each] for each in names] if names else list(table.values())
