"""The campaign of faults, reduced: each victim at a point or two; that the judge finds what is planted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults import report
from tests.faults.campaign import World
from tests.faults.faults import Fault, Verdict, faults
from tests.faults.points import POINTS
from tests.lab import process
from tests.lab.engine import Engine
from tests.lab.template import Template
from tests.support.waiting import poll

pytestmark = [pytest.mark.vllm, pytest.mark.store, pytest.mark.timeout(600)]
SLACK_S = 3.0
AT = {point.name: point for point in POINTS}


@pytest.fixture(scope="module")
def world(template: Template, plain: Engine) -> Iterator[World]:
    with World(process.scratch("faults"), slack_s=SLACK_S, template=template, plain=plain) as world:
        yield world


@pytest.mark.parametrize(
    "fault",
    [
        Fault("daemon", "kill", AT["blocks claimed"]),
        Fault("daemon", "stop", AT["fetch ended"], seconds=1.0),
        pytest.param(Fault("daemon", "storm", AT["segments handed over"]), marks=pytest.mark.stress),
        Fault("daemon", "starve", AT["hint read"], seconds=1.0),
        Fault("worker", "kill", AT["load begun"]),
        pytest.param(Fault("scheduler", "kill", AT["put begun"]), marks=pytest.mark.stress),
        Fault("master", "stop", AT["store asked"], depth=0.3, seconds=1.0),
        Fault("link", "cut", AT["fetch begun"], depth=0.3, seconds=2.0),
        Fault("link", "lossy", AT["fetch begun"], depth=0.3, seconds=2.0),
        Fault("storage node", "stop", AT["fetch begun"], depth=0.3, seconds=1.0),
    ],
    ids=lambda fault: f"{fault.victim} {fault.kind} at {fault.where}",
)
def test_a_fault_breaks_no_promise(world: World, fault: Fault) -> None:
    """`make stress` has those that start engines or daemons anew for which another is here."""
    if (why := world.cannot(fault)) is not None:
        pytest.skip(why)
    assert world.run(fault).failures == []


def test_each_round_has_each_point_with_each_victim() -> None:
    every = len({(each.point, each.victim, each.kind) for each in faults(10_000, seed=1)})
    assert len({(each.point, each.victim, each.kind) for each in faults(every, seed=2)}) == every


@pytest.mark.parametrize(
    "column",
    ["wrong_tokens", "neighbour", *(pytest.param(each, marks=pytest.mark.stress) for each in ("hung", "untrue"))],
)
def test_the_judge_finds_what_is_planted(world: World, column: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong byte, a stall, a neighbour that loses its hits, and a lie, one each beside a harmless fault.

    A stall and a lie are under `stress`: the judge waits for seconds.
    """
    fault = Fault("worker", "stop", AT["load ended"], seconds=0.1)
    if column == "wrong_tokens":
        world.first.engine.call("tests.e2e.probes:load_a_foreign_block", 1)
    elif column == "hung":
        world.second.engine.call("tests.e2e.probes:stall_a_step", 2 * SLACK_S)
    elif column == "neighbour":
        monkeypatch.setattr(world.second, "hits", world.second.hits + 1)
    elif column == "untrue":
        fault = Fault("daemon", "kill", None, seconds=0.1)
        monkeypatch.setattr(world.client, "health", lambda: SimpleNamespace(well=True))
    verdict = world.disturb(fault)
    assert getattr(verdict, column), verdict
    if column == "wrong_tokens":
        world.renew()


def test_the_judge_finds_a_leak(world: World) -> None:
    assert poll(lambda: not world.held(), 10)
    world.first.engine.call("tests.e2e.probes:leak_a_flag")
    assert any("flags in use" in each for each in world.held())
    world.renew()
    assert poll(lambda: not world.held(), 10)


def test_the_page_has_a_line_for_each_victim_point_and_failure() -> None:
    good = Verdict("hint read", "daemon", "kill", reached=True, noticed_ms=1.5, longest_step_ms=12.0)
    bad = Verdict("hint read", "worker", "stop", reached=True, leaks=["a slot"])
    text = list(report.lines([good.row(), bad.row()], 60.0, "abc", "2026-01-01"))
    assert text[0] == "2 runs in 1 minutes, 2026-01-01, commit abc: in 1 of them a promise was broken, listed below."
    assert "| daemon is killed | 1 | 1 | 1.5 | 12 | 0 |" in text
    assert "| worker stands still | 1 | 1 | – | 0 | 1 |" in text
    assert text[-1] == "* worker stands still, at hint read: a slot"
    assert Path(report.PAGE).exists()
