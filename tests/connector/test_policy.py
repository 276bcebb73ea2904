"""The adaptive policy in simulated worlds: never much later than recomputing, as soon as waiting where that pays."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprefetch.connector.policy import (
    IDLE_VISIT_NS,
    RISK,
    WAIT_BOUND_NS,
    Policy,
    Verdict,
    Wait,
    WaitPolicy,
    loads_beside,
)
from kvprefetch.connector.steps import StepTimes

BLOCK_TOKENS = 16
MS = 1_000_000
SEC = 1000 * MS
# Rounding of times to whole nanoseconds.
EPSILON = 1000
# A busy engine runs half of its max_num_seqs, so recomputing counts double there.
BUSY, PRICE = 0.5, 2


@dataclass
class World:
    """The truth: the price of a token, the time between visits, and the arrivals of blocks after the first visit."""

    token_ns: float
    visit_ns: int
    blocks: int
    arrivals: list[tuple[int, int]]  # (ns after the first visit, blocks ready from then on)
    found: int | None = None  # the daemon says how many will come; None: it never does

    def ready(self, at: int) -> int:
        come = bisect.bisect_right(self.arrivals, at, key=lambda arrival: arrival[0])
        return self.arrivals[come - 1][1] if come else 0

    @property
    def total(self) -> int:
        """Blocks that will have come in the end."""
        return self.arrivals[-1][1] if self.arrivals else 0

    def recompute(self, blocks: int) -> float:
        return blocks * BLOCK_TOKENS * self.token_ns

    @property
    def waited(self) -> float:
        """When a request that waits for everything has its prefix computed: seen at a visit."""
        last = self.arrivals[-1][0] if self.arrivals else 0
        return math.ceil(last / self.visit_ns) * self.visit_ns + self.recompute(self.blocks - self.total)


def policy_for(world: World, *, busy: bool) -> WaitPolicy:
    """A policy that has measured this world's steps."""
    steps = StepTimes()
    now = 0
    for tokens in [0] * 30 + [1024, 1024] + [0] * 100 if busy else [1024]:
        steps.began(now, tokens, executed=True)
        now += int((world.visit_ns if busy else 0) + tokens * world.token_ns)
        steps.ended(now)
    return WaitPolicy(steps, BLOCK_TOKENS)


def serve(world: World, policy: WaitPolicy, begun: int, *, busy: bool, wait_policy: Policy = "adaptive") -> int:
    """When the prefix is computed, in ns after the first visit."""
    wait = Wait.begin(wait_policy, 3_600_000, begun, world.ready(0))
    at = 0
    while True:
        ready = world.ready(at)
        limit = world.blocks if world.found is None else world.found
        over = world.found is not None and ready >= world.found  # READY: nothing is left to decide
        if over:
            policy.fetches.saw(wait, ready, begun + at)
        if over or policy.verdict(wait, ready, limit, begun + at, load=BUSY if busy else 0.0) is not Verdict.WAIT:
            return at + round(world.recompute(world.blocks - ready))
        at += world.visit_ns


def steady(
    token_ns: float, visit_ns: int, blocks: int, latency_ns: int, block_ns: float, chunk: int, found: int
) -> World:
    arrivals = [
        (round(latency_ns + min(done, found) * block_ns), min(done, found))
        for done in range(chunk, found + chunk, chunk)
    ]
    return World(token_ns, visit_ns, blocks, arrivals, found)


simulated = settings(deadline=None, max_examples=100)
token_prices = st.floats(2_000, 1_000_000)  # 1,000 to 500,000 tokens per second
visits = st.integers(1 * MS, 200 * MS)
busyness = st.booleans()


@st.composite
def steady_worlds(draw: st.DrawFn, *, busy: bool) -> World:
    blocks = draw(st.integers(1, 512))
    return steady(
        draw(token_prices),
        draw(visits) if busy else int(IDLE_VISIT_NS),
        blocks,
        draw(st.integers(0, 500 * MS)),
        draw(st.floats(1_000, 50 * MS)),
        draw(st.integers(1, 128)),
        draw(st.integers(1, blocks)),
    )


