"""The memory of one epoch: its control segment and its staging, sized as the engine asks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ...shmring.doorbell import Doorbell
from ...shmring.errors import DeviceError, SegmentError
from ...shmring.gpu.calls import calls
from ...shmring.layout import PAGE_ENTRIES, Layout, pages_of, power_of_two_at_least
from ...shmring.segment import Segment
from ...shmring.wire.attach import SchedulerInfo, WorkerInfo
from ...shmring.wire.checks import Fingerprint
from ..config.machine import available_bytes
from ..config.model import DaemonConfig
from ..config.sizes import size_text, whole_mib
from ..store.namespaces import name_of
from ..work.calls import Call, Kind
from ..work.pools import Pools
from .device import DeviceStaging
from .staging import HostStaging, slots_for

FLAGS = 1024  # requests of an engine that are hinted at a time
# Slot tables of all of them together: no more than they can need, and room for at least this many of the longest.
TABLE_BYTES = 16 << 20
LONGEST = 16
# A control segment of an engine's choice: this much is always allowed, and beyond it a quarter of `staging`.
CONTROL_BYTES = 64 << 20


class EngineInfo(NamedTuple):
    """What the processes of one engine say of it; `workers` by rank."""

    engine_id: str
    block_tokens: int
    scheduler: SchedulerInfo
    workers: Sequence[WorkerInfo]

    @property
    def block_bytes(self) -> list[int]:
        """Return the size of each rank's part of a block."""
        return [worker.block_bytes for worker in self.workers]

    @property
    def namespaces(self) -> dict[str, Fingerprint]:
        """Return the namespaces of its keys, one unless ranks differ, each with the fingerprint of its first rank."""
        return {name_of(worker.key_prefix): worker.fingerprint for worker in reversed(self.workers)}


