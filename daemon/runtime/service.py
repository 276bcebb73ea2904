"""The daemon's main loop: rings in, store jobs out, and the life of the process around them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

from ...shmring.wire.admin import Purge, Report, SetMode, Status, Warm
from ...shmring.wire.codec import Message
from ..config.machine import use_more_descriptors
from ..config.model import ConfigError, DaemonConfig, Mode
from ..control import admin, report
from ..control.access import access_of
from ..control.listener import Listener
from ..control.server import Control
from ..engine.epoch import Epoch
from ..engine.memory import EngineInfo, EngineMemory, prepare, release
from ..planning.planner import Lane
from ..store.client import Store, StoreError, StoreUnavailable
from ..store.embedded import DISK_BUFFER_BYTES, DiskSpec, EmbeddedError, EmbeddedMaster
from ..store.namespaces import Namespaces
from ..store.settings import MooncakeSettings, SettingsError
from ..telemetry.events import Ending
from ..telemetry.logs import Log, event_counts, finish, tick
from ..telemetry.snapshot import Snapshot
from ..telemetry.web import MetricsServer
from ..work.calls import Call, Kind
from ..work.pools import Pools
from . import requirements
from .notify import Notifier
from .reload import reloaded

DRAIN_LIMIT = 256
EVENTS_PER_TURN = 16  # messages of the control socket that are handled before the rings are looked at again
TICK_NS = 100_000_000
REOPEN_S = 2.0
OPEN_TRIES = 3  # of our own master, which may be slow to answer on a machine that is just starting
FLUSH_S = 20.0


class Daemon:
    """One prefetch daemon. run() ends after SIGTERM or SIGINT; SIGHUP makes it `reread` its configuration."""

    def __init__(self, config: DaemonConfig, log: Log, reread: Callable[[], DaemonConfig]) -> None:
        self._config = config
        self._reread = reread
        self._log = log
        self._mode: Mode = config.mode
        self._stopping = False
        self._stop_signal = 0
        self._reload_wanted = False
        self._notify = Notifier()
        self._epoll = select.epoll()
        self._master: EmbeddedMaster | None = None
        self._master_died = False
        self._store: Store | None = None
        self._joined = False  # the store is open, and every epoch knows
        self._control: Control | None = None
        self._namespaces = Namespaces(None, log)
        self._turn = 0
        self._snapshot = Snapshot()
        self._metrics: MetricsServer | None = None

    def run(self) -> bool:
        """Serve until told to stop; False when the store's master ended before. Raises what keeps it from starting:
        ConfigError, StoreError, EmbeddedError."""
        # Store threads return from C with little Python to do: let them have the GIL soon.
        sys.setswitchinterval(0.0005)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # one that came during the start comes now
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._wake_fd = wake_read
        self._epoll.register(wake_read, select.EPOLLIN)
        try:
            use_more_descriptors()
            requirements.check(self._config, self._log)
            listener = self._listener = Listener(self._config, self._log)
        except ConfigError as error:
            self._failed(error)
            finish()
            raise
        pools = Pools(self._config.fetch_threads, timeout_ns=self._config.call_timeout_ms * 1_000_000)
        self._snapshot.running = pools.running
        self._epoll.register(pools.fd, select.EPOLLIN)
        try:
            if self._config.metrics_port:
                self._metrics = MetricsServer(
                    self._config.metrics_address, self._config.metrics_port, self._snapshot, event_counts
                )
            if (store := self._open_store()) is None:
                return True
            self._control = Control(
                listener.sock, lambda *epoch: prepare(pools, self._config, store.removal_ms, *epoch),
                partial(release, pools), partial(self._epoch, store, pools), self._log, namespaces=self._namespaces,
                steer=partial(self._steer, admin.Purges(store, pools, self._namespaces)), status=self._status,
                access=access_of(listener.sock, self._config), watch=self._watch, unwatch=self._unwatch,
                max_engines=self._config.max_engines, max_engines_per_uid=self._config.max_engines_per_uid,
            )  # fmt: skip
            self._watch(listener.sock.fileno())
            self._log.info("daemon.ready", socket=listener.path, pid=os.getpid(), staging=self._config.staging)
            self._snapshot.phase = "serving"
            self._notify.ready(self._summary())
            self._loop(self._control, pools)
        except (ConfigError, SettingsError, StoreError, EmbeddedError) as error:
            self._failed(error)
            raise
        finally:
            self._shut_down(pools)
            listener.close()
            tick(all_of_them=True)
            self._log.info("daemon.stopped")
            finish()
            self._notify.close()
        return not self._master_died

    def _failed(self, error: Exception) -> None:
        self._log.error("daemon.failed", error=str(error))

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _loop(self, control: Control, pools: Pools) -> None:
        last_work = last_tick = last_poll = 0
        while not self._stopping:
            now = time.monotonic_ns()
            epochs = control.epochs()
            work = pools.run_finished()
            for epoch in epochs:
                work += epoch.drain(DRAIN_LIMIT)
            self._pump(epochs)
            if now - last_tick >= TICK_NS:
                last_tick = now
                self._tick(control, epochs, pools, now)
            self._end_corrupt(control, epochs)
            epochs = control.epochs()  # some may have ended, and been closed
            if work:
                last_work = now
            busy = now - last_work < self._config.spin_us * 1000
            if busy and now - last_poll < 1_000_000:
                continue
            last_poll = now
            # Every ring announces the sleep, also when an earlier one already turned out not to be empty.
            empty = [epoch.ring.prepare_sleep() for epoch in epochs] if not busy else [False]
            # The kernel goes round: a descriptor that was returned stands behind those that were not.
            events = self._epoll.poll(TICK_NS / 1e9 if all(empty) else 0.0, EVENTS_PER_TURN)
            for epoch in epochs:
                epoch.ring.wake()
            control.ready(*(fd for fd, _ in events if not self._cleared(epochs, pools, fd)))

    def _end_corrupt(self, control: Control, epochs: Sequence[Epoch]) -> None:
        for epoch in epochs:
            if epoch.corrupt is not None and not epoch.closing:
                self._log.error("engine.corrupt", engine=epoch.engine_id, epoch=epoch.number, error=epoch.corrupt)
                control.end(epoch, Ending.ENGINE_CORRUPT)

    def _pump(self, epochs: Sequence[Epoch]) -> None:
        """Hand out fetches of each lane, one engine after the other, while there is room in it."""
        for lane in Lane:
            idle = 0
            while idle < len(epochs):
                self._turn += 1
                idle = 0 if epochs[self._turn % len(epochs)].pump(lane) else idle + 1
            for epoch in epochs:
                epoch.pump_ahead(lane)

    def _tick(self, control: Control, epochs: Sequence[Epoch], pools: Pools, now_ns: int) -> None:
        pools.tick(now_ns)
        control.tick()
        if self._store is not None and self._store.due_for_probe:
            pools.start(Call(Kind.LOOK_UP, self._store.probe, lambda _: None, lambda: None))
        if self._master is not None:
            self._master.tick()
            if not self._master.alive():
                # What was only in memory is gone with it. A new start finds the disk tier again; engines attach to it.
                self._log.error("master.died", pid=self._master.pid)
                self._master_died = self._stopping = True
        for epoch in epochs:
            epoch.liveness.beat(now_ns)
            epoch.scan()
            if epoch.memory.worn_out and not epoch.closing:  # its processes come back, and get fresh memory
                self._log.warning("engine.worn", engine=epoch.engine_id, epoch=epoch.number)
                control.end(epoch, Ending.STAGING_LOST)
        if self._store_is_open and not self._joined:
            self._joined = True
            self._log.info("store.joined")
            for epoch in epochs:
                try:
                    epoch.register_staging()
                except (StoreError, StoreUnavailable):
                    control.end(epoch, Ending.ENGINE_GONE)  # its processes come back, and are told why
        for epoch in list(control.ended):
            if epoch.idle:
                control.ended.remove(epoch)
                epoch.close()
                self._snapshot.retire(epoch.totals)
                release(pools, epoch.memory)
            else:
                epoch.held(now_ns)
        self._snapshot.lost_lines = tick()
        if self._reload_wanted:
            self._reload(control)
        self._notify.beat(now_ns)
        if self._snapshot.tick(now_ns):
            self._notify.status(self._summary())
            if self._listener.look(now_ns):
                control.connections.listen_on(self._listener.sock, access_of(self._listener.sock, self._config))
            counters = [epoch.totals for epoch in (*control.epochs(), *control.ended)]
            engines = [report.numbers(epoch) for epoch in control.epochs()]
            self._snapshot.publish(now_ns, engines, counters, self._store_is_open, self._answering)

    def _cleared(self, epochs: Sequence[Epoch], pools: Pools, fd: int) -> bool:
        """Whether the descriptor only woke the loop, and is quiet again; the others belong to the control socket."""
        if fd == pools.fd:
            pools.clear_bell()
            return True
        if fd == self._wake_fd:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 512)
            return True
        for epoch in epochs:
            if not epoch.closing and fd == epoch.doorbell.fd:
                epoch.doorbell.clear()
                return True
        return False

    # --- life -------------------------------------------------------------------------------------------------------

    def _open_store(self) -> Store | None:
        """The configured cluster, which is tried again later when it is not there yet, or the embedded store. None when
        we were told to stop meanwhile."""
        config = self._config
        if config.mooncake_config is not None:
            settings = MooncakeSettings.from_file(config.mooncake_config)
        else:
            disk = DiskSpec.parse(config.disk) if config.disk is not None else None
            self._master = EmbeddedMaster(
                config.memory, disk, self._log, master_port=config.master_port, stopping=lambda: self._stopping
            )
            self._master.anywhere = config.store_reach == "any"
            self._snapshot.disk_fault = self._master.disk_fault
            self._snapshot.fill, self._snapshot.fill_earlier = self._master.fill, self._master.fill_earlier
            try:
                settings = self._master.start()
            except EmbeddedError:
                if self._stopping:
                    return None
                raise
        store = self._store = Store(settings, self._log, rpc_timeout_ms=config.rpc_timeout_ms)
        self._namespaces = Namespaces(store.disk, self._log)
        for attempt in range(OPEN_TRIES):
            try:
                store.open()
                self._joined = True
                break
            except StoreError as error:
                if self._master is None:
                    self._log.warning("store.degraded", error=str(error), retry_s=REOPEN_S)
                    threading.Thread(target=self._reopen, args=(store,), name="reopen", daemon=True).start()
                    break
                if self._stopping or attempt == OPEN_TRIES - 1:
                    raise
                self._log.debug("store.retried", error=str(error), retry_s=0.0)
        return None if self._stopping else store

    def _reopen(self, store: Store) -> None:
        pause_s = REOPEN_S
        while not self._stopping:
            time.sleep(pause_s)
            began = time.monotonic()
            try:
                store.open()
                return
            except StoreError as error:
                # Mooncake's set-up holds the interpreter's lock, and with it the main loop.
                pause_s = max(REOPEN_S, 4 * (time.monotonic() - began))
                self._log.debug("store.retried", error=str(error), retry_s=round(pause_s, 1))

    def _epoch(self, store: Store, pools: Pools, memory: EngineMemory, engine: EngineInfo) -> Epoch:
        epoch = Epoch(
            memory, engine, store, pools, self._log, time.monotonic_ns, chunk_bytes=self._config.chunk,
            media=self._config.disk is not None or self._config.mooncake_config is not None,
            disk_call_bytes=DISK_BUFFER_BYTES // self._config.fetch_threads, lease_ns=self._config.lease_ns,
        )  # fmt: skip
        epoch.switch(self._mode)
        if self._store_is_open:
            try:
                epoch.register_staging()
            except StoreUnavailable:
                pass  # it closes: the end of this process
            except StoreError:
                epoch.close()
                raise
        return epoch

    def _status(self, uid: int | None) -> Status:
        http, count = self._master.http if self._master is not None else "", len(self._epochs())
        seen = self._epochs(uid)
        return report.status(seen, self._snapshot, self._store_is_open, self._answering, self._mode, http, count)

    def _epochs(self, uid: int | None = None) -> list[Epoch]:
        return self._control.epochs(uid) if self._control is not None else []

    @property
    def _store_is_open(self) -> bool:
        return self._store is not None and self._store.is_open

    @property
    def _answering(self) -> bool:
        return self._store is not None and self._store.answering

    def _summary(self) -> str:
        """One line for `systemctl status`."""
        store = "store open" if self._store_is_open else "store not there yet: everything is a miss"
        if self._store_is_open and not self._answering:
            store = "store does not answer: new requests are misses"
        return f"engines: {len(self._epochs())}; {store}; mode: {self._mode}"

    # --- orders from outside ----------------------------------------------------------------------------------------

    def _reload(self, control: Control) -> None:
        self._reload_wanted = False
        self._notify.reloading()
        before = self._config.mode
        self._config = reloaded(self._config, self._reread, self._log)
        control.connections.access = access_of(control.connections.sock, self._config)
        control.max_engines = self._config.max_engines
        control.max_engines_per_uid = self._config.max_engines_per_uid
        if self._config.mode != before:
            self._switch(self._config.mode)
        self._notify.ready(self._summary())

    def _switch(self, mode: Mode) -> None:
        self._log.info("mode.switched", before=self._mode, after=mode)
        self._mode = mode
        for epoch in self._epochs():
            epoch.switch(mode)

    def _steer(self, purges: admin.Purges, message: Message, uid: int | None, reply: admin.Reply) -> None:
        """Carry out an order of this user, None for an operator; the messages say what each does."""
        if isinstance(message, SetMode):
            before = self._mode
            self._switch(message.mode)
            reply(Report(ok=True, text=f"mode: {message.mode} (was {before})"))
        elif isinstance(message, Warm):
            admin.warm(self._epochs(uid), message, reply)
        elif isinstance(message, Purge):
            purges.start(self._epochs(), self._epochs(uid), message, uid, reply)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _shut_down(self, pools: Pools) -> None:
        """Engines first (they fall back at once), then calls in flight, then the store, then its master."""
        if self._stop_signal:
            self._log.info("daemon.stopping", signal=signal.Signals(self._stop_signal).name)
        self._notify.stopping("draining store calls, then writing what is not on disk yet")
        self._snapshot.phase = "stopping"
        if self._control is not None:
            self._control.close()
        quiet = pools.close()
        if self._control is not None:
            pools.run_finished()
            for epoch in self._control.ended:
                if epoch.idle:  # its memory stays for the end of the process
                    epoch.close()
                    epoch.staging.unregister()
        if self._store is not None:
            began, flushed = time.monotonic(), not self._store_is_open
            with contextlib.suppress(StoreUnavailable):
                flushed = flushed or (quiet and not self._snapshot.disk_fault() and self._store.flush(FLUSH_S))
            if not flushed:
                self._log.warning("store.unflushed", waited_s=round(time.monotonic() - began, 1))
            if quiet:  # else the memory and the client of a call that hangs stay for the end of the process
                # A private master ends with us: nobody is there whom a goodbye of two seconds would tell anything.
                self._store.close(goodbye=self._master is None or not self._stopping)
        if self._master is not None:
            self._master.stop()
        if self._metrics is not None:
            self._metrics.close()
        self._epoll.close()

    def _watch(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN)

    def _unwatch(self, fd: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(fd)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._reload_wanted = True
        else:  # the log is not for a handler: it may have come in the middle of a line
            self._stopping, self._stop_signal = True, number
