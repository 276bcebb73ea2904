"""Simulated requests of several KV groups: staged as the real epoch stages them, and of use whole or not at all."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from benchmarks.simulate.engine import full_attention
from benchmarks.simulate.events import NS, Loop
from benchmarks.simulate.groups import names, stored
from benchmarks.simulate.link import MediumModel
from benchmarks.simulate.node import Node, NodeModel
from benchmarks.simulate.run import simulate
from benchmarks.simulate.waiting import POLICIES
from benchmarks.simulate.workload import Load, SimRequest, StoreContents, fixed
from kvprefetch.daemon.engine.transfers import Found
from kvprefetch.daemon.planning.requests import Key
from kvprefetch.daemon.planning.runs import Lane
from kvprefetch.daemon.store.errors import ErrorClass
from kvprefetch.daemon.work.calls import Kind as CallKind
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.shmring.wire.records import FlagState
from tests.daemon.engine.epochs import SECOND_NS, Engine, Pools, make_epoch
from tests.simulate import small as one_group
from tests.simulate.small import run, ttft
from tests.support.engine_side import BLOCK_TOKENS

WINDOW = Groups((Group(Kind.FULL, 10), Group(Kind.WINDOW, 10, 21)), 10)
ENGINE = replace(one_group.ENGINE, groups=WINDOW)
SMALL = replace(one_group.SMALL, engine=ENGINE)


# --- the rules --------------------------------------------------------------------------------------------------------


def test_the_store_has_windows_and_states_at_the_end_of_a_prompt_alone() -> None:
    groups = Groups((*WINDOW.groups, Group(Kind.STATE, 10)), 10)
    [request] = fixed([(100, 5, 1)], [0.0], 10)
    wanted = {0: range(5), 1: range(3, 5), 2: range(4, 5)}
    assert stored(groups, request) == {
        request.digest(at) + bytes([number]) for number, blocks in wanted.items() for at in blocks
    }
    assert set(names(groups, request, 0, 5)) == stored(groups, request)
    assert stored(groups, fixed([(100, 0, 1)], [0.0], 10)[0]) == set()


def test_a_request_holds_blocks_of_every_group() -> None:
    """Of a window no more than its own and those of a step."""
    assert ENGINE.kv_blocks(100) == 20
    few = replace(ENGINE, max_num_batched_tokens=30)
    assert few.kv_blocks(1000) == 100 + 6
    states = Groups((Group(Kind.FULL, 10), *[Group(Kind.STATE, 10)] * 3), 10)
    assert replace(ENGINE, groups=states).kv_blocks(100) == 10 + 3 * 2
    assert replace(ENGINE, groups=full_attention(10)).kv_blocks(101) == 11


# --- beside the real epoch --------------------------------------------------------------------------------------------

SHAPES = {
    "window": Groups(
        (Group(Kind.WINDOW, BLOCK_TOKENS, 3 * BLOCK_TOKENS), Group(Kind.FULL, BLOCK_TOKENS)), BLOCK_TOKENS
    ),
    "states": Groups((Group(Kind.FULL, BLOCK_TOKENS), *[Group(Kind.STATE, BLOCK_TOKENS)] * 2), BLOCK_TOKENS),
}
CHUNK, SLOTS = 3, 12  # of the epoch of `make_epoch`, and of the node


class Course(NamedTuple):
    """What became of one hint: the names in each store call, its flag's words, the blocks of its first load.

    `unused`: blocks in staging at its end that no request loaded.
    """

    calls: list[list[bytes]]
    found: int
    ready: int
    loaded: int
    unused: int


class SimulatedNode(StoreContents):
    """A node on contents that note the names in each of its store calls and lose those in `gone`."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(0, 0.0)
        self.loop, self.gone, self.calls = Loop(), set[bytes](), dict[int, list[bytes]]()
        instant = MediumModel(bytes_per_s=1e12, latency_s=0.0)
        model = NodeModel(SLOTS, CHUNK, 1, memory=instant, disk=instant, disk_threads=0, turns=False)
        self.node = Node(self.loop, model, self, 1000, lambda key: None, groups)

    def on_disk(self, digest: bytes) -> bool:
        """Note a block of the call that begins: without threads for disks, a look-up asks nothing here."""
        self.calls.setdefault(self.node.counters.calls, []).append(digest)
        return False

    def lost(self, digest: bytes) -> bool:
        return digest in self.gone

    def course(self, request: SimRequest, local: int, gone: set[bytes]) -> Course:
        node, before = self.node, self.node.counters.loaded_first
        self.calls.clear()
        self.gone = gone
        key = node.hint(request, local)
        self.loop.run(self.loop.now_ns + NS)
        flag = node.flag(key)
        assert flag.state is FlagState.READY
        if (ready := flag.count) > local:
            node.claim(key)
            node.loaded(key, local, ready)
        found = flag.found
        node.finish(key)
        self.loop.run(self.loop.now_ns + NS)
        loaded, unused = node.counters.loaded_first - before, node.gauges()["slots_unused"]
        return Course(list(self.calls.values()), found, ready, loaded, unused)