@simulated
@given(st.data(), busyness)
def test_it_is_never_much_later_than_recomputing_whatever_the_blocks_do(data: st.DataObject, busy: bool) -> None:
    """Any arrivals, also none; any history of other requests: at most (1 + RISK) times the price and one visit."""
    blocks = data.draw(st.integers(1, 300))
    gaps = data.draw(st.lists(st.tuples(st.integers(0, 2 * SEC), st.integers(1, 60)), max_size=30))
    at = ready = 0
    arrivals = []
    for gap, gain in gaps:
        at, ready = at + gap, min(blocks, ready + gain)
        arrivals.append((at, ready))
    visit = data.draw(visits) if busy else int(IDLE_VISIT_NS)
    found = data.draw(st.sampled_from([None, max(ready, 1), blocks]))
    world = World(data.draw(token_prices), visit, blocks, arrivals, found)
    policy = policy_for(world, busy=busy)
    begun = 100 * SEC
    for earlier in data.draw(st.lists(steady_worlds(busy=busy), max_size=3)):
        begun += serve(earlier, policy, begun, busy=busy)
    assert (
        serve(world, policy, begun, busy=busy)
        <= (1 + RISK) * (PRICE if busy else 1) * world.recompute(blocks - world.ready(0)) + world.visit_ns + EPSILON
    )


@simulated
@given(st.data(), busyness, st.booleans())
def test_where_waiting_pays_it_waits(data: st.DataObject, busy: bool, known: bool) -> None:
    """A steady fetch that needs visibly less than RISK of recomputing: as soon as waiting for all, but a few visits."""
    price, visit = data.draw(token_prices), data.draw(visits) if busy else int(IDLE_VISIT_NS)
    blocks = data.draw(st.integers(1, 512))
    found = data.draw(st.integers(1, blocks))
    most = max(0.0, RISK * found * BLOCK_TOKENS * price - 2 * visit)
    latency = data.draw(st.floats(0, most))
    block_ns = data.draw(st.floats(0, (most - latency) / found))
    world = steady(price, visit, blocks, int(latency), block_ns, data.draw(st.integers(1, 128)), found)
    policy = policy_for(world, busy=busy)
    begun = 100 * SEC
    if known:
        begun += serve(world, policy, begun, busy=busy, wait_policy="wait")
    best = min(world.waited, world.recompute(blocks - world.ready(0)))
    assert serve(world, policy, begun, busy=busy) <= best + 4 * visit + EPSILON


@simulated
@given(st.data(), busyness)
def test_a_fetch_known_to_be_slow_costs_nothing(data: st.DataObject, busy: bool) -> None:
    """Slower by half than recomputing is worth, and one request found out: the next one does not wait at all."""
    price, visit = data.draw(token_prices), data.draw(visits) if busy else int(IDLE_VISIT_NS)
    blocks, block = data.draw(st.integers(2, 200)), BLOCK_TOKENS * price * (PRICE if busy else 1)
    block_ns = data.draw(st.floats(1.5 * block, 8 * block))
    world = steady(price, visit, blocks, 0, block_ns, data.draw(st.integers(1, 128)), blocks)
    policy = policy_for(world, busy=busy)
    begun = 100 * SEC + serve(world, policy, 100 * SEC, busy=busy, wait_policy="wait")
    assert serve(world, policy, begun, busy=busy) <= world.recompute(blocks) + EPSILON


def test_a_stalled_store_is_tried_again_after_a_while() -> None:
    """A stall is forgotten after a while: the store may be well again."""
    stalled = World(100_000, 5 * MS, 100, [], 100)
    fast = steady(100_000, 5 * MS, 100, 0, 100_000, 10, 100)
    policy = policy_for(stalled, busy=True)
    begun, recompute = 100 * SEC, stalled.recompute(100)
    assert recompute < serve(stalled, policy, begun, busy=True) <= (1 + PRICE * RISK) * recompute + stalled.visit_ns
    assert serve(stalled, policy, begun + SEC, busy=True) == recompute, "once burnt"
    assert serve(fast, policy, begun + 2 * SEC, busy=True) == recompute, "the price of it"
    assert serve(fast, policy, begun + 15 * SEC, busy=True) < recompute / 5


def test_a_short_prompt_is_not_waited_for_on_an_idle_engine() -> None:
    """One visit costs 1.25 ms there: two blocks that recompute in less are not worth it, ten are."""
    policy = policy_for(World(30_000, 0, 2, []), busy=False)
    for blocks, expected in ((2, Verdict.TAKE), (10, Verdict.WAIT)):
        wait = Wait.begin("adaptive", 5000, 100 * SEC, 0)
        assert policy.verdict(wait, 0, blocks, 100 * SEC, load=0.0) is expected


