"""The device tier of one engine: promotion's orders turned into copies, and the slot tables told what it plans.

Everything here runs on the main loop but the jobs themselves.  Whatever goes wrong with a device ends promotion for
this engine and nothing else: every block is in host memory too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ...shmring.wire.records import FlagState
from ..planning.promotion import CopyOrder, Move, Promotions, Steps, carry_out
from ..planning.requests import Key, Request
from ..telemetry.counters import Counters
from ..work.calls import Call, Caller, Kind
from ..work.pools import Pools
from .device import DeviceStaging

if TYPE_CHECKING:  # what tests on a GPU do without (docs/PERFORMANCE.md)
    from ...shmring.flags import FlagTable
    from ...shmring.wire.attach import Mapped
    from ..telemetry.logs import Log

_T = TypeVar("_T")

COPY_BYTES = 32 << 20  # of one job: what it takes beside the copy itself, in Python, must not count
IN_FLIGHT = 2  # copy jobs of one engine: one runs, and the next is ready when it ends


class _Tables:
    """The slot tables and flags that promotion moves blocks in."""

    def __init__(self, table: FlagTable) -> None:
        self._table = table

    def move(self, move: Move) -> bool:
        index, generation = move.key
        if move.entries:
            self._table.move(index, move.entries)
        flag = self._table.flag(index)
        return flag.generation == generation and flag.state in (FlagState.HINTED, FlagState.READY)


class Promoter:
    """Starts copies while there are some to make. Without a device it does nothing."""

    def __init__(
        self, device: DeviceStaging | None, table: FlagTable, requests: Mapping[Key, Request], pools: Pools,
        caller: Caller, totals: Counters, log: Log, clock_ns: Callable[[], int], *, first_slot: int, block_bytes: int,
    ) -> None:  # fmt: skip
        self._device, self._requests, self._pools, self._caller = device, requests, pools, caller
        self._totals, self._log, self._clock_ns = totals, log, clock_ns
        slots = device.slots if device is not None else 0
        self._promotions = Promotions(first_slot, slots, chunk_blocks=COPY_BYTES // block_bytes)
        self._tables = _Tables(table)
        self._copying = 0
        self._on = False  # copies are made
        self._given_up = False

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self, workers: Sequence[Mapped]) -> None:
        """All ranks mapped the epoch, and say whether they have device slots, and their handle where they export."""
        device = self._device
        if device is None:
            return
        device.hang_up()
        for rank, mapped in enumerate(workers):
            if not mapped.device or bool(mapped.device_handle) != (device.owner == "engine"):
                self._off(f"a worker has no device slots: rank={rank}")
                return
        handles = [mapped.device_handle for mapped in workers]

        def opened(error: str) -> None:
            if error:
                self._off(error)
            elif not self._given_up:
                self._on = True
                self._log.info("device.ready", device_slots=device.slots, owner=device.owner)
                self._pin(device.pieces())
                self.pump()

        self._start(partial(device.open, handles), opened, partial(self._silent, "to get ready for copies"))

    def end(self) -> None:
        """No more copies; behind the last one the host staging is let go."""
        if self._device is not None:
            self._carry_out(self._promotions.close())
            self._device.hang_up()
            self._pools.start(Call(Kind.COPY, self._device.unpin, lambda _: None, None, self._caller))

    def _pin(self, pieces: list[tuple[int, int, int]]) -> None:
        """One piece after the other, with copies of whoever wants some in between."""
        if not pieces or self._device is None:
            return

        def pinned(error: str) -> None:
            if error:
                self._log.warning("device.unpinned", error=error)
            elif not self._given_up:
                self._pin(pieces[1:])

        self._start(partial(self._device.pin, *pieces[0]), pinned, partial(self._silent, "to pin host memory"))

    def _carry_out(self, steps: Steps[_T]) -> _T:
        return carry_out(steps, self._tables.move)

    def _start(self, job: Callable[[], str], done: Callable[[str], None], overdue: Callable[[], None]) -> None:
        def result(error: str | BaseException) -> None:
            done("the job failed" if isinstance(error, BaseException) else error)

        self._pools.start(Call(Kind.COPY, job, result, overdue, self._caller))

    def _silent(self, asked: str) -> None:
        self._off(f"the GPU does not answer: it was asked {asked}")

    def _off(self, error: str) -> None:
        """Once, and for this epoch."""
        if not self._given_up:
            self._on, self._given_up = False, True
            self._carry_out(self._promotions.close())
            self._log.warning("device.off", error=error)

    # --- events -----------------------------------------------------------------------------------------------------

    def published(self, key: Key, start: int, slots: Sequence[int]) -> Sequence[int]:
        """The slots to enter for blocks that are about to be published from `start` on.

        Also before copies are made: those who wait then are the first to be promoted.
        """
        return self._promotions.published(self._requests[key], start, slots) if self._device is not None else slots

    def asked(self, key: Key) -> None:
        self._promotions.asked(key)

    def loaded(self, key: Key, blocks: int) -> None:
        """The engine loaded so many blocks of it, from where its table named them."""
        self._totals.device_blocks += min(blocks, self._promotions.named(key))

    def dropped(self, key: Key) -> None:
        self._promotions.dropped(key)

    def reset(self) -> None:
        self._promotions.reset()

    def tick(self) -> None:
        self._carry_out(self._promotions.tick())

    def pump(self) -> None:
        """Start copies, if there are some to make."""
        while self._on and self._device is not None and self._copying < IN_FLIGHT and self._promotions.wanted:
            order = self._carry_out(self._promotions.next_order())
            if order is None:
                return
            self._copying += 1
            job, done = partial(self._device.copy, order.slots), partial(self._copied, order, self._clock_ns())
            self._start(job, done, partial(self._overdue, order))

    def _copied(self, order: CopyOrder, started_ns: int, error: str) -> None:
        self._copying -= 1
        self._carry_out(self._promotions.copied(order.number, ok=not error))
        self._totals.promoted_blocks += 0 if error else len(order.slots)
        duration_ms = round((self._clock_ns() - started_ns) / 1e6, 3)
        self._log.debug("copy.done", blocks=len(order.slots), duration_ms=duration_ms)
        if error:
            self._off(error)
        self.pump()

    def _overdue(self, order: CopyOrder) -> None:
        self._log.warning("call.overdue", call="copy", blocks=len(order.slots))
        self._off("a copy did not come back in time")

    def gauges(self) -> dict[str, int]:
        return self._promotions.gauges()
