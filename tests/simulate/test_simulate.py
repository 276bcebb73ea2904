"""The simulation: small cases come out exactly, equal seeds give equal runs, and each block is counted once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulate import report
from benchmarks.simulate.__main__ import main
from benchmarks.simulate.client import MAX_LATE_HINTS
from benchmarks.simulate.engine import Engine
from benchmarks.simulate.events import NS, Loop, ns
from benchmarks.simulate.link import Link, MediumModel
from benchmarks.simulate.node import NodeModel
from benchmarks.simulate.run import Result
from benchmarks.simulate.scenarios import SCENARIOS, run_named
from kvprefetch.connector import claims
from kvprefetch.daemon.planning.planner import Planner
from tests.simulate.small import MEGABYTE, NODE, SMALL, run, ttft


def outcome(result: Result) -> dict[str, object]:
    """Return all figures but the simulation's own time."""
    return {**report.figures(result), "cpu_s": 0.0, "ttft": [list(part) for part in result.ttft_ns.values()]}


# --- exact small cases ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "output_tokens", "first_token_s", "end_s"),
    [
        ("recompute", 5, 0.110, 0.110 + 4 * 0.011),  # a step and its prefill, then 4 steps that decode
        ("local", 1, 0.020, 0.020),  # the engine has 9 of 10 blocks
        ("no-prefetch", 1, *[0.002 + 0.005 + 0.09 + 0.010 + 0.010] * 2),  # one call after a look-up
        ("best_effort", 1, 0.110, 0.110),  # no block is ready yet
    ],
)
def test_the_time_of_one_request_alone(policy: str, output_tokens: int, first_token_s: float, end_s: float) -> None:
    """100 tokens at 1,000 per second, a step of 10 ms, and 1 ms per decoding request."""
    result = run(policy, [(100, 9, output_tokens)], [0.0])
    assert ttft(result) == [pytest.approx(first_token_s, abs=1e-6)]
    assert result.end_ns / NS == pytest.approx(end_s, abs=1e-6)
    assert result.node.loaded_first == (9 if policy == "no-prefetch" else 0)


def test_one_loaded_request_takes_the_sum_of_its_parts() -> None:
    """Hint, look-up, a call of two blocks, seven of one as that took 25 ms, the copy, and a step with 10 tokens."""
    result = run("wait", [(100, 9, 1)], [0.0])
    fetch = 8 * 0.005 + 9 * 0.01
    assert ttft(result) == [pytest.approx(0.0001 + 0.002 + fetch + 0.009 + 0.010 + 0.010, abs=1e-6)]
    assert (result.node.calls, result.node.fetched, result.node.loaded_first) == (8, 9, 9)
    assert result.hidden_fraction == pytest.approx(0.0, abs=0.01)  # nothing to hide behind


def test_a_request_behind_a_full_engine_hides_its_fetch() -> None:
    """Two requests hold both slots for longer than the third one's fetch takes."""
    result = run("wait", [(100, 0, 100), (100, 0, 100), (100, 9, 1)], [0.0, 0.0, 0.3])
    # Look-up, two prefills (one slot decodes beside the second), decode.
    slot_free = 0.0021 + 0.110 + 0.111 + 98 * 0.012
    beside_one = 0.009 + 0.011 + 0.010
    assert max(ttft(result)) == pytest.approx(slot_free + beside_one - 0.3, abs=1e-6)
    assert result.hidden_fraction == 1.0


@pytest.mark.parametrize(
    ("policy", "node", "first_token_s", "counts"),
    [
        # The request waits as long as the policy says; then the engine computes the prompt.
        ("timeout", replace(NODE, freezes_s=((0.0, 60.0),), rpc_timeout_s=100.0), 5.0, (1, 0, 0, 0)),
        # The first call, of two blocks, misses its deadline, and its bytes are waste.
        ("wait", replace(NODE, freezes_s=((0.003, 10.0),), call_deadline_s=1.0), 0.0021 + 1.0, (0, 1, 2, 0)),
        # The look-up misses its deadline and counts as a miss.
        ("wait", replace(NODE, freezes_s=((0.0, 60.0),), rpc_timeout_s=0.5), 0.0001 + 0.5, (0, 0, 0, 1)),
    ],
)
def test_a_frozen_store_is_waited_for_up_to_a_deadline(
    policy: str, node: NodeModel, first_token_s: float, counts: tuple[int, ...]
) -> None:
    result = run(policy, [(100, 9, 1), (100, 0, 1)], [0.0, 100.0], replace(SMALL, node=node))
    assert ttft(result)[0] == pytest.approx(first_token_s + 0.110, abs=1e-6)
    seen = (result.client.deadline_misses, result.node.overdue, result.node.wasted, result.node.look_up_timeouts)
    assert seen == counts
    assert result.node.fetched == result.node.wasted


