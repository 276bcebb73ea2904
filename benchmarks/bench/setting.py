"""What one point of a sweep is: the load, the engine's places and memory, and how far the store is. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tests.lab.checkpoint import Shape

BLOCK = 64
# Float32: recomputed and loaded tokens are then exactly equal. Recomputing takes several times as long as loading.
MODEL = Shape(hidden=512, intermediate=1024, layers=4, heads=8, kv_heads=1, head_dim=64, positions=16384)
# Requests that share a first part.
GROUP = 8
# Prompts of two sets take turns, so that nothing is staged from the pass before.
SETS = 2
# Share of capacity that bursts ask for on average.
BURST_LOAD = 0.7
# The least and the greatest pause of a user, as shares of the mean pause.
PAUSES = (0.5, 1.5)
# A request that holds the place before another comes to wait for it.
LEAD_S, REST_S, SHORT_TOKENS = 0.15, 0.25, 8


@dataclass(frozen=True, slots=True)
class Pace:
    """What this machine needs with all KV local, and for a fetch; seconds.

    `place_s`: a request holds its place, all places busy. `step_s`: a step that decodes one request. `fetch_s`: one
    prompt's KV over a free link.
    """

    place_s: float
    step_s: float
    fetch_s: float
    proportions: str = ""
    """Fetch, prefill and step, as results show them, where the engine's time is modelled."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One point. `level` is, by `arrivals`:

    * closed: users, each of whom sends the next request when the last one has ended, or a pause later;
    * open: the mean rate of arrivals as a share of what the engine can serve with all KV local;
    * burst: requests that come at once;
    * behind: each request comes while another one holds the only place, and waits for it `level` times as long as its
      KV takes to fetch.
    """

    arrivals: Literal["closed", "open", "burst", "behind"] = "open"
    level: float = 0.75
    pause: float = 0.0
    """In a closed loop: mean pause of a user, as a share of the time that a request holds its place.

    The users begin one after the other, a mean pause apart.
    """
    requests: int = 16
    prompt_tokens: int = 1500
    output_tokens: tuple[int, int] = (60, 100)
    hit: float = 1.0
    """Share of each prompt that the store has."""
    shared: float = 0.0
    """Share of each prompt that it has in common with others of its group."""
    places: int = 2
    """Requests that run at a time in one engine (vLLM's `max_num_seqs`)."""
    spare: int = 1
    """Requests for which the KV pool has room beyond those that run."""
    engines: int = 1
    far: Literal["link", "disk"] = "link"
    link_mbit: float | None = None
    """The link's rate. None: such that a prompt's fetch takes `fetch` times as long as a request holds its place."""
    fetch: float = 0.3
    preset: str = ""
    """Of tests/lab/bed/timeline.py: the engine's time is modelled. Empty: an engine that computes."""
    through: Literal["engine", "http"] = "engine"
    """Where requests go with a preset: to vLLM's AsyncLLM, or to `vllm serve`."""

    def but(self, **changes: Any) -> Setting:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @property
    def hit_tokens(self) -> int:
        """Tokens of a prompt that can be loaded: full blocks, and at least one token stays to be computed."""
        return min(int(self.hit * self.prompt_tokens), self.prompt_tokens - 1) // BLOCK * BLOCK

    @property
    def fetched_bytes(self) -> int:
        """KV of one prompt that the store has."""
        return self.hit_tokens * MODEL.kv_bytes_per_token

    @property
    def whole_bytes(self) -> int:
        """KV of one prompt's full blocks."""
        return self.prompt_tokens // BLOCK * BLOCK * MODEL.kv_bytes_per_token

    @property
    def blocks(self) -> int:
        """Blocks that a request takes up."""
        return (self.prompt_tokens + self.output_tokens[1]) // BLOCK + 1

    def rate_mbit(self, place_s: float) -> float:
        """The link's rate at this point; a request holds its place for `place_s`."""
        if self.link_mbit is not None:
            return self.link_mbit
        return 8e-6 * self.whole_bytes / (self.fetch * place_s)

    def outputs(self) -> list[int]:
        """Output tokens of each request, seeded."""
        source = random.Random(7)
        return [source.randint(*self.output_tokens) for _ in range(self.requests)]


def prompts(setting: Setting, number: int) -> list[list[int]]:
    """The prompts of set `number`; equal arguments give equal prompts."""

    def tokens(count: int, *name: object) -> list[int]:
        source = random.Random("/".join(map(str, (setting.prompt_tokens, setting.hit, setting.shared, number, *name))))
        return [source.randrange(16, MODEL.vocab) for _ in range(count)]

    common = int(setting.shared * setting.prompt_tokens) // BLOCK * BLOCK
    return [
        tokens(common, "group", index // GROUP) + tokens(setting.prompt_tokens - common, index)
        for index in range(setting.requests)
    ]


def stored(setting: Setting, number: int) -> list[list[int]]:
    """The part of each prompt that the store has; empty without a hit."""
    if setting.hit_tokens == 0:
        return []
    whole = setting.hit >= 1
    return [prompt if whole else prompt[: setting.hit_tokens] for prompt in prompts(setting, number)]


def blocks_of(some: Sequence[Sequence[int]]) -> int:
    """How many different blocks the KV of these prompts has."""
    return len({tuple(each[:end]) for each in some for end in range(BLOCK, len(each) + 1, BLOCK)})


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of one pass. `names` has a prompt's number in its set, -1 for those that only hold a place."""

    prompts: list[list[int]]
    names: list[int]
    outputs: list[int]
    arrivals_s: list[float] | None = None
    users: int | None = None
    pauses_s: list[float] | None = None
    """From the end of each request to its user's next one."""

    def of_engine(self, number: int, engines: int) -> Plan:
        """The share of engine `number`: each takes every so-manieth request."""
        part = slice(number, None, engines)
        return Plan(
            prompts=self.prompts[part],
            names=self.names[part],
            outputs=self.outputs[part],
            arrivals_s=None if self.arrivals_s is None else self.arrivals_s[part],
            users=None if self.users is None else max(1, self.users // engines),
            pauses_s=None if self.pauses_s is None else self.pauses_s[part],
        )


def plan(setting: Setting, pace: Pace, number: int) -> Plan:
    """The requests of a pass with the prompts of set `number`."""
    if setting.arrivals == "behind":
        return _behind(setting, pace, number)
    asked, names, outputs = prompts(setting, number), list(range(setting.requests)), setting.outputs()
    if setting.arrivals == "closed":
        pauses = random.Random(6)
        mean_s, users = setting.pause * pace.place_s, round(setting.level)
        return Plan(
            asked,
            names,
            outputs,
            arrivals_s=[mean_s * min(index, users - 1) for index in names],
            users=users,
            pauses_s=[mean_s * pauses.uniform(*PAUSES) for _ in names],
        )
    capacity = setting.places / pace.place_s
    if setting.arrivals == "open":
        source = random.Random(5)
        gaps = [source.expovariate(1.0) for _ in names]
        # The mean is met exactly: few requests would be another load than the one asked for.
        scale = setting.requests / sum(gaps) / (setting.level * capacity)
        at = [scale * each for each in itertools.accumulate(gaps[:-1], initial=0.0)]
    else:
        size = round(setting.level)
        at = [index // size * size / (BURST_LOAD * capacity) for index in names]
    return Plan(asked, names, outputs, arrivals_s=at)


def _behind(setting: Setting, pace: Pace, number: int) -> Plan:
    """Pairs: a short prompt with a long answer holds the only place, then comes the request that is measured."""
    wait_s = setting.level * pace.fetch_s
    held = math.ceil((wait_s + LEAD_S) / pace.step_s)
    source = random.Random(number)
    made, begin = Plan([], [], [], arrivals_s=[], users=2), 0.0  # on a slow machine pairs do not pile up
    assert made.arrivals_s is not None
    for index, (prompt, output) in enumerate(zip(prompts(setting, number), setting.outputs(), strict=True)):
        short = [source.randrange(16, MODEL.vocab) for _ in range(SHORT_TOKENS)]
        for name, tokens, count, at in (
            (-1, short, held, begin),
            (index, prompt, output, begin + held * pace.step_s - wait_s),
        ):
            made.names.append(name)
            made.prompts.append(tokens)
            made.outputs.append(count)
            made.arrivals_s.append(at)
        begin += (held + output) * pace.step_s + 2 * pace.fetch_s + REST_S
    return made
