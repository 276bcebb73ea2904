"""The adaptive policy in simulated worlds: it waits where that pays, and stops a fetch that recomputing overtakes."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprefetch.connector.engine.steps import StepTimes
from kvprefetch.connector.request.policy import (
    IDLE_VISIT_NS,
    SILENCE,
    STOP_FACTOR,
    WAIT_BOUND_NS,
    Verdict,
    Wait,
    WaitPolicy,
)
from kvprefetch.connector.words.config import Policy

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
    """A policy that has measured this world's steps, and has seen a fetch."""
    policy = WaitPolicy(steps_of(world, busy=busy), BLOCK_TOKENS)
    policy.saw(Wait("adaptive", 0, 0, 0), 1, 1)
    return policy


def steps_of(world: World, *, busy: bool) -> StepTimes:
    """The measured steps of this world."""
    steps = StepTimes()
    now = 0
    for tokens in [0] * 30 + [1024, 1024] + [0] * 100 if busy else [1024]:
        steps.began(now, tokens, executed=True)
        now += int((world.visit_ns if busy else 0) + tokens * world.token_ns)
        steps.ended(now)
    return steps


@pytest.mark.parametrize(
    ("start", "stop", "tokens"), [(0, 4, 32), (0, 2, 0), (0, 3, 16), (1, 2, 0), (1, 5, 48), (2, 5, 48), (4, 6, 32)]
)
def test_what_vllm_computes_again_of_a_hit_is_worth_nothing(start: int, stop: int, tokens: int) -> None:
    """The window at the end of whatever is a hit: `start` blocks without this load, `stop` with it."""
    policy = WaitPolicy(steps_of(World(1000, 5 * MS, 100, []), busy=False), 16, replayed_tokens=2 * 16)
    assert policy.cost_ns(start, stop, 0.0) == pytest.approx(tokens * 1000)


def serve(world: World, policy: WaitPolicy, begun: int, *, busy: bool, wait_policy: Policy = "adaptive") -> int:
    """When the prefix is computed, in ns after the first visit."""
    wait = Wait(wait_policy, 3_600_000, begun, world.ready(0))
    at = 0
    ends = world.found
    while True:
        ready = world.ready(at)
        limit = world.blocks if world.found is None else world.found
        over = ends is not None and ready >= ends  # READY: nothing is left to decide
        verdict = Verdict.TAKE if over else policy.verdict(wait, ready, limit, begun + at, load=BUSY if busy else 0.0)
        if verdict is Verdict.STOP:
            wait.stopped, ends = True, world.under_way(at)
        elif verdict is not Verdict.WAIT:
            return at + round(world.recompute(world.blocks - ready))
        at += world.visit_ns


def steady(token_ns: float, visit_ns: int, block_ns: float, chunk: int, calls: int) -> World:
    """A prompt that the store has, in so many calls of `chunk` blocks."""
    arrivals = [(round(done * chunk * block_ns), done * chunk) for done in range(1, calls + 1)]
    return World(token_ns, visit_ns, chunk * calls, arrivals, chunk * calls)


simulated = settings(deadline=None, max_examples=100)
token_prices = st.floats(2_000, 1_000_000)  # 1,000 to 500,000 tokens per second
visits = st.integers(1 * MS, 200 * MS)
busyness = st.booleans()


@simulated
@given(st.data(), busyness)
def test_it_is_never_much_later_than_recomputing_whatever_the_blocks_do(data: st.DataObject, busy: bool) -> None:
    """Any arrivals, also none.  Until the stop as long as SILENCE allows, and STOP_FACTOR times that afterwards."""
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
    most = 1 + SILENCE * (1 + STOP_FACTOR) * (PRICE if busy else 1)
    took = serve(world, policy_for(world, busy=busy), 100 * SEC, busy=busy)
    assert took <= most * world.recompute(blocks - world.ready(0)) + 2 * visit + EPSILON


@simulated
@given(st.data(), busyness)
def test_where_waiting_pays_it_waits(data: st.DataObject, busy: bool) -> None:
    """A steady fetch that is visibly faster than SILENCE of recomputing, and visits that are rare in no call."""
    token, chunk = data.draw(token_prices), data.draw(st.integers(1, 64))
    worth = SILENCE * BLOCK_TOKENS * token * (PRICE if busy else 1)  # of a block
    visit = int(data.draw(st.floats(0.01, 0.1)) * chunk * worth) + 1 if busy else int(IDLE_VISIT_NS)
    block_ns = data.draw(st.floats(0, max(0.0, 0.9 * (worth - visit / chunk))))
    world = steady(token, visit, block_ns, chunk, data.draw(st.integers(1, 30)))
    took = serve(world, policy_for(world, busy=busy), 100 * SEC, busy=busy)
    assert took <= world.waited + visit + EPSILON


@simulated
@given(st.data(), busyness)
def test_a_fetch_that_recomputing_overtakes_is_stopped_at_its_first_blocks(data: st.DataObject, busy: bool) -> None:
    """These and what is under way are loaded, and the others recomputed."""
    token, chunk = data.draw(token_prices), data.draw(st.integers(1, 16))
    worth = SILENCE * BLOCK_TOKENS * token * (PRICE if busy else 1)
    visit = int(data.draw(st.floats(0.01, 0.1)) * chunk * worth) + 1 if busy else int(IDLE_VISIT_NS)
    calls = data.draw(st.integers(8, 30))
    world = steady(token, visit, data.draw(st.floats(1.3 * worth, 1.8 * worth)), chunk, calls)
    took = serve(world, policy_for(world, busy=busy), 100 * SEC, busy=busy)
    loaded = 2 * chunk if chunk * BLOCK_TOKENS * token > visit else 0
    assert took <= world.arrivals[1][0] + world.recompute(world.blocks - loaded) + 2 * visit + EPSILON


