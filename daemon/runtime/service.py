"""The life of the daemon process: its parts are assembled, run until a signal, reloaded, and shut down in order."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable

from ..config.machine import use_more_descriptors
from ..config.model import ConfigError, DaemonConfig
from ..control import report
from ..control.epochs import Epochs, Shared
from ..control.listener import Listener
from ..control.server import Control
from ..store.errors import StoreError
from ..telemetry.board import Board
from ..telemetry.logs import Log, finish, tick
from ..telemetry.metrics import Metrics
from ..telemetry.snapshot import Snapshot
from ..telemetry.web import MetricsServer
from ..work.pools import Pools
from . import requirements
from .backend import Backend
from .housekeeping import Housekeeping
from .loop import Loop
from .notify import Notifier
from .reload import reloaded
from .signals import Signals

FIRST_NS = 60_000_000_000  # for the first engine, whose start takes longer than a return


class Idle:
    """Says when no engine was there for `exit_idle_s`."""

    def __init__(self, exit_idle_s: int, now_ns: int) -> None:
        self._bound_ns = exit_idle_s * 1_000_000_000
        self._until_ns = now_ns + max(self._bound_ns, FIRST_NS)

    def over(self, now_ns: int, *, engines: bool) -> bool:
        if engines:
            self._until_ns = now_ns + self._bound_ns
        return now_ns >= self._until_ns


class Daemon:
    """One prefetch daemon. `run` returns after SIGTERM, SIGINT or `exit_idle_s` without an engine.

    SIGHUP makes it `reread` its configuration.
    """

    def __init__(self, config: DaemonConfig, log: Log, reread: Callable[[], DaemonConfig], metrics: Metrics) -> None:
        self._config, self._log, self._reread, self._metrics = config, log, reread, metrics
        self._signals = Signals()
        self._notifier = Notifier()
        self._epoll = select.epoll()
        self._snapshot = Snapshot()
        self._backend = Backend(config, log, self._signals, self._notifier)
        self._board: Board | None = None
        self._server: MetricsServer | None = None
        self._control: Control | None = None

    def run(self) -> bool:
        """Serve until a stop signal; return False when the store's master ended before.

        Raises ConfigError or StoreError where the daemon cannot start.
        """
        # Store threads return from C with little Python to do: let them have the GIL soon.
        sys.setswitchinterval(0.0005)
        self._signals.install(self._epoll)
        try:
            use_more_descriptors()
            requirements.check(self._config, self._log)
            listener = Listener(self._config)
        except ConfigError as error:
            self._log.error("daemon.failed", error=str(error))
            finish()
            raise
        pools = Pools(self._config.fetch_threads, timeout_ns=self._config.call_timeout_ms * 1_000_000)
        try:
            self._serve(listener, pools)
        except (ConfigError, StoreError) as error:
            self._log.error("daemon.failed", error=str(error))
            raise
        finally:
            self._shut_down(pools)
            listener.close()
            tick(at_once=True)
            self._log.info("daemon.stopped")
            finish()
            self._notifier.close()
        return not self._backend.master_died

    def _serve(self, listener: Listener, pools: Pools) -> None:
        """Assemble the parts, and run them until a stop signal."""
        config, snapshot = self._config, self._snapshot
        board = self._board = Board(listener.path, listener.gid)
        board.write(report.at_start(snapshot))
        if board.fault:
            self._log.warning("picture.hidden", error=board.fault)
        if config.metrics_port:
            self._server = MetricsServer(config.metrics_address, config.metrics_port, board.look, self._metrics)
        if (store := self._backend.open()) is None:
            return
        shared = Shared(config, store, pools, self._log, self._metrics, time.monotonic_ns, snapshot)
        if self._backend.master is not None:
            shared.master_http = self._backend.master.http
        epochs = Epochs(shared)
        control = self._control = Control(listener.sock, shared, epochs, self._epoll)
        loop = Loop(shared, control, self._epoll, self._signals)
        housekeeping = Housekeeping(shared, control, self._backend, self._notifier, board, listener)
        self._log.info("daemon.ready", socket=listener.path, pid=os.getpid(), staging=config.staging)
        snapshot.phase = "serving"
        self._notifier.ready(housekeeping.summary())
        ticked_ns, idle = 0, Idle(config.exit_idle_s, time.monotonic_ns()) if config.exit_idle_s else None
        while not self._signals.stop and not self._backend.master_died:
            now_ns = time.monotonic_ns()
            if now_ns - ticked_ns >= loop.tick_ns:
                ticked_ns = now_ns
                housekeeping.tick(now_ns)
            # In each turn: an engine may come and go between two ticks.
            if idle is not None and idle.over(now_ns, engines=control.handshake.has_engines()):
                self._log.info("daemon.idle", idle_s=config.exit_idle_s)
                self._signals.note(signal.SIGTERM)
            if self._signals.reload:
                self._signals.reload = False
                self._notifier.reloading()
                control.reload(*reloaded(shared.config, self._reread, self._log))
                self._notifier.ready(housekeeping.summary())
            loop.turn(now_ns, ticked_ns + loop.tick_ns)

    def _shut_down(self, pools: Pools) -> None:
        """End engines first (they fall back at once), then calls in flight, then the store, then its master."""
        if self._signals.stop:
            self._log.info("daemon.stopping", signal=signal.Signals(self._signals.stop).name)
        self._notifier.stopping("draining store calls, then writing what is not on disk yet")
        if self._board is not None:
            self._board.write({**self._board.look().status, "phase": "stopping"})
        if self._control is not None:
            self._control.close()
        quiet = pools.close()
        if self._control is not None:
            pools.run_finished()
            self._control.epochs.close()
        self._backend.close(quiet=quiet)
        if self._server is not None:
            self._server.close()
        if self._board is not None:
            self._board.close()
        self._epoll.close()
