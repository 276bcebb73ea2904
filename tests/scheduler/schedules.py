"""Random schedules: the acts of clients and operators, as values that hypothesis can draw and shrink."""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any

from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from vllm.v1.core.sched.interface import PauseState

from tests.scheduler.engine import REJECTED, Engine
from tests.scheduler.model import VOCAB, Truth
from tests.scheduler.shape import MAX_MODEL_LEN, Shape, Site
from tests.scheduler.verdict import finish

FAMILIES = [[random.Random(family).randrange(VOCAB) for _ in range(36)] for family in range(2)]
MAX_STEPS_BETWEEN = 8
STORED_S = 10.0


# Of acts on an engine: of these classes, or calls of the engine's methods.
Schedule = list[Any]


@dataclass(frozen=True)
class Add:
    """A prompt of `shared` tokens of a family and `own` tokens of its own; prompts come back."""

    family: int
    shared: int
    own: int
    out: int
    kind: str = "plain"
    priority: int = 0
    lag: int | None = None

    def __call__(self, engine: Engine) -> None:
        tail = random.Random(100 * self.family + self.own)
        tokens = FAMILIES[self.family][: self.shared] + [tail.randrange(VOCAB) for _ in range(self.own)]
        session, skip = self.kind == "session", self.kind == "skip"
        lag = self.lag if engine.shape.early else None
        engine.add(tokens, self.out, session=session, skip_reading=skip, priority=self.priority, lag=lag)


@dataclass(frozen=True)
class Abort:
    which: int
    late: bool = False

    def __call__(self, engine: Engine) -> None:
        if live := [name for name in engine.requests if name in engine.scheduler.requests]:
            engine.abort(live[-1 - self.which % len(live)], late=self.late)


@dataclass(frozen=True)
class Feed:
    """A session's next chunk, or its end."""

    which: int
    own: int

    def __call__(self, engine: Engine) -> None:
        if sessions := [name for name, sent in engine.requests.items() if sent.session]:
            chunk = [random.Random(self.own).randrange(VOCAB) for _ in range(self.own)]
            engine.feed(sessions[self.which % len(sessions)], chunk or None)


run, forget, fail_load, new_weights, update_weights = (
    functools.partial(methodcaller, name) for name in ("run", "forget", "fail_load", "new_weights", "update_weights")
)

_adds = st.builds(
    Add,
    family=st.integers(0, len(FAMILIES) - 1),
    shared=st.sampled_from([0, 7, 16, 24, 36]),
    own=st.integers(1, 9),
    out=st.integers(1, 12),
    kind=st.sampled_from(["plain"] * 8 + ["session", "skip"]),
    priority=st.integers(0, 2),
    lag=st.sampled_from([None, 0, 0, 1, 2, 3, 5, REJECTED]),
)
_runs = st.builds(run, steps=st.integers(1, MAX_STEPS_BETWEEN), seed=st.integers(0, 99))
_aborts = st.builds(Abort, which=st.integers(0, 9), late=st.booleans())
_failures = st.builds(fail_load, rank=st.integers(0, 1))
_rest = st.one_of(
    st.builds(Feed, which=st.integers(0, 9), own=st.integers(0, 6)),
    st.builds(forget, running=st.booleans()),
    st.builds(new_weights, running=st.booleans()),
    st.builds(update_weights),
    st.builds(methodcaller, st.just("pause"), state=st.sampled_from(list(PauseState))),
    st.just(methodcaller("detach")),
)
# Without the engine forgetting now and then nothing would be loaded. one_of() would choose evenly among all of these.
_again = st.just(forget(running=True))
_operations = st.sampled_from([_adds] * 8 + [_again] * 3 + [_failures] * 2 + [_aborts] * 2 + [_rest] * 4).flatmap(
    lambda chosen: chosen
)
schedules: st.SearchStrategy[Schedule] = st.lists(st.tuples(_operations, _runs), min_size=10, max_size=24).map(
    lambda turns: [operation for turn in turns for operation in turn]
)

# Always played first: what must not be left to chance.
CORNERS: list[Schedule] = [
    [Add(0, 0, 30, 12), run(40, 1)],  # a new prompt in several chunks
    *([Add(0, 0, 30, 12), run(steps, steps), new_weights(running=False), run(30, steps)] for steps in range(1, 6)),
    *(
        [
            Add(0, 36, 1, 12),
            run(steps, steps),
            update_weights(),
            Add(0, 36, 2, 4),
            run(9),
            forget(running=True),
            run(30),
        ]
        for steps in range(1, 6)
    ),
    [update_weights(), Add(0, 36, 1, 4), run(40), forget(running=True), Add(0, 36, 2, 4), run(20)],
    [fail_load(0), fail_load(1), Add(0, 36, 1, 6), run(20, 2)],
    [Add(0, 36, 1, 6), run(1, 3), Abort(0), run(20, 3)],
    [Add(1, 16, 2, 4, "session"), run(8, 4), Feed(0, 6), run(8, 4), Feed(0, 0)],
    [Add(family, 16, own, 12) for family in (0, 1) for own in (3, 4)] + [run(60, 5)],  # more than the pool holds
]

shapes: st.SearchStrategy[Shape] = st.builds(
    Shape,
    ranks=st.integers(1, 2),
    one_head=st.booleans(),
    patient=st.booleans(),
    second_runner=st.booleans(),
    load_mode=st.sampled_from(["sync", "async", "auto"]),
    early=st.booleans(),
    decode=st.booleans(),
    drafts=st.booleans(),
    report_before_save=st.booleans(),
    priorities=st.booleans(),
    blocks=st.sampled_from([18, 24, 40]),  # 17 hold the longest request of one group
    seqs=st.integers(2, 4),
    budget=st.sampled_from([8, 16, 64]),
)

CORNER_SHAPE = Shape(ranks=2, load_mode="async", decode=True, blocks=18, budget=8)

_truth = functools.cache(Truth)


def truth_of(shape: Shape) -> Truth:
    return _truth(shape.ranks, shape.ranks if shape.one_head else 1, shape.groups)


def play(engine: Engine, schedule: Schedule) -> None:
    for act in schedule:
        act(engine)


def check(site: Site, shape: Shape, schedule: Schedule) -> Counter[str]:
    """Play a schedule and check everything. Return counts of what happened."""
    engine = Engine(shape, site, truth_of(shape))
    try:
        # What a first engine left in the store, for loads from the start.
        play(engine, [Add(family, 36, 1, 1) for family in range(len(FAMILIES))] + [run(60)])
        engine.settle(STORED_S)
        play(engine, [forget(running=True), *schedule])
    except BaseException:
        engine.close()
        raise
    finish(engine)
    assert engine.oracle is not None
    return engine.counts + engine.oracle.counts


def explore(site: Site, examples: int, *, seeded: bool = True, **changes: Any) -> Counter[str]:
    """Check random schedules on shapes with `changes`, the same ones every time when `seeded`. Return counts."""
    total: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=seeded,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(shape=shapes, schedule=schedules)
    def promises_hold(shape: Shape, schedule: Schedule) -> None:
        total["examples"] += 1
        shape = replace(shape, **changes)
        more = sum(MAX_MODEL_LEN // group.block_tokens for group in shape.groups.groups[1:])
        total.update(check(site, replace(shape, blocks=shape.blocks + more), schedule))

    for corner in CORNERS:
        promises_hold = example(shape=CORNER_SHAPE, schedule=corner)(promises_hold)
    promises_hold()
    return total
