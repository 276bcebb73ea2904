"""Random schedules of engines with several KV groups: sliding windows, chunks and states beside full attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import vllm

from kvprefetch.kv.groups import Group, Groups, Kind
from tests.scheduler.engine import Engine, Sent
from tests.scheduler.model import BLOCK, FULL
from tests.scheduler.schedules import STORED_S, Add, explore, forget, play, run, truth_of
from tests.scheduler.shape import Shape, Site, make_request
from tests.scheduler.test_schedules import COVERED, QUEUES
from tests.scheduler.verdict import finish

WINDOW = Group(Kind.WINDOW, BLOCK, 10)
CHUNK = Group(Kind.CHUNK, BLOCK, 4 * BLOCK)
STATE = Group(Kind.STATE, BLOCK)
WIDE = Group(Kind.FULL, 2 * BLOCK)
# What a few schedules have in any case.
SOME = ("loads", "preemptions", "aborts", "failed_ranks")
# Groups, and vLLM's prefix_cache_retention_interval.
Layout = tuple[Groups, int | None]
LAYOUTS: dict[str, Layout] = {
    "window": (Groups((WINDOW, FULL), BLOCK), 8),
    "chunk": (Groups((CHUNK, FULL), BLOCK), None),
    "unlike blocks": (Groups((WIDE, WINDOW), BLOCK), 16),
    "two windows": (Groups((WINDOW, FULL, Group(Kind.WINDOW, BLOCK, 5)), BLOCK), 12),
    "window and chunk": (Groups((FULL, WINDOW, CHUNK), BLOCK), None),
    # DeepSeek-V4's: compressed layers, two windows of what was not compressed, and the compressors' states, which are
    # windows as well: with blocks of 256, 64, 8 and 4 tokens.
    "compressed": (
        Groups(
            (
                Group(Kind.WINDOW, 2 * BLOCK, 12),
                Group(Kind.WINDOW, 2 * BLOCK, 12),
                Group(Kind.FULL, 4 * BLOCK),
                Group(Kind.WINDOW, BLOCK, 12),
                Group(Kind.WINDOW, BLOCK, 5),
            ),
            BLOCK,
        ),
        None,
    ),
}
# Four and five groups take more blocks.
ROOM: dict[str, dict[str, Any]] = {"compressed": {"blocks": 60}, "state, two windows": {"blocks": 48}}
STATES: dict[str, Layout] = {
    "state": (Groups((STATE, FULL), BLOCK), 8),
    "two states": (Groups((FULL, STATE, STATE), BLOCK), None),
    "state and window": (Groups((FULL, WINDOW, STATE), BLOCK), 8),
    "state, two windows": (Groups((WINDOW, STATE, FULL, Group(Kind.WINDOW, BLOCK, 5)), BLOCK), None),
}
DRAFTED = FULL._replace(drafts=True)
_COMPRESSED = LAYOUTS["compressed"][0].groups
DRAFTERS: dict[str, Layout] = {
    "full": (Groups((DRAFTED,), BLOCK), None),
    "window": (Groups((WINDOW._replace(drafts=True), DRAFTED), BLOCK), 8),
    "state": (Groups((STATE, DRAFTED), BLOCK), 8),
    "state and window": (Groups((WINDOW._replace(drafts=True), STATE, FULL), BLOCK), None),
    # The drafter's layer has a window of what is not compressed; vLLM looks the equal groups up as one.
    "compressed": (Groups((*(each._replace(drafts=True) for each in _COMPRESSED[:2]), *_COMPRESSED[2:]), BLOCK), None),
}
# Ranks that hold one head have states of their own, so that the layers above would not agree.
WITH_STATES: Any = {"one_head": False}


def loads_where_the_local_prefix_grew(site: Site, layout: str) -> int:
    """A hint counts on nothing local; its request waits while another one computes most of its prefix."""
    groups, retention = LAYOUTS[layout]
    shape = Shape(groups=groups, retention=retention, seqs=1, budget=2 * BLOCK, blocks=60)
    engine = Engine(shape, site, truth_of(shape))
    play(engine, [Add(0, 36, 1, 1)])
    while engine.step():
        engine.settle(STORED_S)
    play(engine, [forget(running=True), Add(0, 28, 1, 12, "skip"), Add(0, 36, 1, 2), run(60, 1)])
    finish(engine)
    return engine.counts["loads"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_the_local_prefix_grew_the_rest_is_loaded(site: Site, layout: str) -> None:
    assert loads_where_the_local_prefix_grew(site, layout) == 1


def covers(
    site: Site, layouts: Mapping[str, Layout], name: str, examples: int, what: Iterable[str], **options: Any
) -> None:
    """So many random schedules hold; all of `what` happens in them, and blocks of each kind of group are stored."""
    groups, retention = layouts[name]
    options |= {**(WITH_STATES if "state" in name else {}), **ROOM.get(name, {})}
    total = explore(site, examples, groups=groups, retention=retention, **options)
    print(total)
    for each in (*what, *(f"stored_{group.kind.value}" for group in groups.groups)):
        assert total[each] > 0, f"no example had any {each}: {total}"


@pytest.mark.shows("random schedules, `Scheduler` and `AsyncScheduler`", "full attention, sliding windows and chunks")
def test_some_random_schedules(site: Site) -> None:
    covers(site, LAYOUTS, "window and chunk", 10, SOME, queue=2)


@pytest.mark.shows("random schedules, `Scheduler` and `AsyncScheduler`", "full attention and Mamba")
@pytest.mark.shows("streaming sessions", "full attention and Mamba")
@pytest.mark.shows("n-gram drafts", "full attention and Mamba")
@pytest.mark.shows("random schedules, `Scheduler` and `AsyncScheduler`", "full attention, sliding windows and Mamba")
@pytest.mark.shows("streaming sessions", "full attention, sliding windows and Mamba")
@pytest.mark.shows("n-gram drafts", "full attention, sliding windows and Mamba")
@pytest.mark.parametrize(
    ("name", "queue", "examples"),
    [
        ("two states", 2, 10),
        ("state, two windows", 2, 10),
        *(
            pytest.param(name, queue, 35, marks=[pytest.mark.stress, pytest.mark.timeout(1800)])
            for name in STATES
            for queue in QUEUES.values()
        ),
    ],
)
def test_some_random_schedules_with_states(site: Site, name: str, queue: int, examples: int) -> None:
    what = COVERED if examples > 10 else (*SOME, "drafts", "chunks")
    sessions = queue < 3  # see Engine.add
    covers(site, STATES, name, examples, [each for each in what if sessions or each != "chunks"], queue=queue)


@pytest.mark.shows("EAGLE drafts", "full attention and sliding windows")
@pytest.mark.shows("EAGLE drafts", "full attention and Mamba")
@pytest.mark.parametrize("layout", ["window", "state"])
def test_some_random_schedules_with_a_drafter(site: Site, layout: str) -> None:
    covers(site, DRAFTERS, layout, 10, (*SOME, "drafts"), queue=2, drafts=True)


@pytest.mark.shows("EAGLE drafts", "full attention, sliding windows and Mamba")
@pytest.mark.shows("EAGLE drafts", "compressed MLA and sliding windows (DeepSeek-V4)")
@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
@pytest.mark.parametrize("layout", DRAFTERS)
def test_random_schedules_with_a_drafter(site: Site, layout: str, queue: int) -> None:
    what = [each for each in COVERED if each != "chunks"]  # sessions have no drafts: see Engine.add
    covers(site, DRAFTERS, layout, 35, what, queue=queue, drafts=True)


@pytest.mark.skipif(not vllm.__version__.startswith("0.32."), reason="not tried with this vLLM")
@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
def test_vllm_alone_fails_in_a_session_with_states_and_two_steps_in_flight(site: Site, queue: int) -> None:
    """Why the schedules have no such sessions: the state has taken in a token that the session cuts off."""
    groups, retention = STATES["state"]
    shape = Shape(groups=groups, retention=retention, queue=queue, blocks=40)
    truth = truth_of(shape)
    engine = Engine(shape, None, truth)
    # As Engine.add, which makes no such session.
    engine.requests["s"] = Sent("s", [[1, 2, 3]], 4, True, 0, False)
    engine.scheduler.add_request(make_request("s", [1, 2, 3], 4, resumable=True, arrival_time=0.0))
    engine.run(40)
    engine.feed("s", [4, 5])
    engine.drain()
    tokens: list[int] = []
    right: list[int] = []
    for chunk in engine.requests["s"].chunks:
        tokens = [*tokens[:-1], *chunk]
        for _ in range(4):
            right.append(truth.next_token(0, tokens))
            tokens.append(right[-1])
    assert (engine.requests["s"].received == right) == (queue < 3)


@pytest.mark.shows("random schedules, `Scheduler` and `AsyncScheduler`", "full attention and sliding windows")
@pytest.mark.shows("random schedules, `Scheduler` and `AsyncScheduler`", "full attention and chunks")
@pytest.mark.shows(
    "random schedules, `Scheduler` and `AsyncScheduler`", "compressed MLA and sliding windows (DeepSeek-V4)"
)
@pytest.mark.stress
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("queue", QUEUES.values(), ids=QUEUES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_schedules(site: Site, layout: str, queue: int) -> None:
    covers(site, LAYOUTS, layout, 35, COVERED, queue=queue)
