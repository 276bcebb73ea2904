"""The periodic work beside the loop: deadlines, epochs, the store's state, and the numbers to publish."""

from __future__ import annotations

from ..control import report
from ..control.epochs import Shared
from ..control.listener import Listener
from ..control.server import Control
from ..telemetry.board import Board
from ..telemetry.logs import tick
from .backend import Backend
from .names import Name, Names
from .notify import Notifier

PUBLISH_NS = 1_000_000_000


class Housekeeping:
    """Ticks the other parts, and publishes their numbers once a second."""

    def __init__(
        self, shared: Shared, control: Control, backend: Backend, notifier: Notifier, board: Board, listener: Listener
    ) -> None:
        self._shared, self._control, self._epochs = shared, control, control.epochs
        self._backend, self._notifier, self._board = backend, notifier, board
        door = control.door

        def listen_anew() -> None:
            listener.listen_anew()
            control.listen_on(listener.sock)

        names = [
            Name(listener.path, lambda: listener.there, listen_anew),
            Name(str(shared.config.door_socket), lambda: door.there, door.listen_anew),
            Name(board.name, lambda: board.there, board.make_anew),
        ]
        self._names = Names(names, shared.log)
        self._published_ns = 0

    def tick(self, now_ns: int) -> None:
        """Do the periodic work; called several times a second."""
        shared = self._shared
        self._board.beat(now_ns)
        shared.pools.tick(now_ns)
        shared.pools.rates.tick(now_ns)
        self._control.tick(now_ns)
        self._backend.tick(shared.pools)
        for epoch, ending in self._epochs.tick(now_ns):
            self._control.handshake.end(epoch, ending)
        shared.snapshot.note_lost(tick(), now_ns)
        self._notifier.tick(now_ns)
        if now_ns - self._published_ns >= PUBLISH_NS:
            self._published_ns = now_ns
            self._publish(now_ns)

    def _publish(self, now_ns: int) -> None:
        self._notifier.status(self.summary())
        shared = self._shared
        self._backend.describe(shared.snapshot)
        self._epochs.reservations.others_bytes = self._backend.untouched_bytes + self._control.door.untaken_bytes
        shared.snapshot.missing = self._names.look(now_ns)
        shared.snapshot.held = self._epochs.reservations.held()
        epochs, metrics = self._epochs.all, shared.metrics
        shown = report.daemon(shared, epochs, len(epochs), None, now_ns)
        metrics.show_engines(shown["engines"])
        rates: dict[tuple[str, ...], float] = {}
        for path, known in shown["rates"].items():
            rates |= {(path, window): rate for window, rate in known.items()}
        metrics.show_all(
            {
                "engines": {(): len(epochs)},
                "store_open": {(): shown["store_open"]},
                "store_answering": {(): shown["store_answering"]},
                "disk_writable": {(): not shown["disk_fault"]},
                "rate_bytes_per_second": rates,
            }
        )
        metrics.show_fill(shared.snapshot.fill)
        metrics.reach_all({"log_dropped_lines": shared.snapshot.dropped_lines})
        engines = shown["engines"][: report.MAX_ENGINES]
        self._board.write({**shown, "engines": engines, "outcomes": metrics.totals("requests")})

    def summary(self) -> str:
        """Return one line for `systemctl status`."""
        store = "store open"
        if not self._shared.store.is_open:
            store = "store not there yet: everything is a miss"
        elif not self._shared.store.answering:
            store = "store does not answer: new requests are misses"
        return f"engines: {len(self._epochs.all)}; {store}; mode: {self._shared.mode}"
