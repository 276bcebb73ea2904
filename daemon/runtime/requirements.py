"""Whether this machine, as far as the process may use it, will do: said at the start, and by `doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config.machine import (
    MIN_CORES,
    MIN_THREADS,
    address_bytes,
    available_bytes,
    quota_cores,
    startable_threads,
    usable_cores,
)
from ..config.model import ConfigError, DaemonConfig
from ..config.sizes import whole_mib

if TYPE_CHECKING:  # doctor runs where structlog is not installed
    from ..telemetry.logs import Log

_MIN_ADDRESS_BYTES = 3 << 30  # beside what it is given; with less Mooncake or its master ends, in one way or another


def wanted_bytes(config: DaemonConfig) -> int:
    """Memory for one engine's staging and the embedded store."""
    return config.staging + (0 if config.mooncake_config is not None else config.memory)


def wanted_address_bytes(config: DaemonConfig) -> int:
    """What it has to be able to map."""
    return _MIN_ADDRESS_BYTES + wanted_bytes(config)


def check(config: DaemonConfig, log: Log) -> None:
    """Raise ConfigError where the daemon could not work, and warn where it may not.

    With one core Mooncake's spinning calls starve its own transport: every get would fail after 60 s. With too few
    threads it ends, or hangs, in its set-up.
    """
    cores, quota = usable_cores(), quota_cores()
    if cores < MIN_CORES:
        raise ConfigError(f"too few cores, transfers would starve (CPU affinity): cores={cores} min={MIN_CORES}")
    addresses, least = address_bytes(), wanted_address_bytes(config)
    if addresses is not None and addresses < least:
        raise ConfigError(
            f"too little may be mapped (RLIMIT_AS, ulimit -v): bytes={whole_mib(addresses)} min={whole_mib(least)}"
        )
    if (threads := startable_threads(MIN_THREADS)) < MIN_THREADS:
        raise ConfigError(
            f"too few threads can be started (RLIMIT_NPROC, RLIMIT_DATA, pids.max): threads={threads} min={MIN_THREADS}"
        )
    if quota is not None and quota < MIN_CORES:
        log.warning("cores.few", cores=quota, min_cores=MIN_CORES)
    if (available := available_bytes()) < wanted_bytes(config):
        log.warning("memory.short", available_bytes=available, wanted_bytes=wanted_bytes(config))
