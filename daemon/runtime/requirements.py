"""The daemon's requirements of the machine: what it lacks, for the daemon's start and for `doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..config import machine
from ..config.machine import MIN_CORES, MIN_THREADS
from ..config.model import ConfigError, DaemonConfig
from ..config.sizes import size, whole_mib

if TYPE_CHECKING:  # doctor runs where structlog is not installed
    from ..telemetry.logs import Log

_MIN_ADDRESS_BYTES = 3 << 30  # beside staging and store; with less, Mooncake or its master ends


class Shortage(NamedTuple):
    """What the machine lacks, by doctor's check. `warn`: the daemon starts all the same, and logs it."""

    check: str
    what: str
    advice: str
    warn: Callable[[Log], object] | None = None
    level: str = "bad"


def wanted_bytes(config: DaemonConfig) -> int:
    return config.staging + (0 if config.mooncake_config is not None else config.memory)


def shortages(config: DaemonConfig) -> Iterator[Shortage]:
    """Yield what the machine lacks.

    With one core Mooncake's spinning calls starve its own transport: every get would fail after 60 s. With too few
    threads it ends, or hangs, in its set-up.
    """
    if (cores := machine.usable_cores()) < MIN_CORES:
        what = f"too few cores, transfers would starve (CPU affinity): cores={cores} min={MIN_CORES}"
        yield Shortage("cores", what, f"allow this process at least {MIN_CORES} cores")
    addresses, least = machine.address_bytes(), _MIN_ADDRESS_BYTES + wanted_bytes(config)
    if addresses is not None and addresses < least:
        what = f"too little may be mapped (RLIMIT_AS, ulimit -v): bytes={whole_mib(addresses)} min={whole_mib(least)}"
        yield Shortage("limits", what, "LimitAS=infinity, or ulimit -v unlimited")
    if (threads := machine.startable_threads(MIN_THREADS)) < MIN_THREADS:
        what = (
            f"too few threads can be started (RLIMIT_NPROC, RLIMIT_DATA, pids.max): threads={threads} min={MIN_THREADS}"
        )
        yield Shortage("limits", what, "raise ulimit -u, TasksMax=, or the container's pids limit")
    if (quota := machine.quota_cores()) is not None and quota < MIN_CORES:
        what, advice = f"CPU quota: cores={quota:g} min={MIN_CORES}", "raise CPUQuota= or the container's limit"
        warn = lambda log: log.warning("cores.few", cores=quota, min_cores=MIN_CORES)  # noqa: E731
        yield Shortage("cores", what, advice, warn, level="note")
    if (free := machine.available_bytes()) < (wanted := wanted_bytes(config)):
        what = f"one engine's staging and the store want {size(wanted)}, {size(free)} is available"
        advice = "lower staging or memory, or raise the control group's limit"
        warn = lambda log: log.warning("memory.short", available_bytes=free, wanted_bytes=wanted)  # noqa: E731
        yield Shortage("memory", what, advice, warn)


def check(config: DaemonConfig, log: Log) -> None:
    """Raise ConfigError where the daemon could not work, and warn where it may not."""
    for each in shortages(config):
        if each.warn is None:
            raise ConfigError(each.what)
        each.warn(log)