@dataclass(frozen=True)
class EngineMemory:
    """Slots [0, save_slots_from) are for fetches, the rest for saves.

    `device`: device staging, or None; then `device_error` says why, if it was wanted.
    """

    layout: Layout
    control: Segment
    doorbell: Doorbell
    staging: HostStaging
    save_slots: int
    device: DeviceStaging | None = None
    device_error: str = ""

    @property
    def block_bytes(self) -> int:
        """Return the size of a block, all ranks' parts together."""
        return sum(self.staging.block_bytes)

    @property
    def save_slots_from(self) -> int:
        return self.layout.slot_count - self.save_slots

    @property
    def worn_out(self) -> bool:
        """Whether half of the slots for fetches, or half of those for saves, are lost (`HostStaging.lost`)."""
        lost = list(self.staging.lost)  # in one step: threads add to it
        saves = sum(slot >= self.save_slots_from for slot in lost)
        return 2 * (len(lost) - saves) >= self.save_slots_from or 2 * saves >= self.save_slots > 0

    @classmethod
    def create(
        cls,
        config: DaemonConfig,
        epoch: int,
        engine: EngineInfo,
        device: DeviceStaging | None = None,
        device_error: str = "",
    ) -> EngineMemory:
        """Reserve everything, and take over `device`. The kernel zeroes the memory, so not on the main loop.

        Raises StagingTooSmall, SegmentError, OSError, and ValueError for a layout out of bounds.
        """
        with contextlib.ExitStack() as undo:
            if device is not None:
                undo.callback(device.close)
            wants, block_bytes = engine.scheduler, engine.block_bytes
            slots = slots_for(config.staging, block_bytes)
            save_slots = min(slots - 1, max(1, int(slots * config.save_share))) if wants.saves else 0
            longest = pages_of(wants.max_blocks)
            page_count = max(LONGEST * longest, min(FLAGS * longest, TABLE_BYTES // (4 * PAGE_ENTRIES)))
            ring_bytes = power_of_two_at_least(4 * wants.max_hint_bytes)
            most = max(CONTROL_BYTES, config.staging // 4)
            if (wanted := ring_bytes + 4 * page_count * PAGE_ENTRIES) > most:
                raise SegmentError(
                    f"max_hint_bytes, max_blocks: the control segment would be too large: "
                    f"max_hint_bytes={wants.max_hint_bytes} max_blocks={wants.max_blocks} control={whole_mib(wanted)} "
                    f"max={whole_mib(most)}: lower the engine's max_model_len, or raise "
                    f"staging={size_text(config.staging)} to {whole_mib(4 * wanted + (1 << 20) - 1)}"
                )
            layout = Layout(
                ring_bytes=max(config.hint_ring, ring_bytes),
                flag_count=FLAGS,
                page_count=page_count,
                table_entries=wants.max_blocks,
                credit_entries=power_of_two_at_least(max(1, save_slots)),
                slot_count=slots,
                epoch=epoch,
                device_slots=device.slots if device is not None else 0,
            )
            if (available := available_bytes()) <= slots * sum(block_bytes) + layout.total_bytes:
                # Linux overcommits: the reservation would succeed, and the OOM killer would end a process later.
                raise SegmentError(
                    f"staging: not enough memory for another engine: staging={size_text(config.staging)} "
                    f"control={whole_mib(layout.total_bytes)} engine={engine.engine_id!r} "
                    f"available={whole_mib(available)}"
                )
            staging = HostStaging(slots, block_bytes)
            undo.callback(staging.close)
            if device is not None:
                device.follow(staging)
            control = Segment.create(layout.total_bytes)
            undo.callback(control.close)
            layout.write(control.buffer)
            doorbell = Doorbell.create()
            undo.pop_all()
        return cls(layout, control, doorbell, staging, save_slots, device, device_error)

    def close(self) -> None:
        """Free everything, once no call touches it: 50 ms per GiB, so not on the main loop (`release`)."""
        if self.device is not None:
            self.device.close()
        self.staging.close()
        self.control.close()
        self.doorbell.close()


def prepare(
    pools: Pools,
    config: DaemonConfig,
    removal_ms: int,
    epoch: int,
    engine: EngineInfo,
    done: Callable[[EngineMemory | Exception], None],
) -> None:
    """Reserve the memory of an epoch on a thread; call `done` with it, or with the error, on the main loop.

    Refuse an engine whose resets have less time than a removal takes (`removal_ms`): no reset would be confirmed, and
    after the first one the engine would neither load nor save.  Leave out a GPU that fails, or misses a call's
    deadline, and give back what it gives later.
    """

    def reserve(device: DeviceStaging | None, device_error: str) -> None:
        create = partial(EngineMemory.create, config, epoch, engine, device, device_error)
        pools.start(Call(Kind.ATTACH, create, done))

    reset_ms = engine.scheduler.reset_timeout_ms
    if reset_ms is not None and reset_ms < removal_ms:
        error = "reset_timeout_ms is too short for this store's disk, so that no reset would be confirmed"
        done(ValueError(f"{error}: reset_timeout_ms={reset_ms} min={removal_ms}: raise it or leave it out"))
        return
    uuids = [worker.device for worker in engine.workers]
    if config.device_staging == 0 or not any(uuids):
        reserve(None, "")
        return
    late = False

    def made(result: DeviceStaging | BaseException) -> None:
        error, device = (result, None) if isinstance(result, BaseException) else (None, result)
        if not late:
            reserve(device, _line(error))
        elif device is not None:
            device.close()

    def overdue() -> None:
        nonlocal late
        late = True
        reserve(None, f"the GPU does not answer: uuid={','.join(sorted(set(uuids)))} call_timeout_ms={timeout_ms}")

    timeout_ms = config.call_timeout_ms
    pools.start(Call(Kind.SLAB, partial(device_staging, config, engine), made, overdue))


def release(pools: Pools, memory: EngineMemory) -> None:
    """Free the memory of an epoch on the thread that reserves, so that the next engine finds it free.

    After the pools closed, the end of the process frees it.
    """

    def freed(error: BaseException | None) -> None:
        if error is not None:
            raise error

    if not pools.closed:
        pools.start(Call(Kind.ATTACH, memory.close, freed))


def device_staging(config: DaemonConfig, engine: EngineInfo) -> DeviceStaging:
    """Make device slots for all ranks. Raises DeviceError where there can be none."""
    uuids = [worker.device for worker in engine.workers]
    if not all(uuids):
        raise DeviceError(f"not every worker has a GPU that staging can use: rank={uuids.index('')}")
    calls.check(uuids, config.call_timeout_ms / 1e3)
    return DeviceStaging(
        engine.block_bytes,
        uuids,
        budget_bytes=config.device_staging,
        margin_bytes=config.device_margin,
        allocator=config.device_owner,
    )


def _line(error: BaseException | None) -> str:
    return str(error) if isinstance(error, DeviceError) else repr(error) if error is not None else ""
