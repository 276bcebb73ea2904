"""Messages between operators and the daemon on the control socket: questions, admin commands, and their answers.

Only the command line and the HTTP door send them, never an engine, so a change here is no reason for another
`PROTOCOL`: an answer may have fields that its reader ignores, and a missing field has its default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from .checks import MAX_AHEAD_MS, MAX_HASHES, TTL_MS, Mode, Packet, Priority
from .records import MAX_HASH_BYTES

MAX_NAMESPACE_BYTES = 256  # of one engine's namespaces in an answer, which are cut there
MAX_REMOVED = 256  # keys of one Remove message, which must fit a packet


class StatusQuery(Packet):
    """Ask for a Status; needs no hello, and any user who may attach may ask.

    The answer names all engines to an operator (root and the daemon's user), and to others those of their own user.
    """

    type: Literal["status_query"] = "status_query"


class StatQuery(Packet):
    """Ask for the Segments of the engines that a Status would name."""

    type: Literal["stat_query"] = "stat_query"


class Segments(Packet):
    """The numbers in the control segment of each attached engine (see shmring/view.py), the engine's id first.

    It carries no descriptors: those that a process leaves unread would count against the daemon's user.
    """

    type: Literal["segments"] = "segments"
    engines: list[dict[str, Any]]


class Status(Packet):
    """The first 32 engines that the user may see, with gauges and counters; `engine_count` counts all engines."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["status"] = "status"
    version: str
    protocol: int = 0  # with engines; 0: not said
    pid: int
    mode: str = "on"
    master_http: str = ""  # host:port of the embedded master's HTTP interface
    log: str = ""  # where its log goes: a file's path, "journal", or another word
    ready: bool = True  # as /readyz says
    healthy: bool = True  # as /healthz says
    alive: bool = True  # its process runs
    problems: list[str] = Field(default_factory=list)  # the reasons, and faults that leave it ready
    store_open: bool
    store_answering: bool = True
    disk_fault: str = ""  # why the disk takes nothing
    store: dict[str, int] | None = None  # the daemon's StoreFill, where the embedded store's master answers
    engines: list[dict[str, int | str]]
    engine_count: int = 0
    refused: list[dict[str, int | str]] = Field(default_factory=list)  # engines and processes that try in vain
    waiting: list[dict[str, int | str]] = Field(default_factory=list)  # engines that said hello and are not attached
    # Memory of engines that left, which the store did not let go of: epoch, bytes, tries, error.
    held: list[dict[str, int | str]] = Field(default_factory=list)
    uptime_s: float = 0.0
    calls: dict[str, float] = Field(default_factory=dict)  # age of the oldest running store call of each kind, seconds
    slowest: list[dict[str, str | int | float]] = Field(default_factory=list)  # requests of engines it may see
    # For each cause of their slow requests in five minutes: how many, and for how long schedulers waited (ms).
    causes: dict[str, list[float]] = Field(default_factory=dict)
    outcomes: dict[str, float] = Field(default_factory=dict)  # requests of all engines since the start, by outcome
    rates: dict[str, dict[str, float]] = Field(default_factory=dict)  # bytes per second, by path and window


class SetMode(Packet):
    """An operator (root or the daemon's user) sets the daemon's mode for every engine; the answer is a Report."""

    type: Literal["set_mode"] = "set_mode"
    mode: Mode


class Reload(Packet):
    """An operator lets the daemon read its configuration again; the answer is a Report."""

    type: Literal["reload"] = "reload"


class Remove(Packet):
    """Remove the values of these keys, leased ones too; the answer is Removed, or a Report of a refusal.

    An operator may name all keys, another user those that begin with its own user's part (`u<uid>@`).
    """

    type: Literal["remove"] = "remove"
    keys: list[Annotated[str, Field(min_length=1, max_length=1536)]] = Field(min_length=1, max_length=MAX_REMOVED)


class Removed(Packet):
    """How many of the keys had a value that is gone now; the others had none, or the store `failed` to remove them."""

    type: Literal["removed"] = "removed"
    removed: int
    failed: int = 0


class WhyQuery(Packet):
    """Ask what keeps an engine (by its id or model), or a `request` of it, from KV in the store: a Report of lines."""

    type: Literal["why_query"] = "why_query"
    engine: str = Field(max_length=1024)
    request: str = Field(default="", max_length=1024)


class Caller(Packet):
    """The user for whom the process of the HTTP door asks, as the kernel knows it: user id and groups."""

    uid: int = Field(ge=0, le=(1 << 32) - 1)
    groups: list[int] = Field(max_length=256)


class EngineQuery(Packet):
    """Ask which attached engine a prompt is for, and how it hashes blocks. The answer is an Engine, or a Report.

    `engine`: its id, or the start of one.  `model`: as the engine's keys, vLLM's option `--model` or its
    callers name it.  `dp_rank`: of data parallelism.
    Each may be missing: what is given must fit one engine alone.  Only root and the daemon's user may name a `caller`.
    The answer carries its `number`.
    """

    type: Literal["engine_query"] = "engine_query"
    number: int = 0
    caller: Caller | None = None
    engine: str = Field(default="", max_length=256)
    model: str = Field(default="", max_length=1024)
    dp_rank: int | None = Field(default=None, ge=0, le=1 << 20)


class Engine(Packet):
    """An attached engine, as one announces prompts to it: tokens and bytes of a block, and how it hashes blocks.

    It hashes each `hash_tokens` (see SchedulerInfo).  `max_blocks`: of one prompt.
    """

    type: Literal["engine"] = "engine"
    number: int = 0
    engine: str
    epoch: int
    block_tokens: int
    block_bytes: int
    max_blocks: int
    hash_tokens: int
    hash_algorithm: str
    hash_start: str = ""
    hash_probe: str


class Announce(Packet):
    """Announce a prompt to an attached engine: a descriptor beside the message has its digests, joined (a memfd).

    Only the HTTP door's process may send it: root, or the daemon's user.  Each AnnounceStep carries its `number`.  The
    log has its `name`.  The request is expected in `expected_ms`, and after `ttl_ms` no more.  `most_blocks`: to stage.
    With a `session`, by the digest of its id in hex, it is the newest prompt of that, and the descriptor is empty.
    """

    type: Literal["announce"] = "announce"
    caller: Caller
    number: int = Field(ge=0, le=(1 << 63) - 1)
    name: str = Field(max_length=256)
    engine: str = Field(max_length=256)
    epoch: int
    hashes: int = Field(default=0, ge=0, le=MAX_HASHES)
    hash_bytes: int = Field(default=1, ge=1, le=MAX_HASH_BYTES)
    session: str = Field(default="", pattern=r"^([0-9a-f]{32})?$")
    expected_ms: int = Field(default=0, ge=0, le=MAX_AHEAD_MS)
    ttl_ms: int = Field(default=TTL_MS, ge=1, le=MAX_AHEAD_MS)
    priority: Priority = 0
    most_blocks: int = Field(default=MAX_HASHES, ge=1, le=MAX_HASHES)


Step = Literal["accepted", "clipped", "missing", "rejected", "completed", "used", "late", "expired"]
ENDS = ("used", "late", "expired", "missing", "rejected")  # no step follows


class AnnounceStep(Packet):
    """One step of an announcement.

    First it is rejected, missing (the store has nothing of it), accepted, or clipped (a bound cut it), then completed.
    Once its request comes it was used, or late: not all was there yet.  Without one it is expired.

    Blocks: `announced`; of these, `staged` already, `started` to be fetched, `absent` in the store; of the
    started ones, once it is completed, `fetched`, or without `room`, or `failed`.
    """

    type: Literal["outcome"] = "outcome"
    number: int
    outcome: Step
    reason: str = ""
    announced: int = 0
    staged: int = 0
    started: int = 0
    absent: int = 0
    fetched: int = 0
    no_room: int = 0
    failed: int = 0

    @property
    def last(self) -> bool:
        """Whether no other outcome follows."""
        return self.outcome in ENDS


class Report(Packet):
    """The result of an admin command: whether the daemon did it, and one line for the operator."""

    type: Literal["report"] = "report"
    number: int = 0  # of an EngineQuery
    forbidden: bool = False  # of an EngineQuery: its caller may not attach
    ok: bool
    text: str
