"""The log's catalogue: every event, its level, its fields and their meaning; docs/EVENTS.md is made from it.

CONTRIBUTING.md has the steps to add an event.  A test compares every log call of the daemon with the catalogue, and
tests with a real daemon compare every line that it writes.
A field means the same in every event; its name ends with its unit (`_ms`, `_s`, `_bytes`, `_blocks`).
"""

from __future__ import annotations

import enum
from typing import NamedTuple


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
    LATE = "late", "the engine waited as long as it may and had nothing to take yet; it recomputed"
    RECOMPUTED = "recomputed", "the engine had nothing to take yet, and expected to recompute sooner than to wait"
    ABORTED = "aborted", "the request ended in the engine before it was admitted"
    UNUSED = "unused", "admitted without these blocks: all were local by then, or another connector answered"
    EVICTED = "evicted", "the engine lost local blocks that the hint had counted on; it hinted again"
    LOST = "lost", "the engine gave the hint up: a reset voided it"
    # The daemon finds these.
    UNTOLD = "untold", "the engine gave the flag up, and its record did not come: the hint ring was full"
    RESET = "reset", "the engine's weights changed (`reset_cache`) while it was pending or staged"
    ENGINE_GONE = "engine_gone", "the connection to one of the engine's processes ended first"
    STAGING_LOST = "staging_lost", "the epoch ended because half of its staging slots were lost (`engine.worn`)"
    ENGINE_CORRUPT = "engine_corrupt", "the engine's shared memory was corrupt, and the daemon detached it"
    DAEMON_STOPPED = "daemon_stopped", "the daemon stopped first"


class Field(NamedTuple):
    """One field. `kind` is the JSON type; it ends with `?` where null may come. Key material stays at level debug."""

    kind: str
    meaning: str
    key_material: bool = False


class Event(NamedTuple):
    """One event. A field with `?` at its end may be absent. `floods`: summed once a second for each engine."""

    level: str
    meaning: str
    fields: tuple[str, ...]
    floods: bool = False


LEVELS = ("debug", "info", "warning", "error")

# Every line begins with these, in this order; those with `?` where they apply.
COMMON: dict[str, Field] = {
    "ts": Field("string", "UTC, ISO 8601, microseconds"),
    "level": Field("string", "`debug`, `info`, `warning` or `error`"),
    "event": Field("string", "its name, `noun.verb`"),
    "run_id": Field("string", "one start of one daemon"),
    "engine?": Field("string", "the engine's id, as vLLM's `kv_transfer_config.engine_id`"),
    "epoch?": Field("integer", "one attachment of one engine; its log has the same number"),
    "suppressed?": Field("integer", "lines like this one that were not written in the second before"),
}

