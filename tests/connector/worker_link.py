"""A worker's link without its thread, for tests that have the segment mapped themselves."""

from __future__ import annotations

from collections.abc import Sequence

from kvprefetch.connector.attach.epoch import WorkerEpoch


class FakeWorkerLink:
    """A worker's link without its thread: it has these epochs mapped."""

    def __init__(self, epoch: WorkerEpoch) -> None:
        self.epochs = {epoch.number: epoch}
        self.ended = {0: 0}  # so that each step says which epochs live
        self.kept: list[Sequence[int]] = []

    def start(self) -> None: ...
    def close(self) -> None: ...
    def mapped(self, epoch: int) -> WorkerEpoch | None:
        return self.epochs.get(epoch)

    def keep(self, live_epochs: Sequence[int]) -> None:
        self.kept.append(live_epochs)
