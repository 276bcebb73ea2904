"""What one pass gave, as the result keeps it: raw figures of each request, and what the pass took of the machine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.bench.setting import Plan
from tests.lab.passes import Pass

# Of the daemon's `request.done` lines: fetched bytes, the time from the hint to the last byte, and the exposed wait.
MS = 1e-3


@dataclass(slots=True)
class Requests:
    """Columns, one entry for each measured request; seconds since the pass began."""

    prompt: list[int] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    finished_s: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    """How long another request held the only place after this one's arrival; where that is arranged, else empty."""

    @property
    def ttft_s(self) -> list[float]:
        return [first - arrival for first, arrival in zip(self.first_token_s, self.arrival_s, strict=True)]


@dataclass(slots=True)
class Daemon:
    """What the daemon logged of the pass's requests; columns, in the order of their ends."""

    outcome: list[str] = field(default_factory=list)
    fetched_bytes: list[int] = field(default_factory=list)
    loaded_blocks: list[int] = field(default_factory=list)
    transfer_s: list[float] = field(default_factory=list)
    """From the hint to the last byte, of requests that fetched."""
    hidden: list[float] = field(default_factory=list)
    """Hidden fraction, of requests that fetched."""
    exposed_s: list[float] = field(default_factory=list)
    announced_s: list[float] = field(default_factory=list)
    """From the announcement to the hint, of requests that were announced."""
    announced_blocks: int = 0
    announced_staged: int = 0
    """Of `announced_blocks`, those that were staged when the hint came."""

    def add(self, line: dict[str, Any]) -> None:
        """Take one ``request.done`` line."""
        self.outcome.append(line["outcome"])
        self.fetched_bytes.append(line["bytes"])
        self.loaded_blocks.append(line["loaded_blocks"])
        self.exposed_s.append(round(MS * line["exposed_ms"], 5))
        if line["hidden_fraction"] is not None:
            self.hidden.append(round(line["hidden_fraction"], 4))
        if line.get("announced_ms") is not None:
            self.announced_s.append(round(MS * line["announced_ms"], 5))
            self.announced_blocks += line["announced_blocks"]
            self.announced_staged += line["announced_staged"]
        if line["last_byte_ms"] is not None and line["hint_seen_ms"] is not None:
            self.transfer_s.append(round(MS * (line["last_byte_ms"] - line["hint_seen_ms"]), 5))


@dataclass(slots=True)
class Served:
    """One pass of one variant."""

    requests: Requests
    total_s: float
    steps: int = 0
    engine_cpu_s: float = 0.0
    other_cpu_s: float = 0.0
    """CPU of all else that the benchmark runs: daemon, servers, stores."""
    link_bytes: int | None = None
    """What came over the link, headers included; None without one."""
    others_cores: float = 0.0
    """Cores that other programs kept busy."""
    load: float = 0.0
    """Load average at the end."""
    daemon: Daemon | None = None
    counts: dict[str, float] = field(default_factory=dict)
    """More figures of the whole pass (FIGURES in benchmarks/bench/figures.py)."""
    gaps_s: list[float] = field(default_factory=list)
    """Between two tokens of a request, as its client saw them; not kept."""
    begun_s: float = 0.0
    """When it began, on the clock of the machine; not kept."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """Output tokens by the prompt's number; compared, not kept."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """The daemon's `request.done` lines; not kept."""

    def kept(self) -> dict[str, Any]:
        """As the result has it."""
        values = asdict(self)
        del values["tokens"], values["lines"], values["gaps_s"], values["begun_s"]
        return values


def merged(parts: Sequence[tuple[Plan, Pass]]) -> Served:
    """One pass out of those of all its engines, which began together."""
    columns, tokens, gaps_s = Requests(), {}, list[float]()
    for asked, result in parts:
        free_s = 0.0  # when the only place is free again, where requests come in pairs
        paired = -1 in asked.names
        for name, each in zip(asked.names, result.requests, strict=True):
            if name < 0:
                free_s = each.finished_s or 0.0
                continue
            tokens[name] = each.tokens
            columns.prompt.append(name)
            columns.arrival_s.append(round(each.arrival_s, 5))
            columns.first_token_s.append(round(each.arrival_s + each.ttft_s, 5))
            columns.finished_s.append(round(each.finished_s or 0.0, 5))
            columns.cached_tokens.append(each.cached_tokens)
            gaps_s += [after - before for before, after in itertools.pairwise(each.token_s)]
            if paired:
                columns.waited_s.append(round(max(0.0, free_s - each.arrival_s), 5))
    return Served(
        columns,
        total_s=round(max(result.total_s for _, result in parts), 4),
        steps=sum(result.steps for _, result in parts),
        tokens=tokens,
        gaps_s=gaps_s,
        begun_s=parts[0][1].begun_s,
    )
