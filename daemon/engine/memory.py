"""The memory of one epoch: its control segment and its staging, sized as the engine asks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...kv.groups import Group, Groups, Kind
from ...shmring.doorbell import Doorbell
from ...shmring.errors import DeviceError, SegmentError
from ...shmring.gpu.driver import calls
from ...shmring.layout import PAGE_ENTRIES, Layout, pages_of, power_of_two_at_least
from ...shmring.segment import Segment
from ...shmring.wire.attach import SchedulerInfo, WorkerInfo
from ..config.model import DaemonConfig
from ..config.sizes import size_text, whole_mib
from ..store.checksums import SUM_BYTES
from .device import DeviceStaging
from .staging import HostStaging, slots_for

FLAGS = 1024  # requests of an engine that are hinted at a time
# Slot tables of all of them together: no more than they can need, and room for at least this many of the longest.
TABLE_BYTES = 16 << 20
LONGEST = 16
# A control segment of an engine's choice: this much is always allowed, and beyond it a quarter of `staging`.
CONTROL_BYTES = 64 << 20


def groups_of(wants: SchedulerInfo) -> Groups:
    """Return the engine's KV groups, unchecked."""
    return Groups(tuple(Group(**dict(each, kind=Kind(each.kind))) for each in wants.groups), wants.hash_tokens)


class EngineInfo(NamedTuple):
    """What the processes of one engine say of it; `workers` by rank. `pid` and `uid`: of its scheduler's process.

    `owner`: the part of its keys that names its user (keys.py).
    """

    engine_id: str
    groups: Groups
    scheduler: SchedulerInfo
    workers: Sequence[WorkerInfo]
    pid: int = 0
    uid: int = 0
    owner: str = ""

    @property
    def model(self) -> str:
        """Return the model's name, as its keys have it."""
        return self.workers[0].key_prefixes[0].partition("@tp_rank:")[0].rpartition("@")[2]

    @property
    def models(self) -> list[str]:
        """Return all names of its model that an announcement may have."""
        return list(dict.fromkeys((self.model, *self.scheduler.models)))

    @property
    def block_bytes(self) -> list[int]:
        return [worker.block_bytes for worker in self.workers]


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

    @cached_property
    def block_bytes(self) -> int:
        """Return the size of a block, all ranks' parts together."""
        return sum(self.staging.block_bytes)

    @property
    def save_slots_from(self) -> int:
        return self.layout.slot_count - self.save_slots

    @property
    def worn_out(self) -> bool:
        """Whether half of the slots for fetches, or half of those for saves, are quarantined."""
        gone, first = list(self.staging.quarantined), self.layout.slot_count - self.save_slots  # threads add to it
        saves = sum(slot >= first for slot in gone)
        return 2 * (len(gone) - saves) >= first or 2 * saves >= self.save_slots > 0

    @classmethod
    def create(
        cls,
        config: DaemonConfig,
        epoch: int,
        engine: EngineInfo,
        device: DeviceStaging | None = None,
        device_error: str = "",
    ) -> EngineMemory:
        """Make everything, with staging still to be filled (HostStaging.fill), and take over `device`.

        The kernel zeroes the control segment, so not on the main loop.  Raises what `layout_for` raises, and OSError.
        """
        with contextlib.ExitStack() as undo:
            if device is not None:
                undo.callback(device.close)
            layout, save_slots = layout_for(config, epoch, engine, device.slots if device is not None else 0)
            staging = HostStaging(layout.slot_count, engine.block_bytes, sum_bytes(config, engine))
            undo.callback(staging.close)
            if device is not None:
                device.follow(staging)
                for segment, node in zip(staging.segments, device.nodes, strict=True):
                    if node >= 0:
                        segment.prefer(node)
            control = Segment.create(layout.total_bytes)
            undo.callback(control.close)
            layout.write(control.buffer)
            doorbell = Doorbell.create()
            undo.pop_all()
        return cls(layout, control, doorbell, staging, save_slots, device, device_error)

    @property
    def total_bytes(self) -> int:
        return self.staging.size_bytes + self.layout.total_bytes

    @property
    def held_bytes(self) -> int:
        """Return the size of staging that is mapped."""
        return sum(size for _, size in self.staging.areas())

    def close(self) -> bool:
        """Free everything, once no call touches it: 50 ms per GiB, so not on the main loop.

        Return False where store or GPU did not let go of staging (`HostStaging.held`): call again then.
        """
        self.control.close()
        self.doorbell.close()
        if self.device is not None and not self.device.close():
            self.staging.held = "the GPU's driver does not unpin it"
            return False
        return self.staging.close()


def sum_bytes(config: DaemonConfig, engine: EngineInfo) -> int:
    """Return the size of a checksum in this engine's staging; values of vLLM's own connector have none."""
    return SUM_BYTES if config.checksums == "on" and not engine.scheduler.upstream_keys else 0


def slot_bytes(config: DaemonConfig, engine: EngineInfo) -> list[int]:
    """Return the size of each rank's part of a slot, with its checksum."""
    return [size + sum_bytes(config, engine) for size in engine.block_bytes]


def layout_for(config: DaemonConfig, epoch: int, engine: EngineInfo, device_slots: int = 0) -> tuple[Layout, int]:
    """Return the layout of an engine's memory, and how many of its slots are for saves.

    Raises SegmentError, and ValueError for too little staging or a layout out of bounds.
    """
    wants, slots = engine.scheduler, slots_for(config.staging, slot_bytes(config, engine))
    save_slots = min(slots - 1, max(1, int(slots * config.save_share))) if wants.saves else 0
    names = engine.groups.names(wants.max_blocks)
    longest = pages_of(names)
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
        ring_bytes=power_of_two_at_least(max(config.hint_ring, ring_bytes)),
        flag_count=FLAGS,
        page_count=page_count,
        table_entries=names,
        credit_entries=power_of_two_at_least(max(1, save_slots)),
        slot_count=slots,
        epoch=epoch,
        device_slots=device_slots,
    )
    return layout, save_slots


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
    )
