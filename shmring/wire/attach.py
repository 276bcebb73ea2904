"""What engine and daemon say to each other on the control socket, from the first hello to the end of an epoch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from .checks import Fingerprint, KeyPrefix, Packet

HASH_PROBE_TOKENS = (1, 2, 3)  # see SchedulerInfo.hash_probe
# A CUDA IPC memory handle: 64 bytes in hexadecimal digits, or none.
Handle = Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")]


class WorkerInfo(Packet):
    """One rank's share of a block and where its objects live in the store (vllm-compatible keys)."""

    block_bytes: int = Field(ge=1, le=1 << 32)
    key_prefix: KeyPrefix
    # Of `put_factor` ranks that hold the same shard, this one fills the save slots with slot % put_factor == put_turn.
    put_factor: int = Field(ge=1, le=4096)
    put_turn: int = Field(ge=0, le=4095)
    # UUID of the rank's GPU, as the driver writes it; empty on a CPU.
    device: str = Field(default="", max_length=96)
    # What the digest in `key_prefix` stands for, by name, for people to read; the daemon compares none of it.
    fingerprint: Fingerprint = Field(default_factory=dict)


class SchedulerInfo(Packet):
    """What the scheduler side wants of its control segment."""

    max_blocks: int = Field(ge=1, le=(1 << 20) - 1)
    max_hint_bytes: int = Field(ge=1, le=1 << 28)
    loads: bool
    saves: bool
    # Wants to be told by Stored messages what became of its saves.
    events: bool = False
    # How long its resets may take, refused when too short; None: as long as `Attached.removal_ms` at least.
    reset_timeout_ms: int | None = Field(default=None, ge=1, le=600_000)
    # How it hashes blocks, to those who hash prompts ahead: vLLM's name of the algorithm, and the hash (hex) of a first
    # block of HASH_PROBE_TOKENS; no probe when hashes begin with a number that is random in each process.
    hash_algorithm: str = Field(default="", max_length=64)
    hash_probe: str = Field(default="", pattern=r"^([0-9a-f]{2}){0,64}$")
    # The epochs before this one that its steps may still name; the daemon tells the workers, who forget all others.
    live_epochs: list[int] = Field(default=[], max_length=1024)


class Hello(Packet):
    """First message of a process. All processes of one engine start say the same engine_id and incarnation."""

    type: Literal["hello"] = "hello"
    protocol: int
    version: str = Field(max_length=64)
    engine_id: str = Field(min_length=1, max_length=256)
    incarnation: str = Field(pattern=r"^[0-9a-f]{32}$")
    role: Literal["scheduler", "worker"]
    rank: int = Field(ge=0, le=4095)
    world_size: int = Field(ge=1, le=4096)
    groups: int = Field(ge=1, le=16)
    block_tokens: int = Field(ge=1, le=1 << 20)
    worker: WorkerInfo | None = None
    scheduler: SchedulerInfo | None = None


class Refused(Packet):
    """The daemon will not serve this process, in one line. `final`: asking again changes nothing.

    Read across protocols: it may only grow by fields that a reader can do without.
    """

    model_config = ConfigDict(extra="ignore")

    type: Literal["refused"] = "refused"
    error: str
    final: bool


class Attached(Packet):
    """All processes said hello. Descriptors: scheduler (control segment, doorbell), worker (staging segment, lease).

    The lease, one end of a socket pair, comes with device slots only: who opened the handle closes it after unmapping,
    and the slab's owner frees the slab only then.

    Slots [0, slot_count) lie in the staging segment, [slot_count, slot_count + device_slots) in device memory: that of
    `device_handle`, or with an empty one memory that the worker is to allocate and to export.
    """

    type: Literal["attached"] = "attached"
    epoch: int = Field(ge=1, le=(1 << 63) - 1)
    segment_bytes: int = Field(ge=1)
    slot_count: int = Field(ge=1, le=(1 << 32) - 1)
    slot_bytes: int = Field(ge=0)
    device_slots: int = Field(default=0, ge=0, le=(1 << 32) - 1)
    device_handle: Handle = ""
    live_epochs: list[int] = Field(default_factory=list)  # of the scheduler's hello
    removal_ms: int = Field(default=0, ge=0, le=600_000)  # how long a reset takes at least


class Mapped(Packet):
    """The process mapped what it was handed; when all did, the daemon becomes ACTIVE in the control segment.

    `device`: a worker has the device slots too, in its own memory where it says a handle. Without it from every worker
    no load order names one.
    """

    type: Literal["mapped"] = "mapped"
    epoch: int = Field(ge=1)
    device: bool = False
    device_handle: Handle = ""


class Reset(Packet):
    """The weights changed: staged data, hints and saves of older reset generations are void, stored keys must go."""

    type: Literal["reset"] = "reset"
    reset_generation: int = Field(ge=1, le=(1 << 63) - 1)
    timeout_ms: int = Field(ge=1, le=600_000)


class ResetDone(Packet):
    """`ok` only when every key of this engine's namespace, all ranks' included, was confirmed gone."""

    type: Literal["reset_done"] = "reset_done"
    reset_generation: int
    ok: bool


class Stored(Packet):
    """What became of slots of a SAVED record: their blocks are in the store's memory, on its disk, or not in it.

    Each slot of the record stands in exactly one message. Only for schedulers that asked for it.
    """

    type: Literal["stored"] = "stored"
    save_id: int = Field(ge=0, le=(1 << 64) - 1)
    memory: list[int] = Field(default_factory=list)
    disk: list[int] = Field(default_factory=list)
    lost: list[int] = Field(default_factory=list)


class Notice(Packet):
    """Something that the engine's operator is to read in the engine's log, in one line."""

    type: Literal["notice"] = "notice"
    text: str = Field(max_length=4096)
