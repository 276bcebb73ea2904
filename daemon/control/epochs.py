"""The epochs of all engines: made on memory reserved for them, and kept after their end until they are idle."""

from __future__ import annotations

from dataclasses import dataclass

from ...kv.keys import owner
from ...shmring.wire.checks import Mode
from ..engine.epoch import Epoch
from ..engine.epoch_parts import Services
from ..engine.memory import EngineInfo, EngineMemory
from ..engine.reservations import Reservations
from ..telemetry.events import Ending
from ..telemetry.snapshot import Snapshot
from .refusals import Refusals


@dataclass(eq=False)
class Shared(Services):
    """The parts of the daemon that all engines share.

    `mode` starts as configured; a reload and an operator change it.
    """

    snapshot: Snapshot

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mode: Mode = self.config.mode
        self.refusals = Refusals()
        self.waiting: list[dict[str, int | str]] = []  # engines that said hello and are not attached (control/group.py)
        self.master_http = ""  # host:port of the embedded store's master


class Epochs:
    """Makes, ticks, ends and frees epochs. Call it on the main loop only."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.all: tuple[Epoch, ...] = ()  # the attached ones
        self._ended: list[Epoch] = []
        self._joined = shared.store.is_open
        self.reservations = Reservations(shared.pools, shared.store, shared.log)

    def attached(self, uid: int | None) -> list[Epoch]:
        """Return the attached epochs of this user's engines; None: of all engines."""
        return [epoch for epoch in self.all if uid in (None, epoch.engine.uid)]

    def attach(self, memory: EngineMemory, engine: EngineInfo) -> Epoch:
        """Make an epoch on memory that was reserved."""
        shared, config = self._shared, self._shared.config
        unnamed = config.namespaces == "shared" or engine.scheduler.upstream_keys
        epoch = Epoch(shared, memory, engine._replace(owner=owner(engine.uid, shared=unnamed)))
        epoch.switch(shared.mode)
        self.all += (epoch,)
        return epoch

    def end(self, epoch: Epoch, ending: Ending) -> None:
        """End an attached epoch; `tick` frees its memory once no store call touches it."""
        self.all = tuple(each for each in self.all if each is not epoch)
        if epoch.corrupt is not None:
            self._shared.log.error(
                "engine.corrupt", engine=epoch.engine.engine_id, epoch=epoch.number, error=epoch.corrupt
            )
        epoch.end(ending)
        self._ended.append(epoch)

    def switch(self, mode: Mode) -> None:
        """Change the mode of all engines, attached ones and later ones."""
        shared = self._shared
        shared.log.info("mode.switched", before=shared.mode, after=mode)
        shared.mode = mode
        for epoch in self.all:
            epoch.switch(mode)

    def tick(self, now_ns: int) -> list[tuple[Epoch, Ending]]:
        """Do the periodic work of each epoch; return those that the caller must end, so that their engines reattach."""
        over = []
        for epoch in self.all:
            epoch.tick(now_ns)
            if epoch.memory.worn_out:
                self._shared.log.warning("engine.worn", engine=epoch.engine.engine_id, epoch=epoch.number)
                over.append((epoch, Ending.ENGINE_WORN))
        if self._shared.store.is_open and not self._joined:
            self._joined = True
            self._shared.log.info("store.joined")
            self.reservations.carry_on()
        self.reservations.tick(now_ns)
        for epoch in list(self._ended):
            if epoch.idle:
                self._ended.remove(epoch)
                epoch.close()
                self.reservations.free(epoch.memory)
            else:
                epoch.tick(now_ns)
        return over

    def close(self) -> None:
        """Close ended epochs that are idle, at the end of the process, which frees their memory.

        Once the store does not let go of one, it is asked no more: each question to a frozen server takes seconds.
        """
        asks = self.reservations.close()
        for epoch in self._ended:
            if epoch.idle:
                epoch.close()
                asks = asks and epoch.memory.staging.unregister()