class RealEpoch(Engine):
    """The real epoch, and a store that answers from the same contents."""

    def __init__(self, groups: Groups) -> None:
        self.groups, self.now, self.pools, self.count = groups, SECOND_NS, Pools(), 0
        super().__init__(make_epoch(None, self.pools, lambda: self.now, chunk_blocks=CHUNK, groups=groups))

    def course(self, request: SimRequest, local: int, gone: set[bytes]) -> Course:
        self.now += 60 * SECOND_NS  # what failed is asked for again
        self.count += 1
        key: Key = (0, self.count)
        self.hint([request.digest(block) for block in range(request.blocks)], key=key, local=local)
        there, calls = stored(self.groups, request), list[list[bytes]]()
        while self.pools.calls or self.epoch.start_fetch(Lane.MEMORY):
            asked = self._arguments()[2]
            if self.pools.calls[-1].kind is CallKind.LOOK_UP:
                self.pools.end([Found(bytes(name in there for name in part), bytes(len(part))) for part in asked])
            else:
                calls.append([name for name, _ in asked])
                self.pools.end([ErrorClass.MISS if name in gone else ErrorClass.OK for name in calls[-1]])
        flag, found = self.flag(key), self.table.found(0)
        assert flag.state == FlagState.READY
        held = list(self.epoch.planner.requests[key].held)
        unloaded = self._unloaded(held)
        if flag.count > local:
            self.put(key, FlagState.CLAIMED, flag.count)
            self.loaded(key, range(local, flag.count))
        else:
            self.put(key, FlagState.CANCELLED, flag.count)
            self.done(key)
        loaded = len(unloaded - self._unloaded(held))
        return Course(calls, found, flag.count, loaded, self.epoch.gauges()["slots_unused"])

    def _arguments(self) -> Any:
        run: Any = self.pools.calls[-1].run
        return run.args

    def _unloaded(self, slots: list[int]) -> set[int]:
        """Of these slots those with a block that nobody loaded."""
        return {slot for slot in slots if self.epoch.planner.blocks.at(slot).unloaded}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_request_is_staged_and_loaded_as_by_the_real_epoch(shape: str) -> None:
    """Prompts with lost blocks, too long for staging, in staging already, or local in part, one after the other."""
    groups, rng, partly = SHAPES[shape], random.Random(5), 0
    node, epoch = SimulatedNode(groups), RealEpoch(groups)
    for number in range(1, 150):
        blocks = rng.randint(1, 8)
        [request] = fixed([(blocks * BLOCK_TOKENS + 1, rng.randint(0, blocks), 1)], [0.0], BLOCK_TOKENS)
        request.hashes = b"".join(
            (number - number % 2).to_bytes(4, "big") + bytes([0, 0, 0, at]) for at in range(blocks)
        )
        there = names(groups, request, 0, blocks)
        gone = set(rng.sample(there, rng.choice([0, 0, 1, 2]) % (len(there) + 1)))
        local = rng.choice([0, 0, rng.randrange(blocks)])
        simulated, real = node.course(request, local, gone), epoch.course(request, local, gone)
        assert simulated == real, number
        partly += local < real.ready < request.found
    assert partly > 0, "a shorter prefix was there"
    epoch.leave()


