"""Most steps of a busy engine have nothing for the scheduler side to do: they cost it next to nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvprefetch.connector.request.request_state import RUNNING, UNSENT
from kvprefetch.connector.scheduler.scheduler import MEASURED_STEPS

from .fakes import BLOCK, Engine, Request
from .reports import scheduled_output


@pytest.fixture
def decoding() -> tuple[Engine, Request]:
    """One request decodes, and nothing else goes on."""
    engine = Engine(saves=False)
    request = engine.add("r", 3 * BLOCK)
    engine.daemon.stage("r", 0)
    assert engine.match(request) == (0, False)
    engine.allocate(request, 0)
    engine.step([(request, 3 * BLOCK)])
    engine.step([(request, 1)])
    return engine, request


def quiet(engine: Engine, request: Request, tokens: int = 1) -> bool:
    return engine.hooks.build_connector_meta(scheduled_output([(request, tokens)])) is engine.side.quiet


def test_one_quiet_step_in_so_many_is_measured(decoding: tuple[Engine, Request]) -> None:
    engine, request = decoding
    seen = [engine.side.steps.decode_ns]
    for step in range(2 * MEASURED_STEPS + 2):
        engine.step([(request, 1)], step_ms=7 + step)
        seen.append(engine.side.steps.decode_ns)
    assert len(set(seen)) == 3, seen


def test_a_quiet_step_names_its_epoch(decoding: tuple[Engine, Request]) -> None:
    engine, request = decoding
    meta = engine.hooks.build_connector_meta(scheduled_output([(request, 1)]))
    assert meta is engine.side.quiet
    assert (meta.loads, meta.saves, meta.live_epochs) == ([], [], engine.side.live_epochs())


def answers(engine: Engine) -> None:
    """And vLLM does not use the answer in this pass."""
    request = engine.add("other", 3 * BLOCK)
    engine.daemon.stage("other", 2)
    assert engine.match(request)[0]


def waits(engine: Engine) -> None:
    engine.match(engine.add("other", 3 * BLOCK))
    engine.step([(engine.side.requests["r"].request, 1)])
    assert engine.side.counters["waits"] == 1


def loads(engine: Engine) -> None:
    request = engine.add("other", 3 * BLOCK)
    engine.daemon.stage("other", 2)
    tokens, _ = engine.match(request)
    assert tokens
    engine.allocate(request, tokens)
    engine.step([(engine.side.requests["r"].request, 1), (request, BLOCK)])
    engine.side.finished(request)


def drops(engine: Engine) -> None:
    """A hint finds no flag."""
    while not engine.side.phases[UNSENT]:
        engine.add(f"r{len(engine.side.requests)}", 3 * BLOCK)


@pytest.mark.parametrize("event", [answers, waits, loads, drops])
def test_a_step_in_which_something_goes_on_is_planned(
    decoding: tuple[Engine, Request], event: Callable[[Engine], None]
) -> None:
    engine, request = decoding
    assert quiet(engine, request)
    event(engine)
    assert not quiet(engine, request)


def test_the_end_of_an_epoch_is_seen_within_so_many_steps(decoding: tuple[Engine, Request]) -> None:
    engine, request = decoding
    engine.link.epoch = None
    metas = [engine.step([(request, 1)]) for _ in range(MEASURED_STEPS + 1)]
    assert metas[-1].live_epochs == () != metas[0].live_epochs


def test_a_step_with_a_prefill_is_planned(decoding: tuple[Engine, Request]) -> None:
    engine, request = decoding
    assert not quiet(engine, request, tokens=BLOCK)


def test_a_step_without_a_request_that_runs_is_planned(decoding: tuple[Engine, Request]) -> None:
    """As many tokens as requests, but not one of each."""
    engine, request = decoding
    engine.side.phases[RUNNING][object()] = None  # type: ignore[index]  # another one
    assert not quiet(engine, request, tokens=2)
