"""The memory of epochs: reserved, registered and freed on threads, several engines at a time.

Everything here runs on the main loop, but what is handed to the pools.

No byte of the machine is promised twice.  Linux overcommits: a reservation too many would succeed, and the OOM killer
would end a process later.  What is available says nothing of reservations that are still being filled, nor of memory
that the embedded store and the HTTP door will use, so these count in full until the memory is taken.
Reservations wait for releases under way, in the order of their wishes.

Memory that the store does not let go of stays taken, mapped and listed, and is tried again at growing intervals: other
memory at the same address would be refused.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ...shmring.errors import DeviceError, SegmentError
from ..config.machine import available_bytes
from ..config.model import DaemonConfig
from ..config.sizes import size_text, whole_mib
from ..store.client import Store
from ..telemetry.logs import Log
from ..work.calls import Call, CallKind
from ..work.pools import Pools
from .device import DeviceStaging
from .memory import EngineInfo, EngineMemory, device_staging, layout_for, slot_bytes

HOLD_NS = (1_000_000_000, 60_000_000_000)  # until the next try to free memory: the first pause, and the longest


class Reserved(NamedTuple):
    """The end of one reservation: the memory, or why there is none."""

    number: int
    memory: EngineMemory | BaseException


class Withdrawn(Exception):
    """Nobody wants the memory any more."""


@dataclass(eq=False)
class _Wish:
    """One engine's reservation of `size` bytes. Its thread adds to `taken`, and reads `wanted` after each slice."""

    number: int
    config: DaemonConfig
    engine: EngineInfo
    wanted: bool = True
    taken: int = 0
    device: DeviceStaging | None = None
    device_error: str = ""
    queued: bool = False  # it has its device memory, or goes on without
    granted: bool = False
    size: int = 0
    control_bytes: int = 0
    held: EngineMemory | None = None  # of a reservation that failed, and that the store did not let go of

    def make(self, store: Store) -> EngineMemory:
        """On a thread: make the memory and register it. Raises Withdrawn, and what making it raises."""
        device, self.device = self.device, None
        memory = EngineMemory.create(self.config, self.number, self.engine, device, self.device_error)
        try:
            self.taken += memory.layout.total_bytes
            for size in memory.staging.fill():
                self.taken += size
                if not self.wanted:
                    raise Withdrawn
            memory.staging.register(store)
        except BaseException:
            if not memory.close():
                self.held = memory
            raise
        return memory


@dataclass(eq=False)
class _Held:
    """Memory that could not be freed. `due_ns`: when it is tried again; 0 while that is open."""

    memory: EngineMemory
    error: str
    tries: int = 1
    due_ns: int = 0
    trying: bool = False


