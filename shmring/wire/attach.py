"""Messages of engine and daemon on the control socket, from the first hello to the end of an epoch."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from ...kv import MAX_GROUPS
from .checks import KeyPrefix, Packet, shown

MAX_ABSENT = 400  # names in one message: 52 KiB of the longest
MAX_BORDERS = 2048  # of WorkerInfo.written, of all groups together: 22 KiB of a message
MAX_MODEL = 1024  # characters of a model's name or path
MAX_SETTINGS = 128  # characters of SchedulerInfo.settings
# Names the weights of an engine since its last reset, in its keys; empty: those of its start.
Weights = Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$")]


class GroupInfo(Packet):
    """A KV group's rule (kv.groups.Group)."""

    kind: Literal["full", "window", "chunk", "state"]
    block_tokens: int = Field(ge=1, le=1 << 20)
    window_tokens: int = Field(ge=0, le=1 << 31)
    drafts: bool


class WorkerInfo(Packet):
    """One rank's share of a block, which has the same size in each KV group, and where its values are in the store."""

    block_bytes: int = Field(ge=1, le=1 << 32)
    # Of each KV group, as vLLM's own connector has them.
    key_prefixes: list[KeyPrefix] = Field(min_length=1, max_length=MAX_GROUPS)
    # Of each KV group, which bytes of a block's value its layers write: begin and end of each stretch, one stretch
    # after the other. All other bytes may be zeros. Empty: the layers of every group write all bytes.
    written: list[list[Annotated[int, Field(ge=0, le=1 << 32)]]] = Field(default=[], max_length=MAX_GROUPS)
    # Replicas of this shard among the ranks, and this rank's index: it fills the save slots with
    # slot % replicas == replica_index.
    replicas: int = Field(ge=1, le=4096)
    replica_index: int = Field(ge=0, le=4095)
    # What decides a block's bytes, for people: the keys have its digest. `unknown` alone: why nothing is known.
    fingerprint: dict[str, str] = Field(default={})
    # UUID of the rank's GPU, as the driver writes it; empty on a CPU.
    device: str = Field(default="", max_length=96)

    def written_of(self, group: int) -> tuple[int, ...]:
        """Return `written` of one group."""
        return tuple(self.written[group]) if self.written else (0, self.block_bytes)

    @model_validator(mode="after")
    def _check_written(self) -> WorkerInfo:
        if self.written and len(self.written) != len(self.key_prefixes):
            raise ValueError(f"written: number of KV groups: groups={len(self.written)} keys={len(self.key_prefixes)}")
        if (borders := sum(map(len, self.written))) > MAX_BORDERS:
            raise ValueError(f"written: too many borders: borders={borders} max={MAX_BORDERS}")
        for group, each in enumerate(self.written):
            ascending = all(one < next_ for one, next_ in pairwise(each))
            if len(each) % 2 or not ascending or (each and each[-1] > self.block_bytes):
                raise ValueError(
                    "written: stretches must have a begin and an end, ascend, and lie in the value: "
                    f"group={group} block_bytes={self.block_bytes} borders={shown(each)}"
                )
        return self


class SchedulerInfo(Packet):
    """The scheduler side's demands on its control segment."""

    max_blocks: int = Field(ge=1, le=(1 << 20) - 1)
    max_hint_bytes: int = Field(ge=1, le=1 << 28)
    loads: bool
    saves: bool
    # Whether the daemon sends Stored messages about its saves.
    events: bool = False
    # Whether its keys are those of vLLM's MooncakeStoreConnector, which name no user.
    upstream_keys: bool = False
    # What its callers call the model: its path or its name on the Hub, and the name that it is served by.
    models: list[Annotated[str, Field(max_length=MAX_MODEL)]] = Field(default=[], max_length=8)
    # For operators: its releases and its connector's configuration, as name=value.
    settings: str = Field(default="", max_length=MAX_SETTINGS)
    # The number of its last reset, and its weights since.
    reset_generation: int = Field(default=0, ge=0, le=(1 << 63) - 1)
    weights: Weights = ""
    # For others, which hash prompts (kv/hashing.py): vLLM's name of the algorithm, its hash before the first block, and
    # the probe. Both hashes are in hex, and empty where hashes begin with a number that is random in each process.
    hash_algorithm: str = Field(default="", max_length=64)
    hash_start: str = Field(default="", pattern=r"^([0-9a-f]{2}){0,64}$")
    hash_probe: str = Field(default="", pattern=r"^([0-9a-f]{2}){0,64}$")
    # The rules of the KV groups, and the tokens of one digest of a hint.
    groups: list[GroupInfo] = Field(min_length=1, max_length=MAX_GROUPS)
    hash_tokens: int = Field(ge=1, le=1 << 20)
    # Earlier epochs that its steps may still name; the daemon sends them to the workers, which forget all others.
    live_epochs: list[int] = Field(default=[], max_length=1024)


