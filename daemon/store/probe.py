"""Opens a store for a program that only looks at it: a cluster's, or a private one on loopback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

import structlog

from .client import Store
from .embedded import EmbeddedMaster
from .errors import EmbeddedError, StoreError, StoreUnavailable
from .settings import MooncakeSettings, SettingsError

FAILURES = (StoreError, StoreUnavailable, EmbeddedError, SettingsError)


@contextlib.contextmanager
def opened(arguments: Sequence[str], memory: int) -> Iterator[Store]:
    """Open the store of the cluster whose MOONCAKE_CONFIG is named, or a private one of `memory` bytes.

    Raises one of FAILURES. Our log goes to standard error.
    """
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    log, master = structlog.get_logger(), None
    try:
        if arguments:
            settings = MooncakeSettings.from_file(arguments[0])
        else:
            master = EmbeddedMaster(memory, None, log)
            settings = master.start()
        store = Store(settings, log)
        store.open()
        yield store
        store.close()
    finally:
        if master is not None:
            master.stop()
