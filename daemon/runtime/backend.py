"""The store that the daemon serves from: a cluster's, or an embedded one with a master of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial

from ..config.model import DaemonConfig
from ..store.client import Store
from ..store.disk import DiskSpec
from ..store.embedded import EmbeddedMaster
from ..store.errors import StoreError, StoreUnavailable
from ..store.settings import MooncakeSettings
from ..telemetry.logs import Log
from ..telemetry.snapshot import Snapshot
from ..work.calls import Call, CallKind
from ..work.pools import Pools
from .notify import Notifier
from .signals import Signals

REOPEN_S = 2.0
OPEN_TRIES = 3  # of an embedded store, whose master may answer late on a machine that is just starting
FLUSH_S = 20.0


class Backend:
    """`master` is the embedded store's; a cluster has its own."""

    def __init__(self, config: DaemonConfig, log: Log, signals: Signals, notifier: Notifier) -> None:
        self._config, self._log, self._signals, self._notifier = config, log, signals, notifier
        self.store: Store | None = None
        self.master: EmbeddedMaster | None = None
        self.master_died = False
        self._probing = False

    def open(self) -> Store | None:
        """Return the store. None after a stop signal.

        A cluster that is not there yet is joined later, on a thread.

        Raises ConfigError and StoreError.
        """
        try:
            settings = self._settings()
        except StoreError:
            if self._signals.stop:
                return None
            raise
        config = self._config
        store = Store(settings, self._log, rpc_timeout_ms=config.rpc_timeout_ms, lease_ns=config.lease_ns)
        self.store = store
        if self.master is not None and config.disk is not None:
            store.disk_works = self.master.disk_works
            self._notifier.indexing(self.master.disk_values)
        for attempt in range(OPEN_TRIES):
            account = self.master.opening() if self.master is not None else None
            try:
                store.open()
                if account is not None:
                    account.opened()
                break
            except StoreError as error:
                if self.master is None:
                    self._log.warning("store.degraded", error=str(error), retry_s=REOPEN_S)
                    threading.Thread(target=self._reopen, args=(store,), name="reopen", daemon=True).start()
                    break
                if self._signals.stop or attempt == OPEN_TRIES - 1:
                    raise
                self._log.debug("store.retried", error=str(error), retry_s=0.0)
        return None if self._signals.stop else store

    def tick(self, pools: Pools) -> None:
        """Probe a store that does not answer or is idle, and see whether the master lives."""
        if self.store is not None and not self._probing and self.store.due_for_probe:
            self._probing = True
            overdue = partial(self.store.suspect, "probe")
            pools.start(Call(CallKind.LOOK_UP, self.store.probe, self._probed, overdue))
        if self.master is not None:
            self.master.tick()
            if not self.master.alive():
                # Values that were only in memory are lost. A new start finds the disk again; engines attach to it.
                self._log.error("master.died", pid=self.master.pid)
                self.master_died = True

    def _probed(self, _: object) -> None:
        self._probing = False

    def describe(self, snapshot: Snapshot) -> None:
        """Enter the state of the store; nothing here waits."""
        if self.master is not None:
            snapshot.disk_fault = self.master.disk_fault()
            snapshot.fill = self.master.fill()

    @property
    def untouched_bytes(self) -> int:
        """How much memory the embedded store will still take."""
        return self.master.untouched_bytes if self.master is not None else 0

    def close(self, *, quiet: bool) -> None:
        """Flush values to the disk, leave the store and stop its master. `quiet`: no store call is in flight."""
        if self.store is not None:
            began, flushed = time.monotonic(), not self.store.is_open
            failing = self.master is not None and self.master.disk_fault()
            with contextlib.suppress(StoreUnavailable):
                flushed = flushed or (quiet and not failing and self.store.flush(FLUSH_S))
            if not flushed:
                self._log.warning("store.unflushed", waited_s=round(time.monotonic() - began, 1))
            if quiet:  # else the memory and the client of a call that hangs stay for the end of the process
                # An embedded master ends with us, and would hear a goodbye of two seconds in vain.
                ends = self.master is not None and bool(self._signals.stop or self.master_died)
                self.store.close(goodbye=not ends)
        if self.master is not None:
            self.master.stop()

    def _settings(self) -> MooncakeSettings:
        config = self._config
        if config.mooncake_config is not None:
            return MooncakeSettings.from_file(config.mooncake_config)
        disk = DiskSpec.parse(config.disk) if config.disk is not None else None
        master = self.master = EmbeddedMaster(
            config.memory, disk, self._log, master_port=config.master_port, stopping=lambda: self._signals.stop > 0
        )
        master.anywhere = config.store_reach == "any"
        return master.start()

    def _reopen(self, store: Store) -> None:
        pause_s = REOPEN_S
        while not self._signals.stop:
            time.sleep(pause_s)
            began = time.monotonic()
            try:
                store.open()
                return
            except Exception as error:  # engines wait for the store: nothing may end this thread
                # Mooncake's set-up holds the interpreter's lock, and with it the main loop.
                pause_s = max(REOPEN_S, 4 * (time.monotonic() - began))
                self._log.debug("store.retried", error=str(error), retry_s=round(pause_s, 1))
