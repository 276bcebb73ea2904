"""The faults of the campaign, and what a run of one found."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.faults.points import POINTS, Point

OF_ENGINE, OF_STORE = ("scheduler", "worker"), ("master", "storage node")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
# What happens to each victim. storm: killed and started three times in a row; starve: it may open no descriptor.
FAULTS = {victim: tuple(SIGNALS) for victim in (*OF_ENGINE, *OF_STORE)} | {
    "daemon": (*SIGNALS, "storm", "starve"),
    "link": ("cut", "crawl", "lossy"),
}
STOPPED_S = (1.0, 8.0)


@dataclass(frozen=True)
class Fault:
    """`point` None: at a random time of a pass.  `depth`: after which share of the pass's passages of the point."""

    victim: str
    kind: str
    point: Point | None
    depth: float = 0.0
    seconds: float = 0.0  # of a stop; of a random time: after which it comes

    @property
    def where(self) -> str:
        return self.point.name if self.point is not None else "a random time"


@dataclass
class Verdict:
    """What a run found; each list names what broke a promise. Times in ms."""

    fault: str
    victim: str
    kind: str
    reached: bool = False
    noticed_ms: float | None = None
    longest_step_ms: float = 0.0
    wrong_tokens: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    neighbour: list[str] = field(default_factory=list)
    untrue: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        found = [*self.wrong_tokens, *self.hung, *self.leaks, *self.neighbour, *self.untrue]
        return found if self.reached else [f"the point was not reached: {self.fault}", *found]

    def row(self) -> dict[str, Any]:
        return asdict(self)


def faults(count: int, seed: int) -> Iterator[Fault]:
    """Yield each point with each victim and kind in turn, and random times between; all of them come before a second
    round begins."""
    source = random.Random(seed)
    points: list[Point | None] = [*POINTS, None]
    every = [(point, victim, kind) for point in points for victim, kinds in FAULTS.items() for kind in kinds]
    left: list[tuple[Point | None, str, str]] = []
    for _ in range(count):
        if not left:
            left = source.sample(every, len(every))
        point, victim, kind = left.pop()
        depth = source.uniform(0.0, 0.8) if point is not None and not point.attach else 0.0
        yield Fault(victim, kind, point, depth, source.uniform(*STOPPED_S))


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what failed."""
    return [
        f"{row['victim']} {row['kind']} at {row['fault']}: {failure}"
        for row in rows
        for failure in Verdict(**row).failures
    ]
