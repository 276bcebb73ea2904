"""The names of the log's events by level, which of them may flood, and how a hinted request ends.

docs/EVENTS.md describes every event and field.  A test compares it with every log call of the daemon, and tests with a
real daemon compare every line that it writes.  CONTRIBUTING.md has the steps to add an event.
"""

from __future__ import annotations

import enum


class Ending(enum.Enum):
    """How a hinted request ended: the closed vocabulary of `outcome` in `request.done`."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Ending:
        member = object.__new__(cls)
        member._value_ = value
        member.meaning = meaning
        return member

    # The engine reports these (the names of wire.records.Outcome).
    LOADED = "loaded", "the engine copied blocks out of staging"
    MISS = "miss", "the store had nothing beyond what the engine held itself"
    TIMED_OUT = "timed_out", "the engine waited as long as it may and had nothing to take yet; it recomputed"
    RECOMPUTED = "recomputed", "the engine had nothing to take yet, and expected to recompute sooner than to wait"
    ABORTED = "aborted", "the request ended in the engine before it was admitted"
    UNUSED = "unused", "admitted without these blocks: all were local by then, or another connector answered"
    LOCAL_GAP = "local_gap", "the engine evicted local blocks that the hint had counted on; it hinted again"
    VOIDED = "voided", "the engine gave the hint up: a reset voided it"
    # The daemon finds these.
    UNREPORTED = "unreported", "the engine gave the flag up, and its record did not come: the hint ring was full"
    FORSAKEN = "forsaken", "its early hint came, and the scheduler did not get the request within 30 s"
    RESET = "reset", "the engine's weights changed (`reset_cache`) while it was pending or staged"
    ENGINE_GONE = "engine_gone", "the connection to one of the engine's processes ended first"
    ENGINE_WORN = "engine_worn", "the epoch ended because half of its staging slots were quarantined (`engine.worn`)"
    ENGINE_CORRUPT = "engine_corrupt", "the engine's shared memory was corrupt, and the daemon detached it"
    DAEMON_FAULT = "daemon_fault", "the daemon failed for this engine, and detached it (`engine.fault`)"
    DAEMON_STOPPED = "daemon_stopped", "the daemon stopped first"


# Every line begins with these, in this order, as far as it has them.
COMMON = ("ts", "level", "event", "run_id", "engine", "epoch", "suppressed")

_NAMES = {
    "debug": "peer.gone fetch.done copy.done store.retried master.retried master.said",
    "info": "daemon.ready daemon.idle daemon.stopping daemon.stopped config.read config.changed mode.switched"
    " peer.hello engine.attached engine.reset engine.detached request.done announcement.done device.ready save.done"
    " owner.back memory.freed name.back store.opened store.joined store.recovered store.closed disk.recovered"
    " master.started master.stopped",
    "warning": "config.kept cores.few memory.short memory.held log.dropped log.kept name.missing picture.hidden"
    " peer.refused peers.full engine.waiting engine.incomplete engine.worn engine.held record.bad"
    " door.closed door.failed device.unpinned device.off call.overdue slots.quarantined owner.aside"
    " mooncake.untried reads.blocking store.exposed rdma.absent store.degraded store.failed store.corrupt"
    " store.unreadable store.unflushed disk.small disk.mended disk.failing",
    "error": "daemon.failed config.invalid engine.refused engine.corrupt engine.fault job.failed master.died",
}
LEVELS = tuple(_NAMES)
EVENTS = {name: level for level, names in _NAMES.items() for name in names.split()}  # the level of each
# One fault may repeat these: summed once a second for each engine.
FLOODS = {
    *("peer.refused", "peers.full", "engine.refused", "record.bad", "door.failed"),
    *("call.overdue", "job.failed", "store.failed", "store.corrupt", "store.unreadable"),
}
