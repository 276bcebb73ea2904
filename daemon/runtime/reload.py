"""Reload of the configuration: keys that may change while the daemon runs take effect, and each change is logged."""

from __future__ import annotations

from collections.abc import Callable

from ..config.model import NEXT_ATTACH, RELOADABLE, SIZES, ConfigError, DaemonConfig
from ..config.sizes import size_text
from ..telemetry.events import LEVELS
from ..telemetry.logs import Log, threshold


def reloaded(config: DaemonConfig, reread: Callable[[], DaemonConfig], log: Log) -> DaemonConfig:
    """Return the configuration in force after a reload, and set the log's level by it.

    Each key that differs gives one log line, whatever the level; a configuration that cannot be read gives one, too.
    """
    try:
        wanted = reread()
    except ConfigError as error:
        log.error("config.invalid", error=str(error))
        return config
    threshold.set(min(config.log_level, "info", key=LEVELS.index))
    taken: dict[str, object] = {}
    for key in DaemonConfig.model_fields:
        before, after = getattr(config, key), getattr(wanted, key)
        if before == after:
            continue
        values = {"before": _text(key, before), "after": _text(key, after)}
        if key not in RELOADABLE:
            log.warning("config.kept", key=key, **values)
            continue
        taken[key] = after
        when = "for engines that attach from now on" if key in NEXT_ATTACH else "at once"
        log.info("config.changed", key=key, **values, takes_effect=when)
    config = config.model_copy(update=taken)
    threshold.set(config.log_level)
    return config


def _text(key: str, value: object) -> str:
    return size_text(value) if key in SIZES and isinstance(value, int) else str(value)