class Hello(Packet):
    """First message of a process. All processes of one engine start send the same engine_id and incarnation."""

    type: Literal["hello"] = "hello"
    protocol: int
    version: str = Field(max_length=64)
    engine_id: str = Field(min_length=1, max_length=256)
    incarnation: str = Field(pattern=r"^[0-9a-f]{32}$")
    role: Literal["scheduler", "worker"]
    rank: int = Field(ge=0, le=4095)
    world_size: int = Field(ge=1, le=4096)
    worker: WorkerInfo | None = None
    scheduler: SchedulerInfo | None = None


class Refused(Packet):
    """The daemon will not serve this process; `error` is one line. `final`: another hello changes nothing.

    Other protocol versions read it too, so new fields must be ones that a reader can do without.
    """

    model_config = ConfigDict(extra="ignore")

    type: Literal["refused"] = "refused"
    error: str
    final: bool
    forbidden: Literal[True] | None = None  # its user may not attach; None is not sent, for older engines


class Attached(Packet):
    """All processes said hello. Descriptors: scheduler (control segment, doorbell), worker (staging segment, slab).

    Slots [0, slot_count) are in the staging segment, and slots [slot_count, slot_count + device_slots) in the slab, the
    device memory behind the second descriptor, which comes only with device slots.
    """

    type: Literal["attached"] = "attached"
    epoch: int = Field(ge=1, le=(1 << 63) - 1)
    segment_bytes: int = Field(ge=1)
    slot_count: int = Field(ge=1, le=(1 << 32) - 1)
    slot_bytes: int = Field(ge=0)
    device_slots: int = Field(default=0, ge=0, le=(1 << 32) - 1)
    live_epochs: list[int] = Field(default_factory=list)  # of the scheduler's hello
    # Half of the store's lease, and a bit: so much later the scheduler says again that it uses the same blocks.
    use_again_ms: int = Field(default=5_500, ge=1)


class Mapped(Packet):
    """The process mapped its descriptors; when all did, the daemon becomes ACTIVE in the control segment.

    `device`: the worker has the device slots too. Only when every worker has them may a load order name one.
    """

    type: Literal["mapped"] = "mapped"
    epoch: int = Field(ge=1)
    device: bool = False


class Reset(Packet):
    """The weights changed: staged data, hints and saves of older generations are void; later keys have `weights`."""

    type: Literal["reset"] = "reset"
    reset_generation: int = Field(ge=1, le=(1 << 63) - 1)
    weights: Weights


class ResetDone(Packet):
    """From now on the daemon neither finds nor stores KV of generations before this one for the engine."""

    type: Literal["reset_done"] = "reset_done"
    reset_generation: int


class Stored(Packet):
    """Where the blocks of a SAVED record's slots are: in the store's memory, on its disk, or not stored (`failed`).

    Each slot of the record is in exactly one message. Only schedulers with `events` get them.
    """

    type: Literal["stored"] = "stored"
    save_id: int = Field(ge=0, le=(1 << 64) - 1)
    memory: list[int] = Field(default_factory=list)
    disk: list[int] = Field(default_factory=list)
    failed: list[int] = Field(default_factory=list)


class Absent(Packet):
    """Blocks that requests used, and that the store has no more for every rank: the scheduler saves those it holds.

    `names`: as in SAVED, joined, in hex.  The daemon had taken so many SAVED records of this epoch, and put none of
    these blocks meanwhile.  It may drop this message: it asks the store again when the blocks are used again.
    """

    type: Literal["absent"] = "absent"
    epoch: int = Field(ge=1)
    reset_generation: int = Field(ge=0)
    saved_records: int = Field(ge=0)
    name_bytes: int = Field(ge=2, le=65)
    names: str = Field(pattern=r"^([0-9a-f]{2})+$", max_length=2 * 65 * MAX_ABSENT)


class Notice(Packet):
    """One line for the engine's operator, in the engine's log."""

    type: Literal["notice"] = "notice"
    text: str = Field(max_length=4096)
