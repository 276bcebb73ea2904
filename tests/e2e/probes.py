"""Functions that tests run inside an engine's scheduler process (Engine.call), to look or to do damage on purpose."""

from __future__ import annotations

from typing import Any


def _scheduler(engine: Any) -> Any:
    return engine.engine_core.engine_core.scheduler


def _side(engine: Any) -> Any:
    """Our scheduler side, also inside a MultiConnector."""
    connector = _scheduler(engine).connector
    for child in getattr(connector, "_connectors", [connector]):
        if type(child).__name__ == "KVPrefetchConnector":
            return child
    raise LookupError("no KVPrefetchConnector here")


def counters(engine: Any) -> dict[str, int]:
    """What our scheduler side counted."""
    return dict(_side(engine)._scheduler_side.counters)


def attached(engine: Any) -> bool:
    """Whether the scheduler side serves hints now."""
    return bool(_side(engine)._scheduler_side.ready)


def swap_blocks_on_load(engine: Any) -> None:
    """From now on the first two slots of every load change places."""
    side = _side(engine)
    build = side.build_connector_meta

    def swapped(scheduler_output: Any) -> Any:
        meta = build(scheduler_output)
        for load in meta.loads:
            load.slots[0], load.slots[1] = load.slots[1], load.slots[0]
        return meta

    side.build_connector_meta = swapped