FIELDS: dict[str, Field] = {
    # requests: the fields of request.done, in its order
    "request_id": Field("string", "vLLM's request id, which contains the client's"),
    "outcome": Field("string", "how it ended, see [outcomes](#outcomes)"),
    "prompt_tokens": Field("integer", "tokens of the prompt"),
    "hint_blocks": Field("integer", "full blocks of the prompt: as much as could be loaded"),
    "local_blocks": Field("integer", "leading blocks that the engine held itself when the request arrived"),
    "found_blocks": Field("integer", "leading blocks that were local or in the store; the rest is a miss"),
    "loaded_blocks": Field("integer", "blocks that the engine copied out of staging"),
    "kv_groups": Field(
        "integer",
        "its engine's KV groups; with several, these blocks are as long as the prefix grows by, and "
        "each stands for blocks of all groups",
    ),
    "bytes": Field("integer", "bytes fetched for it, all ranks; blocks that were staged for others already cost none"),
    "bytes_disk": Field("integer", "of these, from disk"),
    "bytes_memory": Field("integer", "of these, from memory"),
    "taken_back": Field("integer", "how often its staged blocks went to more urgent requests, to be fetched again"),
    "store_unavailable": Field("boolean", "the store did not answer: a miss"),
    "arrived_ms": Field("number", "the engine's scheduler got the request; all other times count from here"),
    "hint_seen_ms": Field("number?", "the daemon read the hint"),
    "looked_up_ms": Field("number?", "the store said what it has"),
    "first_byte_ms": Field("number?", "the first fetched block was in staging"),
    "last_byte_ms": Field("number?", "the last one was"),
    "answered_ms": Field("number?", "the engine could see that nothing more would come; null: it never was so"),
    "asked_ms": Field("number?", "the scheduler reached the request and found it pending; null: it never had to wait"),
    "claimed_ms": Field("number?", "the scheduler took what was staged"),
    "loaded_ms": Field("number?", "the step in which the last rank copied it ended, its computing included"),
    "ended_ms": Field("number", "the daemon learned of the end, or made it"),
    "exposed_ms": Field("number", "how long the scheduler had room for the request and waited for it, in whole steps"),
    "unseen_ms": Field("number", "part of `exposed_ms` after its answer was there, until the engine's step had ended"),
    "missing_blocks": Field("number", "blocks that were missing when the engine ceased to wait for all; 0: it did not"),
    "recompute_ms": Field("number?", "what recomputing these cost the engine, as it judged; null: it waited for all"),
    "hidden_fraction": Field("number?", "share of look-up and transfer that made no scheduler wait; null: no fetch"),
    "announced_ms": Field("number?", "how long before it arrived its prompt was announced; null: it was not"),
    "announced_blocks": Field("integer", "leading blocks that were announced"),
    "announced_staged": Field("integer", "of these, blocks that were in staging when the request was looked up"),
    "medium": Field("string?", "`memory` or `disk`: where the store had most of what it lacked; null: nowhere"),
    "store_bytes_s": Field(
        "number?", "bytes per second that all fetches of this medium got while it waited for its own; null: none ran"
    ),
    "hour_bytes_s": Field("number?", "the median of the hour before, while fetches ran; null: too few were seen"),
    "room_ms": Field("number", "how long in that time the engine's next fetch of the medium had no slot"),
    "failed": Field(
        "string?",
        "why blocks that the store had did not come: `no_room` (staging holds no more), `overdue`, `lease` (the store "
        "lost them meanwhile), or the class of the store's error, as `transfer`: a storage node did not deliver",
    ),
    "nowhere": Field(
        "string?",
        "why its first block that was nowhere is nowhere: `evicted` (or purged), `storage_node`, `other_namespace`, "
        "`never_stored` through this daemon since its start",
    ),
    "namespace": Field("string?", "the other namespace that has it"),
    "owners": Field(
        "string", "storage nodes that hold the values, or that a fetch waits for, HOST:PORT; empty: a disk"
    ),
    "cause": Field("string?", "what made it slow, see [causes](#causes); null: nothing did"),
    "traceparent": Field("string?", "its place in vLLM's trace (W3C Trace Context); null: it is not traced"),
    # fetches and saves
    "blocks": Field("integer", "blocks of one store call, or of one copy to device memory"),
    "good_blocks": Field("integer", "of these, fetched and of the right size"),
    "duration_ms": Field("number", "from the order to its result, waiting for a thread included"),
    "path": Field("string", "`memory` or `disk`: fetches from there; `save`: puts"),
    "bytes_s": Field("number", "bytes per second while a call ran"),
    "lost_s": Field("number", "of `waited_s`, for requests that loaded nothing"),
    "causes": Field("string", "why, the most frequent first"),
    "save_id": Field("integer", "the engine's number of the save"),
    "stored_blocks": Field("integer", "blocks put into the store"),
    "present_blocks": Field("integer", "blocks that were in the store already"),
    "failed_blocks": Field("integer", "blocks that could not be fetched, or not be stored"),
    "tries": Field("integer", "store calls that it took"),
    # counters and gauges of an engine's epoch
    "hints": Field("integer", "hints read"),
    "bad_records": Field("integer", "hint-ring records that were skipped"),
    "dropped_hints": Field("integer", "hints that the engine could not push: its ring or its flags were full"),
    "miss_blocks": Field("integer", "blocks of looked-up requests that were neither local nor in the store"),
    "hit_blocks": Field("integer", "blocks beyond the local ones that the store had"),
    "fetched_blocks": Field("integer", "blocks fetched into staging"),
    "staged_blocks": Field("integer", "blocks that were in staging already, or on their way there"),
    "absent_blocks": Field("integer", "blocks that the store did not have, or had not all before them"),
    "no_room_blocks": Field("integer", "blocks that found no spare room"),
    "saved_blocks": Field("integer", "blocks put into the store"),
    "saved_again_blocks": Field("integer", "of these, blocks that the engine had stored before: evicted, or purged"),
    "lost_saves": Field("integer", "blocks that were to be saved and were not"),
    "kept_bytes": Field("integer", "staging that stays until the daemon ends: the epoch had lost slots"),
    "requests_taken_back": Field("integer", "requests that lost staged blocks to more urgent ones before they ended"),
    "slots": Field("integer", "staging slots, those for saves not counted in `status` and `engine.detached`"),
    "slots_free": Field("integer", "empty slots"),
    "slots_idle": Field("integer", "slots with a staged block that no request holds"),
    "announcements_open": Field("integer", "announced prompts whose request may still come"),
    "blocks_ahead": Field("integer", "blocks fetched for them, or to be fetched"),
    "slots_unused": Field("integer", "of these, slots whose block no request loaded yet; announced ones aside"),
    "name": Field("string", "of the announcement, as its sender gave it"),
    "slots_stuck": Field("integer", "slots that a store call past its deadline may still write to"),
    "slots_lost": Field("integer", "slots that are never used again: Mooncake may still write to them (`slots.lost`)"),
    "blocks_pinned": Field("integer", "blocks that requests hold"),
    "blocks_wasted": Field("integer", "fetched blocks whose slot was given up before any request loaded them"),
    "requests": Field("integer", "hinted requests that have not ended"),
    "leases": Field("integer", "blocks that wait for their fetch; the store keeps them until then"),
    "orders": Field("integer", "fetches in flight or waiting for a thread"),
    "save_slots": Field("integer", "slots kept for saves"),
    "save_slots_busy": Field("integer", "of these, with the saver"),
    "save_slots_lost": Field("integer", "of these, never used again: Mooncake may still read them (`slots.lost`)"),
    "saves_queued": Field("integer", "saves running or waiting"),
    "device_slots": Field("integer", "slots in device memory"),
    "device_slots_free": Field("integer", "empty ones"),
    "device_copies": Field("integer", "blocks that are being copied to device memory, or wait for it"),
    "promoted_blocks": Field("integer", "staged blocks copied to device memory"),
    "device_blocks": Field("integer", "blocks that the engine loaded from device memory"),
    "block_bytes": Field("integer", "one block, all ranks together"),
    "page_bytes": Field("integer", "of staging's pages, the mean: 4096, and up to 2097152 with huge pages"),
    "ranks": Field("integer", "worker processes of the engine"),
    "come": Field("integer", "how many of them said hello"),
    "missing": Field("string", "numbers of those that did not, eight at most"),
    # the store
    "master": Field("string", "address of the Mooncake master"),
    "protocol": Field("string", "Mooncake's transport"),
    "reads": Field("string", "`sleeping`: fetches from memory wait without a busy core; `blocking`: in Mooncake's get"),
    "call": Field("string", "`exist`, `get`, `put`, `remove`; past its deadline: `look_up`, `fetch`, `save`, `copy`"),
    "code": Field(
        "integer?",
        "Mooncake's result code: -900 and -901 no answer from the master, -800 none from the storage node, -200 no "
        "room; of a process, its exit status",
    ),
    "pause_s": Field("number", "for how long nobody asks the store"),
    "retry_s": Field("number", "seconds until the next try"),
    "in_flight": Field("integer", "store calls and device calls that had not come back"),
    "waited_s": Field("number", "how long was waited"),
    "reset_generation": Field("integer", "the engine's count of resets"),
    "weights": Field("string", "the weights since then, in the engine's keys (`g:…@`)"),
    # processes
    "pid": Field("integer?", "process id"),
    "uid": Field("integer", "user id, as the kernel reports it"),
    "role": Field("string", "`scheduler` or `worker`"),
    "rank": Field("integer", "the worker's rank; 0 for the scheduler"),
    "version": Field("string", "version of kvprefetch there"),
    "final": Field("boolean", "asking again changes nothing"),
    "error": Field("string", "what went wrong, in one line"),
    "count": Field("integer", "how many of them this epoch had so far"),
    "socket": Field("string", "path of the control socket"),
    "staging": Field("integer", "bytes of staging that each engine gets"),
    "key": Field("string", "key of the configuration"),
    "before": Field("string", "its value before"),
    "after": Field("string", "its value now, or what a restart would make of it"),
    "takes_effect": Field("string", "`at once`, or `for engines that attach from now on`"),
    "cores": Field("number", "cores that the process may use"),
    "min_cores": Field("integer", "cores that it needs"),
    "signal": Field("string", "the signal's name"),
    "port": Field("integer", "TCP port"),
    "memory_bytes": Field("integer", "DRAM segment of the embedded store"),
    "disk_bytes": Field("integer", "configured size of the disk"),
    "room_bytes": Field("integer", "free space that values may take, and what they take already"),
    "folder_mode": Field("string", "the folder's mode before, octal"),
    "files": Field("integer", "number of files in it"),
    "available_bytes": Field("integer", "memory available without swapping"),
    "wanted_bytes": Field("integer", "`staging` and, of an embedded store, `memory`"),
    "attempt": Field("integer", "which attempt, from 0"),
    "lost_lines": Field("integer", "how many"),
    "line": Field("string", "output of the embedded master; may name keys", key_material=True),
}

