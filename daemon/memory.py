"""The memory of one epoch: its control segment and its staging, sized from what the engine asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..shmring.cuda import DeviceError
from ..shmring.errors import SegmentError
from ..shmring.layout import Layout, power_of_two_at_least
from ..shmring.messages import Hello
from ..shmring.segment import Segment
from .config import DaemonConfig
from .device import DeviceStaging
from .host import available_bytes
from .staging import HostStaging, slots_for

MAX_TABLE_BYTES = 16 << 20


@dataclass(frozen=True)
class EngineMemory:
    """Slots [0, save_slots_from) are fetched into, the rest are granted for saves.

    `device`: a second place for staged blocks, or None; `device_error` says why there is none although it was wanted.
    """

    layout: Layout
    control: Segment
    staging: HostStaging
    save_slots: int
    device: DeviceStaging | None = None
    device_error: str = ""

    @property
    def save_slots_from(self) -> int:
        return self.layout.slot_count - self.save_slots

    @classmethod
    def create(cls, config: DaemonConfig, epoch: int, scheduler: Hello, workers: Sequence[Hello]) -> EngineMemory:
        """Reserve everything; takes as long as the kernel takes to zero it, so not on the main loop.

        Raises StagingTooSmall, SegmentError, and ValueError for a layout out of bounds.
        """
        wants = scheduler.scheduler
        if wants is None:
            raise ValueError("scheduler: field required")
        block_bytes = [worker.worker.block_bytes[0] for worker in workers if worker.worker is not None]
        slots = slots_for(config.staging, block_bytes)
        if (available := available_bytes()) <= slots * sum(block_bytes):
            # The kernel would hand it out all the same, and then kill somebody.
            raise SegmentError(
                f"staging: not enough memory for another engine: staging={config.staging} "
                f"engine={scheduler.engine_id!r} available={available}"
            )
        save_slots = min(slots - 1, max(1, int(slots * config.save_share))) if wants.saves else 0
        staging = HostStaging(slots, block_bytes)
        device, device_error = _device(config, staging, workers)
        try:
            layout = Layout(
                ring_bytes=max(config.hint_ring, power_of_two_at_least(4 * wants.max_hint_bytes)),
                flag_count=max(16, min(1024, MAX_TABLE_BYTES // (4 * wants.max_blocks))),
                table_entries=wants.max_blocks,
                credit_entries=power_of_two_at_least(max(1, save_slots)),
                slot_count=slots,
                epoch=epoch,
                device_slots=device.slots if device is not None else 0,
            )
            control = Segment.create(layout.total_bytes)
        except BaseException:
            staging.close()
            if device is not None:
                device.close()
            raise
        layout.write(control.buffer)
        return cls(layout, control, staging, save_slots, device, device_error)

    def close(self) -> None:
        if self.device is not None:
            self.device.close()
        self.staging.close()
        self.control.close()


def _device(config: DaemonConfig, host: HostStaging, workers: Sequence[Hello]) -> tuple[DeviceStaging | None, str]:
    """Device slots for all ranks or for none, and why for none."""
    uuids = [worker.worker.device for worker in workers if worker.worker is not None]
    if config.device_staging == 0 or not any(uuids):
        return None, ""
    if not all(uuids):
        return None, f"not every worker has a GPU that staging can use: rank={uuids.index('')}"
    try:
        device = DeviceStaging(
            host, uuids, budget_bytes=config.device_staging, margin_bytes=config.device_margin,
            owner=config.device_owner,
        )  # fmt: skip
    except DeviceError as error:
        return None, str(error)
    return device, ""
