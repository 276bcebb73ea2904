"""An engine whose requests wait for their fetch, against a fake daemon."""

from __future__ import annotations

from typing import Any

from .fakes import Engine, Request

NOTHING, PENDING = (0, False), (None, False)
TOKEN_MS = 0.1


def measured(**settings: Any) -> Engine:
    """An engine that knows its prefill: 0.1 ms a token beside steps of 5 ms, and has one request running."""
    engine = Engine(**{"wait_policy": "adaptive", **settings})
    running = engine.add("running", 2000)
    engine.allocate(running, 0)
    for tokens in (1000, 999):
        engine.step([(running, tokens)], step_ms=5 + tokens * TOKEN_MS)
        for _ in range(30):
            engine.step([(running, 1)], step_ms=5)
    engine.running = running  # type: ignore[attr-defined]
    return engine


def step(engine: Engine) -> None:
    engine.daemon.beat()
    engine.step([(engine.running, 1)], step_ms=5)  # type: ignore[attr-defined]


def visits_until_decided(engine: Engine, request: Request, most: int = 1000) -> tuple[tuple[int | None, bool], int]:
    """The first answer that is not pending, and how many visits were."""
    for visit in range(most):
        reply = engine.match(request)
        if reply != PENDING:
            return reply, visit
        step(engine)
    raise AssertionError(f"pending {most} times")
