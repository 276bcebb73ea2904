"""Messages between operators and the daemon on the control socket: questions, admin commands, and their answers.

Only the command line sends them, never an engine, so a change here is no reason for another `PROTOCOL`: an answer may
have fields that its reader ignores, and a missing field has its default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from .checks import Packet

MAX_WARM_DIGESTS = 480  # of one Warm message, which must fit a packet
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
    ready: bool = True  # as /readyz says
    healthy: bool = True  # as /healthz says
    alive: bool = True  # its process runs
    problems: list[str] = Field(default_factory=list)  # the reasons, and faults that leave it ready
    store_open: bool
    store_answering: bool = True
    disk_fault: str = ""  # why the disk takes nothing
    lease_fault: str = ""  # that the master's lease is shorter than the daemon's `lease_ms`
    store: dict[str, int] | None = None  # the daemon's StoreFill, where the embedded store's master answers
    engines: list[dict[str, int | str]]
    engine_count: int = 0
    refused: list[dict[str, int | str]] = Field(default_factory=list)  # engines and processes that try in vain
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
    mode: Literal["on", "shadow", "off"]


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


Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,64}$")]


class Warm(Packet):
    """Announce prompts to an attached engine: to any for an operator, to one of their own user for others.

    The answer is Warmed, or a Report of a refusal. Each chain is a prefix's block hashes in hex, in order; all together
    at most MAX_WARM_DIGESTS, of one length in each chain. `engine` may be missing where one is attached. Without
    `chains` the message only asks for the engine's fields of the answer. Until the deadline what it stages makes room
    for requests, and for no other announcement. The log has its `name`.
    """

    type: Literal["warm"] = "warm"
    name: str = Field(pattern=r"^[\w.:-]{1,64}$")
    deadline_ms: int = Field(default=600_000, ge=1, le=3_600_000)
    engine: str = Field(default="", max_length=256)
    chains: list[Annotated[list[Digest], Field(min_length=1)]] = Field(
        default_factory=list, max_length=MAX_WARM_DIGESTS
    )


class Warmed(Packet):
    """The result of a Warm message, and how the engine hashes blocks (see SchedulerInfo), one hash each `hash_tokens`.

    `whole_prompts`: it has several KV groups, so a part of a chain is of no use.

    `found` counts, for each chain, the leading blocks that are in staging or in the store. Of these, some were `staged`
    already or are `fetched` now, found `no_room`, or `failed` to arrive; `absent` blocks are in neither, or behind one.
    """

    type: Literal["warmed"] = "warmed"
    engine: str
    epoch: int
    block_tokens: int
    hash_tokens: int
    whole_prompts: bool = False
    hash_algorithm: str
    hash_start: str = ""
    hash_probe: str
    found: list[int] = Field(default_factory=list)
    staged: int = 0
    fetched: int = 0
    absent: int = 0
    no_room: int = 0
    failed: int = 0


class Report(Packet):
    """The result of an admin command: whether the daemon did it, and one line for the operator."""

    type: Literal["report"] = "report"
    ok: bool
    text: str
