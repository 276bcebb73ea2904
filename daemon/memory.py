"""The memory of one epoch: its control segment and its staging, sized from what the engine asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..shmring.layout import Layout, power_of_two_at_least
from ..shmring.messages import Hello
from ..shmring.segment import Segment
from .config import DaemonConfig
from .staging import HostStaging, slots_for

MAX_TABLE_BYTES = 16 << 20


@dataclass(frozen=True)
class EngineMemory:
    """Slots [0, save_slots_from) are fetched into, the rest are granted for saves."""

    layout: Layout
    control: Segment
    staging: HostStaging
    save_slots: int

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
        save_slots = min(slots - 1, max(1, int(slots * config.save_share))) if wants.saves else 0
        layout = Layout(
            ring_bytes=max(config.hint_ring, power_of_two_at_least(4 * wants.max_hint_bytes)),
            flag_count=max(16, min(1024, MAX_TABLE_BYTES // (4 * wants.max_blocks))),
            table_entries=wants.max_blocks,
            credit_entries=power_of_two_at_least(max(1, save_slots)),
            slot_count=slots,
            epoch=epoch,
        )
        staging = HostStaging(slots, block_bytes)
        try:
            control = Segment.create(layout.total_bytes)
        except BaseException:
            staging.close()
            raise
        layout.write(control.buffer)
        return cls(layout, control, staging, save_slots)

    def close(self) -> None:
        self.staging.close()
        self.control.close()