class Reservations:
    """Reserves and frees the memory of epochs; the caller takes what `next_done` has.

    A GPU that fails, or misses a call's deadline, is left out, and what it gives later is given back.
    """

    def __init__(self, pools: Pools, store: Store, log: Log) -> None:
        self._pools, self._store, self._log = pools, store, log
        self._wishes: dict[int, _Wish] = {}
        self._freeing: dict[int, int] = {}  # bytes on their way back, by number
        self._done: deque[Reserved] = deque()
        self._held: dict[int, _Held] = {}  # by number
        self.others_bytes: int | None = None  # that store and door will take; None: not counted yet

    def want(self, number: int, config: DaemonConfig, engine: EngineInfo) -> None:
        """Reserve the memory of epoch `number`. Each ends as one Reserved, the withdrawn ones too."""
        wish = self._wishes[number] = _Wish(number, config, engine)
        if config.device_staging > 0 and any(worker.device for worker in engine.workers):
            make = partial(device_staging, config, engine)
            self._pools.start(Call(CallKind.SLAB, make, partial(self._slab, wish), partial(self._slab_overdue, wish)))
        else:
            self._queue(wish)

    def withdraw(self, number: int) -> None:
        """Nobody wants this memory any more."""
        if (wish := self._wishes.get(number)) is not None and wish.wanted:
            wish.wanted = False
            if wish.granted:
                self._freeing[number] = wish.size
            elif wish.queued:
                self._end(wish, Withdrawn())
            self.carry_on()

    def free(self, memory: EngineMemory) -> None:
        """Free the memory of an epoch on a thread; reservations wait for it. 50 ms per GiB of small pages.

        After the pools closed, the end of the process frees it.
        """
        if self._pools.closed:
            memory.staging.unregister()
        else:
            self._freeing[memory.layout.epoch] = memory.total_bytes
            self._close(memory)

    def tick(self, now_ns: int) -> None:
        """Try again to free memory that the store did not let go of."""
        for held in [each for each in self._held.values() if not each.trying]:
            if not held.due_ns:
                held.due_ns = now_ns + min(HOLD_NS[0] << held.tries - 1, HOLD_NS[1])
            elif now_ns >= held.due_ns:
                held.trying = True
                self._close(held.memory)

    def held(self) -> list[dict[str, int | str]]:
        """Return what a status says of memory that could not be freed."""
        return [
            {"epoch": number, "bytes": each.memory.held_bytes, "tries": each.tries, "error": each.error}
            for number, each in self._held.items()
        ]

    def next_done(self) -> Reserved | None:
        return self._done.popleft() if self._done else None

    def close(self) -> bool:
        """Let the store forget memory that nobody took, at the end of the process; False once it did not."""
        memories = [memory for _, memory in self._done if isinstance(memory, EngineMemory)]
        return not self._held and all(memory.staging.unregister() for memory in memories)

    def _slab(self, wish: _Wish, result: DeviceStaging | BaseException) -> None:
        """Device memory is there, or refused, in time or too late."""
        if isinstance(result, BaseException):
            wish.device_error = wish.device_error or (str(result) if isinstance(result, DeviceError) else repr(result))
        elif wish.device_error:  # too late
            self._drop(result)
        else:
            wish.device = result
        if not wish.queued:
            self._queue(wish)

    def _slab_overdue(self, wish: _Wish) -> None:
        uuids = sorted({worker.device for worker in wish.engine.workers})
        timeout_ms = wish.config.call_timeout_ms
        wish.device_error = f"the GPU does not answer: uuid={','.join(uuids)} call_timeout_ms={timeout_ms}"
        self._queue(wish)

    def _queue(self, wish: _Wish) -> None:
        """It has all that it needs to begin, but the memory."""
        wish.queued = True
        try:
            layout, _ = layout_for(wish.config, wish.number, wish.engine)
        except (SegmentError, ValueError) as error:
            self._end(wish, error)
            return
        if wish.wanted:
            wish.control_bytes = layout.total_bytes
            wish.size = layout.slot_count * sum(slot_bytes(wish.config, wish.engine)) + wish.control_bytes
            self.carry_on()
        else:
            self._end(wish, Withdrawn())

    def carry_on(self) -> None:
        """Begin the reservations that may, once the store is open, and refuse those for which there is no memory."""
        if not self._store.is_open:
            return
        for wish in [each for each in self._wishes.values() if each.queued and not each.granted]:
            # Before `available_bytes`: what is taken in between then counts twice, not never.
            promised = sum(each.size - each.taken for each in self._wishes.values() if each.granted)
            left = available_bytes() - promised - (others := self._others(wish.config))
            if left <= wish.size < left + sum(self._freeing.values()):
                return
            if left > wish.size:
                wish.granted = True
                self._pools.start(Call(CallKind.ATTACH, partial(wish.make, self._store), partial(self._made, wish)))
                continue
            error = SegmentError(
                f"staging: not enough memory for another engine: staging={size_text(wish.config.staging)} "
                f"control={whole_mib(wish.control_bytes)} engine={wish.engine.engine_id!r} "
                f"available={whole_mib(max(0, left))} promised={whole_mib(others)} (to store and door)"
            )
            self._end(wish, error)

    def _others(self, config: DaemonConfig) -> int:
        """Return the bytes of the daemon's other parts that are not taken yet."""
        if self.others_bytes is not None:
            return self.others_bytes
        return 0 if config.mooncake_config is not None else config.memory

    def _made(self, wish: _Wish, result: EngineMemory | BaseException) -> None:
        if isinstance(result, EngineMemory) and not wish.wanted:
            self._end(wish, Withdrawn())
            self.free(result)
        else:
            self._end(wish, result)
        if wish.held is not None:
            self._freed(wish.held, False)
        self.carry_on()

    def _end(self, wish: _Wish, result: EngineMemory | BaseException) -> None:
        del self._wishes[wish.number]
        self._freeing.pop(wish.number, None)
        self._done.append(Reserved(wish.number, result))
        if wish.device is not None:
            self._drop(wish.device)

    def _drop(self, device: DeviceStaging) -> None:
        """Free device memory that no epoch has."""
        if not self._pools.closed:
            self._pools.start(Call(CallKind.SLAB, device.close, self._closed))

    def _close(self, memory: EngineMemory) -> None:
        self._pools.start(Call(CallKind.ATTACH, memory.close, partial(self._freed, memory)))

    def _freed(self, memory: EngineMemory, result: bool | BaseException) -> None:
        number = memory.layout.epoch
        self._freeing.pop(number, None)
        held = self._held.pop(number, None)
        if result is True:
            if held is not None:
                self._log.info("memory.freed", epoch=number, tries=held.tries + 1)
        else:
            error = memory.staging.held if result is False else repr(result)
            if held is None:
                self._log.warning("memory.held", epoch=number, held_bytes=memory.held_bytes, error=error)
            self._held[number] = _Held(memory, error, held.tries + 1 if held is not None else 1)
        self.carry_on()

    def _closed(self, error: BaseException | None) -> None:
        """What could not be closed costs other engines nothing but its memory."""
        if error is not None:
            self._log.error("job.failed", error=repr(error))