_COUNTERS = (
    "slots", "slots_free", "slots_idle", "slots_unused", "slots_stuck", "slots_lost", "blocks_pinned", "blocks_wasted",
    "requests", "leases", "orders", "announcements_open", "blocks_ahead",
    "save_slots", "save_slots_busy", "save_slots_lost", "saves_queued", "hints", "dropped_hints", "bad_records",
    "hit_blocks", "miss_blocks", "fetched_blocks", "failed_blocks", "loaded_blocks", "saved_blocks",
    "saved_again_blocks", "present_blocks", "lost_saves", "kept_bytes", "requests_taken_back", "device_slots",
    "device_slots_free", "device_copies", "promoted_blocks", "device_blocks",
)  # fmt: skip

EVENTS: dict[str, Event] = {
    "daemon.ready": Event("info", "The daemon serves: socket bound, store open or declared degraded.",
                          ("socket", "pid", "staging")),
    "daemon.stopping": Event("info", "A signal asked the daemon to stop.", ("signal",)),
    "daemon.stopped": Event("info", "Everything is closed.", ()),
    "daemon.failed": Event("error", "The daemon cannot start; standard error ends with the same line.", ("error",)),
    "config.changed": Event("info", "A reload changed a key.", ("key", "before", "after", "takes_effect")),
    "config.kept": Event("warning", "A key of the configuration changed, but needs a restart.",
                         ("key", "before", "after")),
    "config.invalid": Event("error", "A reload found the configuration bad; the daemon keeps the old one.", ("error",)),
    "mode.switched": Event("info", "The mode of the daemon changed, for every engine.", ("before", "after")),
    "cores.few": Event("warning", "The CPU quota is below two cores: transfers may be slow or fail.",
                       ("cores", "min_cores")),
    "memory.short": Event("warning", "The machine, or the control group, has less memory left than one engine's staging"
                          " and the embedded store will take: lower `staging` or `memory`, or the kernel will kill a "
                          "process.", ("available_bytes", "wanted_bytes")),
    "log.lost": Event("warning", "Lines were lost, because nobody read them, or a disk was full or stood still.",
                      ("lost_lines",)),
    "picture.hidden": Event("warning", "There is no shared memory for the daemon's picture: `status`, `top` and "
                            "`health` ask the socket, and say nothing once the daemon hangs or died.", ("error",)),
    "socket.renewed": Event("warning", "The control socket's file was gone, and the daemon made a new one. Find out "
                            "which program removes it.", ("socket",)),
    "socket.lost": Event("warning", "The file is gone, or another's, and the daemon cannot make a new one: no engine "
                         "can attach. Restart the daemon when that is mended.", ("error",)),
    "peer.hello": Event("info", "A process of an engine came.", ("role", "rank", "pid", "version")),
    "peer.refused": Event("warning", "The daemon refused a process, or turned it away for now. Written again when the "
                          "reason changes; `status` lists it as long as it tries.",
                          ("pid", "uid", "error", "final"), floods=True),
    "peers.full": Event("warning", "No room for another connection: the daemon closed the oldest one of the user with "
                        "most. Those of attached engines do not count.", ("error", "pid?", "uid?"), floods=True),
    "peer.lost": Event("debug", "A process went away while the daemon spoke to it.", ("error", "pid?")),
    "engine.attached": Event("info", "All processes of an engine mapped their memory: hints are welcome.",
                             ("ranks", "kv_groups", "slots", "save_slots", "block_bytes", "page_bytes")),
    "engine.waiting": Event("warning", "An engine waits for its memory: the kernel lets the daemon's user send no more "
                            "descriptors until some are read. The daemon tries again.", ("error",)),
    "engine.incomplete": Event("warning", "30 s after an engine's scheduler some ranks are still missing; the engine "
                               "gets nothing before they come. They run on another node, look for another socket, or "
                               "may not attach.", ("come", "ranks", "missing")),
    "engine.refused": Event("error", "The daemon does not serve an engine: a bound is reached, its hellos contradict "
                            "each other or the configuration, or its memory could not be reserved. Written again when "
                            "the reason changes; `status` lists it as long as it tries.",
                            ("pid", "uid", "error", "final"), floods=True),
    "engine.reset": Event("info", "An engine's weights changed: its keys have other weights from now on.",
                          ("reset_generation", "weights")),
    "engine.corrupt": Event("error", "An engine's shared memory is corrupt; the daemon detaches it.", ("error",)),
    "engine.worn": Event("warning", "Half of an engine's slots are lost (`slots.lost`): its epoch ends, and it attaches"
                         " anew with fresh memory. The old memory stays until the daemon ends.", ()),
    "engine.held": Event("warning", "An engine is gone, and its memory stays: calls past their deadline may still touch"
                         " it.", ("in_flight",)),
    "engine.detached": Event("info", "An engine's epoch is over; all of its memory but `kept_bytes` is free again.",
                             _COUNTERS),
    "request.done": Event("info", "A hinted request ended: its trace, in one line for each hint.",
                          tuple(FIELDS)[: tuple(FIELDS).index("traceparent") + 1]),
    "record.bad": Event("warning", "A hint-ring record did not follow the protocol and was skipped.",
                        ("error", "count"), floods=True),
    "wait.lost": Event("warning", "In the last minute much of the time for which schedulers waited was lost: its "
                       "requests loaded nothing.", ("requests", "waited_s", "lost_s", "causes")),
    "fetch.slow": Event("warning", "Fetches, or puts, got far less from the store than in the hour before; once a "
                        "minute.", ("path", "bytes_s", "hour_bytes_s")),
    "fetch.done": Event("debug", "A fetch came back.", ("blocks", "good_blocks", "bytes", "duration_ms")),
    "door.closed": Event("warning", "The HTTP door has no Unix socket: nobody can announce prompts; all else works.",
                         ("error",)),
    "door.failed": Event("warning", "The process of the HTTP door ended, or cannot be started; the next connection "
                         "starts another one.", ("error",), floods=True),
    "announcement.done": Event("info", "A prompt that was announced before its request: the request came, or will not.",
                               ("name", "outcome", "staged_blocks", "fetched_blocks", "absent_blocks",
                                "no_room_blocks", "failed_blocks")),
    "copy.done": Event("debug", "Staged blocks were copied to device memory, or could not be.",
                       ("blocks", "duration_ms")),
    "device.ready": Event("info", "From now on the daemon copies staged blocks to device memory.",
                          ("device_slots",)),
    "device.unpinned": Event("warning", "Host staging could not be pinned; copies from it are slower.", ("error",)),
    "device.off": Event("warning", "This engine gets no staging in device memory; all loads come from host memory.",
                        ("error",)),
    "save.done": Event("info", "A save ended, with all parts of a large one.",
                       ("save_id", "stored_blocks", "present_blocks", "failed_blocks", "tries")),
    "call.overdue": Event("warning", "A store call, or a copy to device memory, is past its deadline: the requests go "
                          "on without it.", ("call", "blocks", "owners?"), floods=True),
    "slots.lost": Event("warning", "Mooncake gave up a fetch (or save) and may still write (or read) its slots, which "
                        "are never used again. A storage node is slow or stopped, or the clock was set.",
                        ("call", "blocks")),
    "owner.aside": Event("warning", "A storage node did not deliver: its values are misses, and one call at a time "
                         "asks whether it is back.", ("owners",)),
    "owner.back": Event("info", "A storage node delivered again.", ("owners", "waited_s")),
    "job.failed": Event("error", "A store job raised an unexpected error; its blocks count as failed.",
                        ("error",), floods=True),
    "store.opened": Event("info", "The store is ready for calls.", ("master", "protocol", "reads")),
    "mooncake.untried": Event("warning", "No test has run the installed Mooncake. It has all that the daemon calls.",
                              ("error",)),
    "reads.blocking": Event("warning", "A fetch that waits keeps a core busy: the test of reads that sleep failed.",
                            ("error",)),
    "lease.short": Event("error", "The master keeps values for a shorter time than `lease_ms`. Fetches block from now "
                         "on, and Mooncake judges each lease.", ("error",)),
    "store.exposed": Event("warning", "Other machines may reach the sockets of the store's client: this kernel neither "
                           "binds them to the loopback interface nor filters them.", ("error",)),
    "rdma.absent": Event("warning", "This machine has no RDMA device: Mooncake uses TCP, and reaches only storage nodes"
                         " that use TCP too.", ("protocol",)),
    "store.joined": Event("info", "A store that was missing at the start came; engines use it from now on.", ()),
    "store.degraded": Event("warning", "The store is not there; until it comes everything is a miss.",
                            ("error", "retry_s")),
    "store.retried": Event("debug", "The store is still not there.", ("error", "retry_s")),
    "store.failed": Event("warning", "A whole call failed; the daemon leaves the store alone for a while.",
                          ("call", "code", "pause_s"), floods=True),
    "store.corrupt": Event("warning", "Values came back with pages of zeros, and were not used: a disk loses data. Look"
                           " at the kernel's log; start with an empty folder, on another disk.", ("blocks",),
                           floods=True),
    "store.recovered": Event("info", "A call worked again.", ("call",)),
    "store.unflushed": Event("warning", "Not everything was on disk when the daemon stopped.", ("waited_s",)),
    "store.closed": Event("info", "The daemon left the store.", ("in_flight",)),
    "disk.small": Event("warning", "The file system has less room than the configured size of the disk: values get "
                        "`room_bytes`, and less when others fill the file system, of which 256 MiB stay free.",
                        ("disk_bytes", "room_bytes")),
    "disk.mended": Event("warning", "Other users could enter the disk's folder: it is closed now (0700), and its files "
                         "are.", ("folder_mode", "files")),
    "disk.failing": Event("warning", "Nothing can be kept on disk; memory serves on.", ("error",)),
    "disk.recovered": Event("info", "The disk works again; values stored in between are in memory only.", ()),
    "master.started": Event("info", "The embedded store's master answers.", ("pid", "port", "memory_bytes")),
    "master.retried": Event("debug", "The master did not answer; the daemon tries another port.", ("port", "attempt")),
    "master.died": Event("error", "The master ended by itself: the daemon stops with status 69, to be started anew.",
                         ("pid",)),
    "master.stopped": Event("info", "The daemon ended the master; with a `code` the master had ended by itself.",
                            ("pid", "code?")),
    "master.said": Event("debug", "A line of the master's output.", ("line",)),
}  # fmt: skip
