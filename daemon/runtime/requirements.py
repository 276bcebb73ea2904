"""The daemon's requirements of the machine, checked at its start and by `doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import machine
from ..config.machine import MIN_CORES, MIN_THREADS
from ..config.model import ConfigError, DaemonConfig
from ..config.sizes import whole_mib

if TYPE_CHECKING:  # doctor runs where structlog is not installed
    from ..telemetry.logs import Log

_MIN_ADDRESS_BYTES = 3 << 30  # beside staging and store; with less, Mooncake or its master ends


def wanted_bytes(config: DaemonConfig) -> int:
    """Return the memory for one engine's staging and the embedded store."""
    return config.staging + (0 if config.mooncake_config is not None else config.memory)


def wanted_address_bytes(config: DaemonConfig) -> int:
    """Return the bytes that the daemon must be able to map."""
    return _MIN_ADDRESS_BYTES + wanted_bytes(config)


def check(config: DaemonConfig, log: Log) -> None:
    """Raise ConfigError where the daemon could not work, and warn where it may not.

    With one core Mooncake's spinning calls starve its own transport: every get would fail after 60 s. With too few
    threads it ends, or hangs, in its set-up.
    """
    if (cores := machine.usable_cores()) < MIN_CORES:
        raise ConfigError(f"too few cores, transfers would starve (CPU affinity): cores={cores} min={MIN_CORES}")
    addresses, least = machine.address_bytes(), wanted_address_bytes(config)
    if addresses is not None and addresses < least:
        raise ConfigError(
            f"too little may be mapped (RLIMIT_AS, ulimit -v): bytes={whole_mib(addresses)} min={whole_mib(least)}"
        )
    if (threads := machine.startable_threads(MIN_THREADS)) < MIN_THREADS:
        raise ConfigError(
            f"too few threads can be started (RLIMIT_NPROC, RLIMIT_DATA, pids.max): threads={threads} min={MIN_THREADS}"
        )
    if (quota := machine.quota_cores()) is not None and quota < MIN_CORES:
        log.warning("cores.few", cores=quota, min_cores=MIN_CORES)
    if (available := machine.available_bytes()) < wanted_bytes(config):
        log.warning("memory.short", available_bytes=available, wanted_bytes=wanted_bytes(config))
