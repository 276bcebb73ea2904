"""What operators and the daemon say to each other on the control socket: questions and orders, and their answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from .checks import Fingerprint, KeyPrefix, Packet

MAX_WARM_DIGESTS = 256  # of one Warm order, which must fit a message


class StatusQuery(Packet):
    """Anyone who may attach asks what the daemon holds; needs no hello.

    The answer names all engines to an operator (root and the daemon's user), and to others those of their own user.
    """

    type: Literal["status_query"] = "status_query"


class StatQuery(Packet):
    """Ask what the control segments of the engines say that a Status would name; the answer is Segments."""

    type: Literal["stat_query"] = "stat_query"


class Segments(Packet):
    """What the control segment of each attached engine says (see shmring/view.py), the engine's id first.

    No descriptors come with it: those that a process does not read would count against the daemon's user.
    """

    type: Literal["segments"] = "segments"
    engines: list[dict[str, Any]]


class Status(Packet):
    """The engines that the asking user may see, the first 32 of them, each with its gauges and counters.

    `engine_count` counts all of the daemon's engines. `slowest` has requests of engines that the user may see.

    Only the command line asks for it, never an engine, so it is no reason for another `PROTOCOL`: what one release does
    not know of another's is left out or has its default. `calls` has the age in seconds of the oldest store call that
    runs, by kind.
    """

    model_config = ConfigDict(extra="ignore")

    type: Literal["status"] = "status"
    version: str
    pid: int
    mode: str = "on"
    master_http: str = ""  # host:port of the embedded master's HTTP interface
    store_open: bool
    store_answering: bool = True
    disk_fault: str = ""  # why nothing can be kept on the disk tier
    store: dict[str, int] | None = None  # the daemon's StoreFill, where the embedded store's master says it
    store_earlier: dict[str, int] | None = None  # five minutes ago, or at its start
    engines: list[dict[str, int | str]]
    engine_count: int = 0
    uptime_s: float = 0.0
    calls: dict[str, float] = Field(default_factory=dict)
    slowest: list[dict[str, str | int | float]] = Field(default_factory=list)


class Namespace(Packet):
    """A namespace of store keys: the key prefix with `*` for a rank's number, and the id of the user who has it.

    `fingerprint` says what a digest in the name stands for, as an engine said it.  Times are Unix time in seconds.
    """

    model_config = ConfigDict(extra="ignore")

    name: KeyPrefix
    uid: int = Field(ge=0, lt=1 << 32)
    fingerprint: Fingerprint = Field(default_factory=dict)
    first_attached_s: float = Field(ge=0)
    last_attached_s: float = Field(ge=0)


class NamespacesQuery(Packet):
    """Ask for the namespaces that engines attached with, sorted by name, those after the name `after`.

    The answer is KnownNamespaces.  It has all of them for an operator, and for others those of their own user.
    """

    type: Literal["namespaces_query"] = "namespaces_query"
    after: str = Field(default="", max_length=1024)


class KnownNamespaces(Packet):
    """As many namespaces as fit a message; with `more` the sender asks again, after the last name of these."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["namespaces"] = "namespaces"
    namespaces: list[Namespace]
    more: bool


class SetMode(Packet):
    """An operator (root or the daemon's user) switches what the daemon does for every engine; answered by Report."""

    type: Literal["set_mode"] = "set_mode"
    mode: Literal["on", "shadow", "off"]


class Purge(Packet):
    """Remove every stored value of these namespaces, and let others have them unless an engine uses them; answered by
    Report.

    A namespace is what stands before a block's hash in its keys: `prefixes`, or those of an attached engine's ranks.
    Users who are no operators may name their own engines and namespaces only.
    """

    type: Literal["purge"] = "purge"
    engine: str = Field(default="", max_length=256)
    prefixes: list[KeyPrefix] = Field(default_factory=list, max_length=64)
    timeout_ms: int = Field(ge=1, le=600_000)


Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,64}$")]


class Warm(Packet):
    """Stage blocks ahead for an attached engine, an operator for any and others for one of their own user; answered by
    Warmed, or by Report when it cannot be done.

    Each chain is a prefix's block hashes in hex, in order; all together at most MAX_WARM_DIGESTS, and one order at a
    time.  `engine` may be left out when one is attached, `chains` to ask only what the answer says of it.  `run` names
    the orders that belong together: none takes room from another.
    """

    type: Literal["warm"] = "warm"
    run: str = Field(pattern=r"^[0-9a-f]{32}$")
    engine: str = Field(default="", max_length=256)
    chains: list[Annotated[list[Digest], Field(min_length=1)]] = Field(
        default_factory=list, max_length=MAX_WARM_DIGESTS
    )


class Warmed(Packet):
    """What became of the blocks of a Warm order, and what its sender must know of the engine (see SchedulerInfo).

    `found` has, for each chain, how many of its leading blocks are in staging or in the store.  These were `staged`
    already, are `fetched` now, found `no_room`, or `failed` to arrive; `absent` blocks are in neither, or behind one.
    """

    type: Literal["warmed"] = "warmed"
    engine: str
    epoch: int
    block_tokens: int
    hash_algorithm: str
    hash_probe: str
    found: list[int] = Field(default_factory=list)
    staged: int = 0
    fetched: int = 0
    absent: int = 0
    no_room: int = 0
    failed: int = 0


class Report(Packet):
    """What became of an operator's order: whether it was done, and one line that says so."""

    type: Literal["report"] = "report"
    ok: bool
    text: str
