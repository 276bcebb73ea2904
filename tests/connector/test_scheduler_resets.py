"""The scheduler side when the weights change: older KV is void, and nothing is served before the daemon confirms."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from kvprefetch.shmring.wire.records import FlagState

from .fakes import BLOCK, Engine


def test_a_reset_voids_everything_older() -> None:
    """Handles are given up, copies under way go back unused, requests with old KV are never saved."""
    engine = Engine(credits=range(8))
    running, waiting = engine.add("running", 3 * BLOCK), engine.add("waiting", 2 * BLOCK)
    engine.admit(running)
    meta = engine.step([(running, 2 * BLOCK)])
    assert engine.side.reset() is True
    assert [generation for generation, _ in engine.link.resets] == [1]
    assert engine.daemon.flag("waiting").state == FlagState.CANCELLED
    engine.acknowledge(meta)
    engine.daemon.drain()
    assert [saved.dropped for saved in engine.daemon.saved] == [True]
    assert engine.step([(running, BLOCK)]).saves == []
    engine.admit(waiting)
    assert len(engine.step([(waiting, 2 * BLOCK)]).saves) == 1, "it is computed with the new weights"
    engine.preempt(running)
    engine.admit(running)
    assert len(engine.step([(running, 3 * BLOCK)]).saves) == 1


def weights_after_a_reset(engine: Engine) -> str:
    assert engine.side.reset()
    generation, weights = engine.side.resets.current
    assert engine.link.resets[-1] == (generation, weights)
    return weights


def test_weights_without_a_name_are_never_those_of_another_reset_or_engine(tmp_path: Path) -> None:
    """Also where the file has the name of the weights before, or none."""
    file = tmp_path / "weights"
    engines = [Engine(), Engine(), Engine(weights_file=str(file))]
    found = [weights_after_a_reset(engine) for engine in engines for _ in range(2)]
    file.write_text("step 7")
    engine = Engine(weights_file=str(file))
    found.append(weights_after_a_reset(engine))
    assert len(set(found)) == 7
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in found)
    assert {engine.side.resets.generation for engine in engines} == {2}


def test_engines_whose_weights_were_given_one_name_have_the_same_weights(tmp_path: Path) -> None:
    """The name counts once: of what a later reset left in place nothing is known."""
    file = tmp_path / "weights"
    one, other = Engine(weights_file=str(file)), Engine(weights_file=str(file))
    file.write_text("step 7\n")
    named = weights_after_a_reset(one)
    weights_after_a_reset(one)
    assert one.side.resets.current.id != named
    assert weights_after_a_reset(other) == named
    file.write_text("step 8")
    assert weights_after_a_reset(one) == weights_after_a_reset(other) != named


@pytest.mark.parametrize("content", ["", " \n", "x" * 5000, None])
def test_a_file_that_names_no_weights_gives_them_none(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "weights"
    one, other = Engine(weights_file=str(file)), Engine(weights_file=str(file))
    file.mkdir() if content is None else file.write_text(content)
    with caplog.at_level(logging.WARNING, "vllm.kvprefetch"):
        assert weights_after_a_reset(one) != weights_after_a_reset(other)
    bad = content is None or len(content) > 4096
    assert bool(caplog.records) is bad
    assert all(f"weights_file={file}" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("how", ["cached", "running"])
def test_a_local_prefix_that_outlived_the_reset_is_never_saved_on(how: str) -> None:
    """vLLM could not empty its own prefix cache, or a running request goes on filling it."""
    engine = Engine(credits=range(8))
    if how == "cached":
        engine.cache.count = 1
    else:
        running = engine.admitted("running", 2 * BLOCK)
        engine.step([(running, 3)])
    engine.side.reset()
    request = engine.admitted("r", 3 * BLOCK, local=BLOCK)
    assert engine.step([(request, 2 * BLOCK)]).saves == []
    clean = engine.admitted("clean", 3 * BLOCK)
    assert len(engine.step([(clean, 3 * BLOCK)]).saves) == 1


def test_nothing_goes_on_before_the_daemon_knows_of_the_reset() -> None:
    engine = Engine(credits=range(8))
    engine.link.confirms = False
    assert engine.side.reset() is True
    request = engine.add("r", 3 * BLOCK)
    assert engine.match(request) == (0, False)
    engine.allocate(request, 0)
    assert engine.step([(request, 3 * BLOCK)]).saves == []
    assert len(engine.link.resets) == 1, "it is sent once"
    engine.link.confirmed_reset = 1
    again = engine.add("again", 3 * BLOCK)
    assert engine.match(again) == (None, False)


def test_a_reset_without_a_daemon_is_sent_when_one_is_there() -> None:
    engine = Engine(credits=range(8))
    session, engine.link.session = engine.link.session, None
    assert engine.side.reset() is True
    assert engine.link.resets == []
    engine.link.session = session
    engine.match(engine.add("r", 3 * BLOCK))
    assert engine.link.resets == [tuple(engine.side.resets.current)]