# --- exact small cases ------------------------------------------------------------------------------------------------

FETCH_S = 10 * 0.005 + 11 * 0.01  # of two blocks, and nine calls of one


def test_a_prefix_of_two_groups_takes_the_sum_of_its_parts() -> None:
    """Hint, look-up, the calls, the copy beside the steps, and a step with 10 tokens."""
    result = run("wait", [(100, 9, 1)], [0.0], SMALL)
    assert ttft(result) == [pytest.approx(0.0001 + 0.002 + FETCH_S + 0.011 + 0.010 + 0.010, abs=0.002)]
    assert (result.node.calls, result.node.fetched, result.node.loaded_first) == (10, 11, 11)
    direct = run("no-prefetch", [(100, 9, 1)], [0.0], SMALL)
    assert ttft(direct) == [pytest.approx(0.002 + 0.005 + 0.11 + 0.010 + 0.010, abs=1e-6)]
    assert direct.node.loaded_first == 11


@pytest.mark.parametrize("policy", ["wait", "no-prefetch"])
def test_where_one_block_is_lost_all_of_them_are_fetched_for_nothing(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one of full attention. Of one group, the eight blocks before it are loaded."""
    monkeypatch.setattr(StoreContents, "lost", lambda self, digest: digest[7:] == b"\x08\x00")
    found = [run(policy, [(100, 9, 1)], [0.0], replace(SMALL, engine=replace(ENGINE, groups=groups)))
             for groups in (WINDOW, full_attention(10))]  # fmt: skip
    whole, single = found
    assert (whole.node.loaded_first, single.node.loaded_first) == (0, 8)
    assert whole.node.wasted + whole.staged_unloaded == whole.node.fetched >= 8
    assert ttft(whole)[0] > ttft(single)[0] + 0.07
    assert (whole.finished, whole.client.loads) == (1, int(policy == "no-prefetch"))


def test_a_fetch_that_recomputing_overtakes_is_given_up_at_once() -> None:
    """As in the engine: of several groups, what is under way is of no use.

    Another request runs, so recomputing 60 tokens counts 120 ms, and a fetch may take three quarters of that.
    """
    node = replace(SMALL.node, memory=MediumModel(60e6, 0.005))
    result = run("adaptive", [(90, 0, 200), (70, 6, 1)], [0.0, 1.0], replace(SMALL, node=node))
    assert (result.client.stopped, result.client.given_up, result.client.loads) == (0, 1, 0)


def test_each_group_loses_blocks_of_its_own() -> None:
    contents, digests = StoreContents(0, 0.5), [bytes(7) + bytes([at]) for at in range(50)]
    lost = [[contents.lost(digest + group) for digest in digests] for group in (b"\0", b"\0", b"\1")]
    assert lost[0] == lost[1] != lost[2]


def test_a_load_that_the_model_cannot_show_is_refused() -> None:
    unequal = Groups((*WINDOW.groups, Group(Kind.FULL, 20)), 10)
    for load, groups in ((Load(shared_blocks=(4,), fan_out=(2,)), WINDOW), (Load(), unequal)):
        scenario = replace(SMALL, load=load, engine=replace(ENGINE, groups=groups))
        with pytest.raises(ValueError, match="share nothing, with blocks of one size"):
            simulate(scenario, POLICIES["wait"])
