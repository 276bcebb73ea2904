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

    def under_way(self, at: int) -> int:
        """Blocks ready once the fetch of then has come: the fetches come one after the other."""
        come = bisect.bisect_right(self.arrivals, at, key=lambda arrival: arrival[0])
        return self.arrivals[min(come, len(self.arrivals) - 1)][1] if self.arrivals else 0

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
    ends = world.found
    while True:
        ready = world.ready(at)
        limit = world.blocks if world.found is None else world.found
        over = ends is not None and ready >= ends  # READY: nothing is left to decide
        if over:
            policy.fetches.saw(wait, ready, begun + at)
            verdict = Verdict.TAKE
        else:
            verdict = policy.verdict(wait, ready, limit, begun + at, load=BUSY if busy else 0.0)
        if verdict is Verdict.STOP:
            wait.stopped, ends = True, world.under_way(at)
        elif verdict is not Verdict.WAIT:
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
wait_policies: st.SearchStrategy[Policy] = st.sampled_from(["adaptive", "wait"])


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
    """Any arrivals, also none: at most (1 + RISK) times the price and one visit; twice where fetches are known."""
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
    others = data.draw(st.lists(st.tuples(steady_worlds(busy=busy), wait_policies), max_size=3))
    for earlier, wait_policy in others:
        begun += serve(earlier, policy, begun, busy=busy, wait_policy=wait_policy)
    times = 2 if others else 1 + RISK
    assert (
        serve(world, policy, begun, busy=busy)
        <= times * (PRICE if busy else 1) * world.recompute(blocks - world.ready(0)) + world.visit_ns + EPSILON
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
def test_a_known_fetch_that_takes_most_of_recomputing_is_waited_for(data: st.DataObject, busy: bool) -> None:
    """All blocks come together, visibly sooner than recomputing: one request finds out, the next one waits."""
    price, visit = data.draw(token_prices), data.draw(visits) if busy else int(IDLE_VISIT_NS)
    blocks = data.draw(st.integers(1, 512))
    latency = data.draw(st.floats(0, max(0.0, 0.95 * blocks * BLOCK_TOKENS * price - 3 * visit)))
    world = steady(price, visit, blocks, int(latency), 0, blocks, blocks)
    policy = policy_for(world, busy=busy)
    begun = 100 * SEC
    begun += serve(world, policy, begun, busy=busy, wait_policy="wait")
    assert serve(world, policy, begun, busy=busy) <= world.waited + visit + EPSILON


@simulated
@given(st.data(), busyness)
def test_a_fetch_known_to_be_slow_costs_nothing(data: st.DataObject, busy: bool) -> None:
    """Slower than STOP_FACTOR times recomputing, and one request found out: the next one does not wait at all."""
    price, visit = data.draw(token_prices), data.draw(visits) if busy else int(IDLE_VISIT_NS)
    blocks, block = data.draw(st.integers(2, 200)), BLOCK_TOKENS * price * (PRICE if busy else 1)
    block_ns = data.draw(st.floats(2.5 * block, 8 * block))
    world = steady(price, visit, blocks, 0, block_ns, data.draw(st.integers(1, 128)), blocks)
    policy = policy_for(world, busy=busy)
    begun = 100 * SEC + serve(world, policy, 100 * SEC, busy=busy, wait_policy="wait")
    assert serve(world, policy, begun, busy=busy) <= world.recompute(blocks) + EPSILON


@simulated
@given(st.data(), busyness)
def test_a_stopped_fetch_costs_at_most_risk(data: st.DataObject, busy: bool) -> None:
    """Known to be a little slower than recomputing: only what is under way is waited for, within RISK."""
    price, visit = data.draw(token_prices), data.draw(visits) if busy else int(IDLE_VISIT_NS)
    blocks, block = data.draw(st.integers(2, 200)), BLOCK_TOKENS * price * (PRICE if busy else 1)
    world = steady(
        price, visit, blocks, 0, data.draw(st.floats(1.2 * block, 2 * block)), data.draw(st.integers(1, 16)), blocks
    )
    policy = policy_for(world, busy=busy)
    begun = 100 * SEC + serve(world, policy, 100 * SEC, busy=busy, wait_policy="wait")
    most = (1 + RISK) * (PRICE if busy else 1) * world.recompute(blocks)
    assert serve(world, policy, begun, busy=busy) <= most + visit + EPSILON


def test_what_is_under_way_is_waited_for_where_recomputing_overtakes_the_fetch() -> None:
    """Chunks of ten blocks, worth 32 ms, each after 40 ms: the first is taken; after 80 ms none is waited for."""
    for gap, stops in ((40, True), (80, False)):
        policy = seen(*[gap * MS] * 10)
        wait, began = Wait.begin("adaptive", 60_000, 103 * SEC, 0), 103 * SEC
        verdict = policy.verdict(wait, 0, 100, began, load=BUSY)
        assert verdict is (Verdict.STOP if stops else Verdict.TAKE)
        assert policy.fetches.expects(began), "nothing was waited for in vain"
        wait.stopped = True
        for at in range(5, 45, 5):
            assert not stops or policy.verdict(wait, 0, 100, began + at * MS, load=BUSY) is Verdict.WAIT
        assert policy.verdict(wait, 0, 100, began + 170 * MS, load=BUSY) is Verdict.TAKE, "RISK"


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


def seen(*silences: int, blocks: int = 10, came: int = 100) -> WaitPolicy:
    """A busy engine, 1.6 ms for each of 100 blocks, twice that by its price; a request waited and saw these fetches."""
    policy = policy_for(World(100_000, 5 * MS, 100, []), busy=True)
    wait, at, ready = Wait.begin("wait", 5000, 100 * SEC, 0), 100 * SEC, 0
    for silence in silences:
        for _ in range(silence // (5 * MS)):
            at += 5 * MS
            policy.verdict(wait, ready, came, at, load=BUSY)
        ready = min(came, ready + blocks)
        policy.fetches.saw(wait, ready, at + 1)
    return policy


def gives_up(policy: WaitPolicy, begun: int, missing: int = 100) -> int:
    """When a request gives up that waits for so many blocks, of which none ever comes."""
    wait = Wait.begin("adaptive", 60_000, begun, 0)
    for at in range(0, 60 * SEC, 5 * MS):
        if policy.verdict(wait, 0, missing, begun + at, load=BUSY) is not Verdict.WAIT:
            return at
    raise AssertionError("it never gave up")


@pytest.mark.parametrize(
    ("silence", "until"),
    [(0, 160), (60, 160), (100, 200), (150, 300), (200, 320), (310, 320), (400, 0)],
)
def test_blocks_that_are_expected_get_twice_the_time(silence: int, until: int) -> None:
    """Of 100 blocks, worth 320 ms: RISK of it when nothing is known, and no more than all of it."""
    found = gives_up(seen(silence * MS, blocks=100), 102 * SEC) if silence else gives_up(seen(), 102 * SEC)
    assert until * MS <= found <= (until + 10) * MS if until else found == 0


def test_only_blocks_that_came_give_patience() -> None:
    """One request waits longer for a store that stopped; the next ones do not wait until blocks come again."""
    policy = seen(150 * MS, blocks=100)
    assert 300 * MS <= gives_up(policy, 102 * SEC) <= 310 * MS
    assert policy.fetches.latency_ns(100, 103 * SEC) > RISK * 320 * MS
    assert gives_up(policy, 103 * SEC) == 0
    assert 160 * MS <= gives_up(policy, 103 * SEC, missing=1000) - 9 * 160 * MS <= 170 * MS, "RISK of ten times as much"
    assert 160 * MS <= gives_up(policy, 120 * SEC) <= 170 * MS, "forgotten"
    waits(policy, 121 * SEC, [5 * MS, 10 * MS], 12 * MS)
    assert policy.fetches.expects(121 * SEC + 12 * MS)
    assert not policy.fetches.expects(132 * SEC)


def test_patience_does_not_grow_while_nothing_comes() -> None:
    """Neither from what other requests see meanwhile, nor from blocks that come, are taken back and come again."""
    policy = seen(150 * MS, 5 * MS, blocks=50)
    wait, taken = Wait.begin("adaptive", 60_000, 102 * SEC, 0), 0
    for at in range(0, 10 * SEC, 5 * MS):
        if at % (50 * MS) == 0:  # blocks come, and are taken back
            taken = 10 - taken
        policy.fetches.saw(Wait.begin("adaptive", 5000, 102 * SEC, 0), 10, 102 * SEC + at)
        if policy.verdict(wait, taken, 100, 102 * SEC + at, load=BUSY) is not Verdict.WAIT:
            break
    assert at <= 360 * MS, "what 100 blocks are worth, and the ten that are there"


def test_the_last_blocks_of_a_steady_fetch_are_not_given_up() -> None:
    """The last ten are worth 32 ms, and come 25 ms after those before them: RISK of their worth is not enough."""
    policy = seen(40 * MS, *[25 * MS] * 9)
    wait, began = Wait.begin("adaptive", 60_000, 102 * SEC, 0), 102 * SEC
    for at in range(0, 265 * MS, 5 * MS):
        ready = 10 * ((at - 15 * MS) // (25 * MS)) if at >= 40 * MS else 0
        assert policy.verdict(wait, ready, 100, began + at, load=BUSY) is Verdict.WAIT, at


def test_behind_another_that_waits_nobody_is_late() -> None:
    """Its turn comes with the first of those that wait; only then does its clock start."""
    policy = policy_for(World(100_000, 5 * MS, 100, []), busy=True)
    wait = Wait.begin("adaptive", 5000, 100 * SEC, 0)
    for second in range(100, 200, 10):
        assert policy.verdict(wait, 0, 100, second * SEC, load=BUSY, first=False) is Verdict.WAIT
    policy.fetches.saw(Wait.begin("adaptive", 5000, 100 * SEC, 0), 50, 199 * SEC)
    assert policy.fetches.latency_ns(100, 199 * SEC) == 0.0, "the time behind others is not the fetch's"
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
    assert policy.fetches.latency_ns(50, begun + 2 * SEC) == 0
    assert policy.verdict(Wait.begin("adaptive", 5000, begun, 0), 0, 100, begun + 2 * SEC, load=0.0) is Verdict.WAIT
    begun += 3 * SEC
    waits(policy, begun, [20 * MS, 40 * MS], 45 * MS)
    known = policy.fetches.latency_ns(50, begun + 45 * MS)
    assert 10 * MS < known <= 40 * MS, "slower than was believed is news, as far as visits tell"
    begun += SEC
    waits(policy, begun, [], 2 * SEC)
    assert policy.fetches.latency_ns(50, begun + 2 * SEC) == pytest.approx(known), "what fits is none"
    begun += 3 * SEC
    waits(policy, begun, [], 5 * MS)
    assert policy.fetches.latency_ns(50, begun + 5 * MS) < known, "faster is"


def lone(policy: WaitPolicy, begun: int, blocks: int, silence: int) -> None:
    """A request of so many blocks, which come together after `silence`."""
    wait = Wait.begin("wait", 5000, begun, 0)
    for at in range(0, silence, MS):
        policy.verdict(wait, 0, blocks, begun + at, load=BUSY)
    policy.fetches.saw(wait, blocks, begun + silence)


def first_verdict(policy: WaitPolicy, begun: int, blocks: int) -> Verdict:
    return policy.verdict(Wait.begin("adaptive", 5000, begun, 0), 0, blocks, begun, load=BUSY)


def test_a_short_prompt_s_first_blocks_are_not_expected_as_late_as_a_long_one_s() -> None:
    """100 blocks come together after 100 ms: four, worth 12.8 ms, do not need 100.  If they do, that is learned."""
    policy = policy_for(World(100_000, 5 * MS, 100, []), busy=True)
    lone(policy, 100 * SEC, 100, 100 * MS)
    assert first_verdict(policy, 101 * SEC, 4) is Verdict.WAIT
    assert first_verdict(policy, 101 * SEC, 100) is Verdict.WAIT
    assert policy.fetches.latency_ns(1000, 101 * SEC) == pytest.approx(100 * MS, rel=0.02), "they come in parts"
    for second in range(102, 106):
        lone(policy, second * SEC, 4, 100 * MS)
    assert first_verdict(policy, 106 * SEC, 4) is Verdict.TAKE
    assert first_verdict(policy, 106 * SEC, 100) is Verdict.WAIT


def test_the_time_to_the_first_blocks_is_a_line_that_never_falls() -> None:
    policy = policy_for(World(100_000, 5 * MS, 100, []), busy=True)
    for second in range(100, 104):
        lone(policy, second * SEC, 10, 14 * MS)
        lone(policy, second * SEC + SEC // 2, 40, 44 * MS)
    expected = [policy.fetches.latency_ns(blocks, 104 * SEC) / MS for blocks in (1, 20, 40, 80)]
    assert expected == pytest.approx([5, 24, 44, 44], abs=2)
    for second in range(104, 120):
        lone(policy, second * SEC, 10, 60 * MS)
    few, many = (policy.fetches.latency_ns(blocks, 120 * SEC) / MS for blocks in (10, 40))
    assert few == pytest.approx(60, abs=10)
    assert many >= few


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