# --- one engine: 1.6 ms a block, twice that by its price, and a visit each 5 ms ---------------------------------------


@pytest.fixture
def policy() -> WaitPolicy:
    return policy_for(World(100_000, 5 * MS, 100, []), busy=True)


def begin(policy_name: Policy = "adaptive", ready: int = 0) -> Wait:
    return Wait(policy_name, 5000, 100 * SEC, ready)


def look(
    policy: WaitPolicy, wait: Wait, ready: int, at_ms: float, *, missing: int = 100, first: bool = True
) -> Verdict:
    """A visit so long after the first one; `missing`: at the first one."""
    return policy.verdict(wait, ready, missing, int(100 * SEC + at_ms * MS), load=BUSY, first=first)


def test_the_time_of_another_request_s_turn_is_not_taken_for_the_own_blocks_pace(policy: WaitPolicy) -> None:
    """150 blocks of another request in 150 ms, then 4 of this one in 10: 96 more take 100 ms, not 3.8 s."""
    other, wait = begin(), begin()
    look(policy, wait, 0, 0)
    look(policy, other, 0, 0, first=False)
    for at in range(10, 151, 10):
        look(policy, other, at, at, first=False)
        assert look(policy, wait, 0, at) is Verdict.WAIT
    assert look(policy, wait, 4, 160) is Verdict.WAIT


def test_blocks_that_came_before_the_first_visit_tell_the_pace(policy: WaitPolicy) -> None:
    """The engine was in a long step: 40 of 100 blocks came in 80 ms since the hint, or in 400."""
    for hinted_ms, expected in ((80, Verdict.WAIT), (400, Verdict.STOP)):
        wait = begin(ready=40)
        wait.hinted = (100 * SEC - hinted_ms * MS, 40)
        assert look(policy, wait, 40, 0) is expected


def test_the_first_blocks_of_all_tell_no_pace(policy: WaitPolicy) -> None:
    """Connections are set up before them: 4 of 31 blocks after 90 ms are no 23 ms a block."""
    fresh = WaitPolicy(steps_of(World(100_000, 5 * MS, 100, []), busy=True), BLOCK_TOKENS)
    for seen, expected in ((fresh, Verdict.WAIT), (policy, Verdict.STOP)):
        wait = begin()
        look(seen, wait, 0, 0, missing=31)
        assert look(seen, wait, 4, 60, missing=31) is expected
    assert look(fresh, begin(), 0, 80, missing=31) is Verdict.WAIT


def test_what_was_taken_back_is_waited_for_again_within_the_same_silence(policy: WaitPolicy) -> None:
    wait = begin()
    assert look(policy, wait, 0, 0) is Verdict.WAIT
    assert look(policy, wait, 50, 10) is Verdict.WAIT
    assert look(policy, wait, 0, 20) is Verdict.WAIT
    wait.stopped = True
    assert look(policy, wait, 0, 480) is Verdict.WAIT
    assert look(policy, wait, 0, 495) is Verdict.TAKE


def test_before_a_prefill_was_measured_every_request_waits_until_its_bound() -> None:
    policy = WaitPolicy(StepTimes(), BLOCK_TOKENS)
    assert policy.cost_ns(0, 1, 0.0) == math.inf
    wait = begin()
    assert {look(policy, wait, 0, at) for at in (0, 100, 4999)} == {Verdict.WAIT}
    assert look(policy, wait, 0, 5000) is Verdict.TIMED_OUT


def test_a_short_prompt_is_not_waited_for() -> None:
    """A visit costs 1.25 ms on an idle engine: two blocks that recompute in less are not worth it, ten are."""
    idle = policy_for(World(30_000, 0, 2, []), busy=False)
    for blocks, expected in ((2, Verdict.TAKE), (10, Verdict.WAIT)):
        assert idle.verdict(begin(), 0, blocks, 100 * SEC, load=0.0) is expected


def test_a_long_step_does_not_make_short_prompts_look_worthless() -> None:
    """What counts is the time of a step that only decodes: after long prefills, a fetch of 3 ms was recomputed."""
    steps = steps_of(World(100_000, 5 * MS, 100, []), busy=True)
    steps.began(90 * SEC, 2000, executed=True)
    steps.ended(90 * SEC + 205 * MS)
    policy = WaitPolicy(steps, BLOCK_TOKENS)
    assert look(policy, begin(), 0, 0, missing=4) is Verdict.WAIT


def test_behind_another_that_waits_nobody_is_late(policy: WaitPolicy) -> None:
    """Its turn comes with the first of those that wait; only then does its clock start."""
    wait = begin()
    for at in range(0, 100_000, 10_000):
        assert look(policy, wait, 0, at, first=False) is Verdict.WAIT
    assert look(policy, wait, 0, 100_000) is Verdict.WAIT
    assert look(policy, wait, 0, 106_000, first=False) is Verdict.TIMED_OUT, "once it was first, it is judged"
    patient = begin("timeout")
    assert look(policy, patient, 0, 5000, first=False) is Verdict.TIMED_OUT


def test_the_other_policies_ask_no_rates() -> None:
    never = World(1.0, 1000 * MS, 10, [], 10)  # recomputing costs nothing, and nothing will ever come
    policy = policy_for(never, busy=True)
    recompute = round(never.recompute(10))
    assert serve(never, policy, 0, busy=True, wait_policy="best_effort") == recompute
    assert serve(never, policy, 0, busy=True, wait_policy="wait") == WAIT_BOUND_NS + recompute
    assert serve(never, policy, 0, busy=True, wait_policy="timeout") == 3600 * SEC + recompute
