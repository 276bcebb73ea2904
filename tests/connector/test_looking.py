"""A pass that looks a moment longer at a pending flag: an idle engine sleeps between looks, a busy one spins."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.clock import Clock

from .fakes import BLOCK, Engine

NOTHING, PENDING = (0, False), (None, False)


class Turning(Clock):
    """A clock that moves by a microsecond whenever it is read, and makes blocks arrive at a given time."""

    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.at_ns, self.request, self.blocks, self.pauses = 0, "", 0, 0

    def arrive(self, request: str, after_us: int, blocks: int = 20) -> None:
        self.request, self.at_ns, self.blocks = request, self.ns + after_us * 1000, blocks

    def now_ns(self) -> int:
        self.ns += 1000
        if self.request and self.ns >= self.at_ns:
            request, self.request = self.request, ""
            self.engine.daemon.stage(request, self.blocks)
        return self.ns

    def pause(self) -> None:
        self.engine.daemon.drain()
        assert self.engine.daemon.asks, "it asks before it looks a moment longer"
        self.pauses += 1
        self.ns += 50_000


def turning(**settings: Any) -> tuple[Engine, Turning]:
    clock = Turning()
    clock.engine = Engine(spin_us=250, idle_wait_us=1000, clock=clock, **settings)
    return clock.engine, clock


@pytest.mark.parametrize("policy", ["adaptive", "timeout", "wait"])
def test_an_idle_engine_sees_what_comes_while_it_waits(policy: str) -> None:
    engine, clock = turning(wait_policy=policy)
    soon, late = engine.add("soon", 20 * BLOCK + 1), engine.add("late", 20 * BLOCK + 1)
    clock.arrive("soon", 400)
    assert engine.match(soon) == (20 * BLOCK, False)
    began = clock.ns
    clock.arrive("late", 2000)
    assert engine.match(late) == PENDING
    assert 400_000 < clock.ns - began < 700_000, "one pass waits no longer than this, however many requests it meets"
    assert 15 <= clock.pauses <= 25, "and sleeps between two looks"
    engine.step()
    pauses = clock.pauses
    assert engine.match(late) == PENDING
    assert clock.pauses == pauses, "only the first visit waits"


@pytest.mark.parametrize("case", ["running", "admitted", "idle rank whose steps others wait for"])
def test_a_busy_engine_spins_for_the_look_up_only(case: str) -> None:
    """A miss keeps its place when its answer comes in time; a hit in its fetch is waited for without a spin."""
    busy = case in {"running", "admitted"}
    engine, clock = turning(wait_policy="adaptive", lockstep=not busy)
    if busy:
        occupy(engine, case)
    prefill_costs(engine)
    miss, hit, slow = (engine.add(name, 20 * BLOCK + 1) for name in ("miss", "hit", "slow"))
    clock.arrive("miss", 100, blocks=0)
    assert engine.match(miss) == NOTHING
    engine.daemon.look_up("hit", 20)
    began = clock.ns
    assert engine.match(hit) == PENDING
    assert clock.ns - began < 50_000, "found, and on its way"
    assert engine.match(slow) == PENDING
    assert 50_000 < clock.ns - began < 250_000, "one pass spins no longer than this, however many requests it meets"
    engine.step([(miss, 40)])
    began = clock.ns
    assert engine.match(slow) == PENDING
    assert clock.ns - began < 50_000, "only the first visit spins"
    assert clock.pauses == 0, "a busy engine never sleeps for us"


def occupy(engine: Engine, case: str) -> None:
    other = engine.add("other", 40, staged=0)
    assert engine.match(other) == NOTHING
    engine.allocate(other, 0)
    if case == "running":
        engine.step([(other, 40)])


def prefill_costs(engine: Engine) -> None:
    """The engine measures 10 µs a prefill token, and short steps since."""
    for tokens in (1 << 15, *[0] * 100):
        engine.side.steps.began(engine.clock.ns, tokens, executed=True)
        engine.clock.ns += 1000 + tokens * 10_000
        engine.side.steps.ended(engine.clock.ns)


def test_no_spin_where_nothing_is_to_be_gained() -> None:
    for case in ("fetching", "short", "best_effort"):
        engine, clock = turning(wait_policy="best_effort" if case == "best_effort" else "adaptive")
        request = engine.add("r", (1 if case == "short" else 20) * BLOCK + 1)
        if case == "fetching":
            occupy(engine, "admitted")
            engine.daemon.look_up("r", 20)
        prefill_costs(engine)
        began = clock.ns
        engine.match(request)
        assert clock.ns - began < 50_000, case


def test_an_engine_whose_last_request_has_ended_is_idle() -> None:
    engine, clock = turning()
    last = engine.add("last", 40)
    engine.match(last)
    engine.allocate(last, 0)
    engine.step([(last, 40)], step_ms=4)
    engine.side.finished(last)
    request = engine.add("r", 20 * BLOCK + 1)
    clock.arrive("r", 100)
    assert engine.match(request) == (20 * BLOCK, False)