@pytest.mark.parametrize(
    ("model", "megabytes", "freeze_s", "ends_s"),
    [
        # 10 and 30 MB on 100 MB/s: the first has half the link for 0.2 s, and the second all of it after that.
        (MediumModel(100e6, 0.1), [10, 30], [], [0.3, 0.5]),
        (MediumModel(100e6, 0.0, call_bytes_per_s=20e6), [10], [], [0.5]),
        (MediumModel(100e6, 0.1, concurrency=1), [10, 10], [], [0.2, 0.4]),
        (MediumModel(100e6, 0.0), [100], [0.25, 3.25], [4.0]),
    ],
    ids=["equal-shares", "limit-of-one-call", "concurrency", "freeze"],
)
def test_calls_share_a_link_within_its_limits(
    model: MediumModel, megabytes: list[int], freeze_s: list[float], ends_s: list[float]
) -> None:
    loop, ended = Loop(), dict[int, float]()
    link = Link(loop, model)
    for index, each in enumerate(megabytes):
        link.transfer(each * MEGABYTE, lambda index=index: ended.update({index: loop.now_ns / NS}))  # type: ignore[misc]
    for frozen, at_s in zip((True, False), freeze_s, strict=False):
        loop.at(ns(at_s), lambda frozen=frozen: link.freeze(frozen))  # type: ignore[misc]
    loop.run()
    assert [ended[index] for index in range(len(megabytes))] == pytest.approx(ends_s)


# --- whole scenarios --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("policy", ["no-prefetch", "adaptive"])
def test_every_request_ends_once_and_every_fetched_block_is_accounted_for(name: str, policy: str) -> None:
    """A fetched block is loaded, wasted or still staged; at the end none is pinned, queued or in flight."""
    result = run_named(name, policy, 80, 1)
    assert result.finished + result.aborted == result.arrived == 80
    assert sum(len(part) for part in result.ttft_ns.values()) >= result.finished
    counted = result.node.loaded_first + result.node.wasted + result.staged_unloaded
    assert result.node.fetched == counted
    left = {key: result.gauges[key] for key in ("blocks_pinned", "requests", "orders")}
    assert left == {"blocks_pinned": 0, "requests": 0, "orders": 0}
    assert math.isnan(result.hidden_fraction) or 0.0 <= result.hidden_fraction <= 1.0


def test_a_stopped_fetch_does_not_wait_for_calls_that_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    dropping = run_named("slow-link", "adaptive", 1000, 0)
    stop = Planner.stop
    monkeypatch.setattr(Planner, "stop", lambda self, key: stop(self, key)[:0])
    waiting = run_named("slow-link", "adaptive", 1000, 0)
    assert dropping.node.dropped > 500 > waiting.node.dropped == 0
    assert dropping.node.failed == waiting.node.failed == 0
    assert dropping.ttft_s(0.5) < 0.98 * waiting.ttft_s(0.5)
    assert dropping.wasted_share < 0.01


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    first, again, other = (run_named("aborts", "wait", 80, seed) for seed in (7, 7, 8))
    assert outcome(first) == outcome(again)
    assert outcome(first) != outcome(other)


@pytest.mark.parametrize("name", ["aborts", "shared"])
def test_running_equal_steps_as_one_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortcut through steps that only decode gives the same times as single steps."""
    quick = run_named(name, "wait", 100, 3)
    monkeypatch.setattr(Engine, "blocked", lambda self: False)
    slow = run_named(name, "wait", 100, 3)
    assert slow.events > quick.events
    assert outcome(quick) | {"events": 0} == outcome(slow) | {"events": 0}


def test_nothing_is_sooner_than_everything_local() -> None:
    """In steady load without aborts, the ideal is a lower bound."""
    ideal = run_named("poisson", "local", 200, 2)
    for policy in ("no-prefetch", "on-demand", "wait"):
        assert run_named("poisson", policy, 200, 2).ttft_s(0.5) >= 0.999 * ideal.ttft_s(0.5)


@pytest.mark.parametrize("name", ["shared", "half-missing"])
def test_a_busy_engine_is_served_no_later_than_without_prefetch(name: str) -> None:
    """Half of the prompts are unknown, or most blocks are local already, so there is little to gain."""
    ours, without = (run_named(name, policy, 2000, 0) for policy in ("adaptive", "no-prefetch"))
    assert ours.ttft_s(0.5) <= without.ttft_s(0.5)
    assert ours.ttft_s(0.99) <= 1.01 * without.ttft_s(0.99)
    assert ours.client.deadline_misses == 0


def test_the_simulated_connector_keeps_to_the_real_ones_bounds() -> None:
    assert MAX_LATE_HINTS == claims.MAX_LATE_HINTS


# --- output -----------------------------------------------------------------------------------------------------------


def test_policies_are_printed_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--scenario", "misses", "--policy", "wait", "--requests", "50", "--jobs", "1", "--plots"]
    assert main([*arguments, str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    rows = [line.split()[0] for line in printed[printed.index(report.HEAD) + 1 :] if line.strip()]
    assert rows[:3] == ["local", "no-prefetch", "wait"]
    assert (tmp_path / "misses.svg").exists()