def test_a_pause_between_chunks_does_not_end_a_wait_that_pays() -> None:
    """Hysteresis: chunks that come unevenly, on average five times as fast as recomputing."""
    world = World(100_000, 2 * MS, 100, [(10 * MS, 20), (15 * MS, 30), (50 * MS, 50), (55 * MS, 100)], 100)
    assert serve(world, policy_for(world, busy=True), 100 * SEC, busy=True) < 60 * MS


def test_behind_another_that_waits_nobody_is_late() -> None:
    """Its turn comes with the first of those that wait; only then does its clock start."""
    policy = policy_for(World(100_000, 5 * MS, 100, []), busy=True)
    wait = Wait.begin("adaptive", 5000, 100 * SEC, 0)
    for second in range(100, 200, 10):
        assert policy.verdict(wait, 0, 100, second * SEC, load=BUSY, first=False) is Verdict.WAIT
    policy.fetches.saw(Wait.begin("adaptive", 5000, 100 * SEC, 0), 50, 199 * SEC)
    assert policy.fetches.latency_ns(199 * SEC) == 0.0, "the time behind others is not the fetch's"
    assert policy.verdict(wait, 0, 100, 200 * SEC, load=BUSY) is Verdict.WAIT
    late = policy.verdict(wait, 0, 100, 200 * SEC + 6 * SEC, load=BUSY, first=False)
    assert late is not Verdict.WAIT, "once it was first, it is judged"
    patient = Wait.begin("timeout", 5000, 100 * SEC, 0)
    assert policy.verdict(patient, 0, 100, 105 * SEC, load=BUSY, first=False) is Verdict.LATE


def waits(policy: WaitPolicy, begun: int, looks: list[int], came: int) -> None:
    """A request that finds nothing at its first visit and at `looks`, and its first blocks at `came` (ns after)."""
    wait = Wait.begin("adaptive", 5000, begun, 0)
    for at in (0, *looks):
        policy.verdict(wait, 0, 100, begun + at, load=BUSY)
    policy.fetches.saw(wait, 50, begun + came)


def test_time_without_visits_is_not_taken_for_the_time_of_a_fetch() -> None:
    """After a step of 200 ms, or seconds without a free place: the blocks came at some time since the last visit."""
    policy = policy_for(World(100_000, 5 * MS, 100, []), busy=True)
    begun = 100 * SEC
    waits(policy, begun, [], 2 * SEC)
    assert policy.fetches.latency_ns(begun + 2 * SEC) == 0
    assert policy.verdict(Wait.begin("adaptive", 5000, begun, 0), 0, 100, begun + 2 * SEC, load=0.0) is Verdict.WAIT
    begun += 3 * SEC
    waits(policy, begun, [20 * MS, 40 * MS], 45 * MS)
    known = policy.fetches.latency_ns(begun + 45 * MS)
    assert 10 * MS < known <= 40 * MS, "slower than was believed is news, as far as visits tell"
    begun += SEC
    waits(policy, begun, [], 2 * SEC)
    assert policy.fetches.latency_ns(begun + 2 * SEC) == known, "what fits is none"
    begun += 3 * SEC
    waits(policy, begun, [], 5 * MS)
    assert policy.fetches.latency_ns(begun + 5 * MS) < known, "faster is"


@pytest.mark.parametrize(("load", "beside"), [(0.0, False), (0.5, False), (0.75, True), (31 / 32, True)])
def test_the_busier_the_engine_the_smaller_the_loads_it_is_held_up_by(load: float, beside: bool) -> None:
    assert loads_beside(50, 100, load=load) is beside


def test_the_other_policies_ask_no_rates() -> None:
    never = World(1.0, 1000 * MS, 10, [], 10)  # recomputing costs nothing, and nothing will ever come
    policy = policy_for(never, busy=True)
    recompute = round(never.recompute(10))
    assert serve(never, policy, 0, busy=True, wait_policy="best_effort") == recompute
    assert serve(never, policy, 0, busy=True, wait_policy="wait") == WAIT_BOUND_NS + recompute
    assert serve(never, policy, 0, busy=True, wait_policy="timeout") == 3600 * SEC + recompute
