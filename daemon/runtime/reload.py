"""Reload: the log's file is opened again, and keys that may change while the daemon runs take effect."""

from __future__ import annotations

from collections.abc import Callable

from ...shmring.wire.admin import Report
from ..config.model import NEXT_ATTACH, RELOADABLE, SIZES, ConfigError, DaemonConfig
from ..config.sizes import size_text
from ..telemetry.events import LEVELS
from ..telemetry.logs import Log, threshold
from ..telemetry.streams import open_again


def reloaded(config: DaemonConfig, reread: Callable[[], DaemonConfig], log: Log) -> tuple[DaemonConfig, Report]:
    """Return the configuration in force after a reload, and the operator's report; set the log's level by it.

    Each key that differs gives one log line, whatever the level; a configuration that cannot be read gives one, too.
    """
    open_again()
    threshold.set(min(config.log_level, "info", key=LEVELS.index))
    log.info("config.read")  # the log's first line after its rotation
    try:
        wanted = reread()
    except ConfigError as error:
        log.error("config.invalid", error=str(error))
        threshold.set(config.log_level)
        return config, Report(ok=False, text=f"the daemon took over nothing: {error}")
    taken: dict[str, object] = {}
    kept: list[str] = []
    for key in DaemonConfig.model_fields:
        before, after = getattr(config, key), getattr(wanted, key)
        if before == after:
            continue
        values = {"before": _text(key, before), "after": _text(key, after)}
        if key not in RELOADABLE:
            log.warning("config.kept", key=key, **values)
            kept.append(key)
            continue
        taken[key] = after
        when = "for engines that attach from now on" if key in NEXT_ATTACH else "at once"
        log.info("config.changed", key=key, **values, takes_effect=when)
    config = config.model_copy(update=taken)
    threshold.set(config.log_level)
    said = f"the daemon took over: {', '.join(taken) or 'nothing, since no key differs'}"
    return config, Report(ok=True, text=said + (f"; needs a restart: {', '.join(kept)}" if kept else ""))


def _text(key: str, value: object) -> str:
    return size_text(value) if key in SIZES and isinstance(value, int) else str(value)
