"""What engine, operator and daemon say on the control socket: where it is, its messages, and how they are sent.

JSON, one message per SOCK_SEQPACKET packet, descriptors beside it (SCM_RIGHTS).
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from .. import __version__
from .protocol import PROTOCOL, ProtocolError

MAX_MESSAGE_BYTES = 1 << 16
MAX_WARM_DIGESTS = 256  # of one Warm order, which must fit a message
HASH_PROBE_TOKENS = (1, 2, 3)  # see SchedulerShape.hash_probe
MAX_SOCKET_PATH_BYTES = 107  # sun_path has 108, one of them the final zero
SHOWN_CHARACTERS = 120  # of a bad value, in the line that names it
# A CUDA IPC memory handle: 64 bytes in hexadecimal digits, or none.
Handle = Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")]


Fingerprint = Annotated[
    dict[Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")], Annotated[str, Field(pattern=r"^[ -~]{0,64}$")]],
    Field(max_length=16),
]


def _whole_prefix(text: str) -> str:
    if not text.endswith("@") or not text.isprintable():
        raise ValueError("should be printable and end with '@'")
    return text


# What stands before a block's hash in the keys of one rank. The "@" at its end, which no hash has, keeps the keys of
# two prefixes apart: neither can be longer than the other by digits that could be a hash.
KeyPrefix = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_whole_prefix)]


def default_socket(environ: Mapping[str, str] = os.environ) -> str:
    """Where daemon and engines meet: $RUNTIME_DIRECTORY (systemd), $XDG_RUNTIME_DIR/kvprefetch or /run/kvprefetch."""
    if runtime := environ.get("RUNTIME_DIRECTORY"):
        return os.path.join(runtime.split(":")[0], "kvprefetchd.sock")
    if session := environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(session, "kvprefetch", "kvprefetchd.sock")
    return "/run/kvprefetch/kvprefetchd.sock"


def check_socket_path(value: object) -> object:
    """The value of a `socket` key, whatever its type. ValueError for a path that no Unix socket can have."""
    if isinstance(value, (str, os.PathLike)):
        path = os.fsencode(value)
        if not 1 <= len(path) <= MAX_SOCKET_PATH_BYTES or b"\0" in path:
            raise ValueError(f"should have 1 to {MAX_SOCKET_PATH_BYTES} bytes, none of them zero")
    return value


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class WorkerShape(_Message):
    """One rank's share of a block and where its objects live in the store (vllm-compatible keys)."""

    block_bytes: int = Field(ge=1, le=1 << 32)
    key_prefix: KeyPrefix
    # Of `put_factor` ranks that hold the same shard, this one fills the save slots with slot % put_factor == put_turn.
    put_factor: int = Field(ge=1, le=4096)
    put_turn: int = Field(ge=0, le=4095)
    # UUID of the rank's GPU, as the driver writes it; empty on a CPU.
    device: str = Field(default="", max_length=96)
    # What the digest in `key_prefix` stands for, by name, for people to read; the daemon compares none of it.
    fingerprint: Fingerprint = {}


class SchedulerShape(_Message):
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


class Hello(_Message):
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
    worker: WorkerShape | None = None
    scheduler: SchedulerShape | None = None


class Refused(_Message):
    """The daemon will not serve this process, in one line. `final`: asking again changes nothing.

    Read across protocols: it may only grow by fields that a reader can do without.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    type: Literal["refused"] = "refused"
    error: str
    final: bool


class Attached(_Message):
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
    live_epochs: list[int] = []  # of the scheduler's hello
    removal_ms: int = Field(default=0, ge=0, le=600_000)  # how long a reset takes at least


class Mapped(_Message):
    """The process mapped what it was handed; when all did, the daemon becomes ACTIVE in the control segment.

    `device`: a worker has the device slots too, in its own memory where it says a handle. Without it from every worker
    no load order names one.
    """

    type: Literal["mapped"] = "mapped"
    epoch: int = Field(ge=1)
    device: bool = False
    device_handle: Handle = ""


class Reset(_Message):
    """The weights changed: staged data, hints and saves of older reset generations are void, stored keys must go."""

    type: Literal["reset"] = "reset"
    reset_generation: int = Field(ge=1, le=(1 << 63) - 1)
    timeout_ms: int = Field(ge=1, le=600_000)


class ResetDone(_Message):
    """`ok` only when every key of this engine's namespace, all ranks' included, was confirmed gone."""

    type: Literal["reset_done"] = "reset_done"
    reset_generation: int
    ok: bool


class Stored(_Message):
    """What became of slots of a SAVED record: their blocks are in the store's memory, on its disk, or not in it.

    Each slot of the record stands in exactly one message. Only for schedulers that asked for it.
    """

    type: Literal["stored"] = "stored"
    save_id: int = Field(ge=0, le=(1 << 64) - 1)
    memory: list[int] = []
    disk: list[int] = []
    lost: list[int] = []


class Notice(_Message):
    """Something that the engine's operator is to read in the engine's log, in one line."""

    type: Literal["notice"] = "notice"
    text: str = Field(max_length=4096)


class StatusQuery(_Message):
    """Anyone who may attach asks what the daemon holds; needs no hello.

    The answer names all engines to an operator (root and the daemon's user), and to others those of their own user.
    """

    type: Literal["status_query"] = "status_query"


class StatQuery(_Message):
    """Ask what the control segments of the engines say that a Status would name; the answer is Segments."""

    type: Literal["stat_query"] = "stat_query"


class Segments(_Message):
    """What the control segment of each attached engine says (see shmring/view.py), the engine's id first.

    No descriptors come with it: those that a process does not read would count against the daemon's user.
    """

    type: Literal["segments"] = "segments"
    engines: list[dict[str, Any]]


class SlowRequest(_Message):
    """One of the requests that ended lately and for which the scheduler waited longest."""

    request_id: str
    engine: str
    outcome: str
    exposed_ms: float
    fetched_bytes: int
    ago_s: float


class StoreFill(BaseModel):
    """How full the store is, in bytes, and what left it since its master started.

    What memory evicts may lie on disk still.  `disk_evictions`: how often the disk tier made room, for which it removes
    one value or many; Mooncake does not say how many.  `disk_bytes` is 0 without a disk tier.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    memory_used_bytes: int
    memory_bytes: int
    memory_evicted_bytes: int
    disk_used_bytes: int
    disk_bytes: int
    disk_evictions: int


class Status(_Message):
    """The engines that the asking user may see, the first 32 of them, each with its gauges and counters.

    `engine_count` counts all of the daemon's engines. `slowest` has requests of engines that the user may see.

    Only the command line asks for it, never an engine, so it is no reason for another `PROTOCOL`: what one release does
    not know of another's is left out or has its default. `calls` has the age in seconds of the oldest store call that
    runs, by kind.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    type: Literal["status"] = "status"
    version: str
    pid: int
    mode: str = "on"
    master_http: str = ""  # host:port of the embedded master's HTTP interface
    store_open: bool
    store_answering: bool = True
    disk_fault: str = ""  # why nothing can be kept on the disk tier
    store: StoreFill | None = None  # of the embedded store, where its master says it
    store_earlier: StoreFill | None = None  # five minutes ago, or at its start
    engines: list[dict[str, int | str]]
    engine_count: int = 0
    uptime_s: float = 0.0
    calls: dict[str, float] = Field(default_factory=dict)
    slowest: list[SlowRequest] = Field(default_factory=list)


class Namespace(_Message):
    """A namespace of store keys: the key prefix with `*` for a rank's number, and the id of the user who has it.

    `fingerprint` says what a digest in the name stands for, as an engine said it.  Times are Unix time in seconds.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    name: KeyPrefix
    uid: int = Field(ge=0, lt=1 << 32)
    fingerprint: Fingerprint = {}
    first_attached_s: float = Field(ge=0)
    last_attached_s: float = Field(ge=0)


class NamespacesQuery(_Message):
    """Ask for the namespaces that engines attached with, sorted by name, those after the name `after`.

    The answer is KnownNamespaces.  It has all of them for an operator, and for others those of their own user.
    """

    type: Literal["namespaces_query"] = "namespaces_query"
    after: str = Field(default="", max_length=1024)


class KnownNamespaces(_Message):
    """As many namespaces as fit a message; with `more` the sender asks again, after the last name of these."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    type: Literal["namespaces"] = "namespaces"
    namespaces: list[Namespace]
    more: bool


class SetMode(_Message):
    """An operator (root or the daemon's user) switches what the daemon does for every engine; answered by Report."""

    type: Literal["set_mode"] = "set_mode"
    mode: Literal["on", "shadow", "off"]


class Purge(_Message):
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


class Warm(_Message):
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


class Warmed(_Message):
    """What became of the blocks of a Warm order, and what its sender must know of the engine (see SchedulerShape).

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


class Report(_Message):
    """What became of an operator's order: whether it was done, and one line that says so."""

    type: Literal["report"] = "report"
    ok: bool
    text: str


Message = (
    Hello | Refused | Attached | Mapped | Reset | ResetDone | Stored | Notice | StatusQuery | Status | StatQuery
    | Segments | NamespacesQuery | KnownNamespaces | SetMode | Purge | Warm | Warmed | Report
)  # fmt: skip
_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def encode_message(message: Message) -> bytes:
    return message.model_dump_json(exclude_none=True).encode()


def decode_message(data: bytes) -> Message:
    """Parse one control message. Raises ProtocolError naming field, value and bound, a foreign protocol first."""
    try:
        raw = json.loads(data)
        json.dumps(raw, ensure_ascii=False).encode()  # a lone surrogate would fail later, in a log or a label
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"control message is not JSON: {error}") from None
    if isinstance(raw, dict) and raw.get("type") == "hello" and raw.get("protocol") != PROTOCOL:
        raise ProtocolError(_skew(raw.get("protocol"), raw.get("version")))
    try:
        return _MESSAGES.validate_python(raw)
    except ValidationError as error:
        raise ProtocolError(first_error(error)) from None


def _skew(theirs: object, version: object) -> str:
    """One line for both logs: what an engine and this daemon speak, and which of them to upgrade."""
    older = "engine" if isinstance(theirs, int) and theirs < PROTOCOL else "daemon"
    return (
        f"protocol differs: engine={theirs!r:.20} ({version!r:.40}) daemon={PROTOCOL} ({__version__!r}): upgrade "
        f"kvprefetch in the {older}'s environment and restart the {older}; until then this engine is served nothing"
    )


def first_error(error: ValidationError) -> str:
    """The first problem of a failed validation in one line: key, bound, value."""
    item = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in item["loc"]) or "value"
    text = str(item["ctx"]["error"]) if item["type"] == "value_error" else item["msg"]
    message = text[0].lower() + text[1:]
    if item["type"] == "missing":
        return f"{key}: {message}"
    return f"{key}: {message}: {key}={shown(item['input'])}"


def shown(value: object) -> str:
    """How a bad value stands in an error: as Python writes it, and no longer than anyone reads."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean …?" when one of the known words is near, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def send_message(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one packet with its descriptors."""
    data = encode_message(message)
    if fds:
        socket.send_fds(sock, [data], list(fds))
    else:
        sock.send(data)


def receive_message(sock: socket.socket, max_fds: int = 2) -> tuple[Message, list[int]] | None:
    """Block for one packet; None at the end of file. The caller owns the descriptors. Raises ProtocolError, OSError."""
    data, fds, flags, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, max_fds, socket.MSG_CMSG_CLOEXEC)
    try:
        if not data:
            for fd in fds:  # an empty packet reads like the end, and may carry descriptors
                socket.close(fd)
            return None
        if flags & socket.MSG_CTRUNC and len(fds) < max_fds:
            raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)} (ulimit -n), for what came with a message")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError(f"control message is too large: max_bytes={MAX_MESSAGE_BYTES} max_fds={max_fds}")
        return decode_message(data), fds
    except (ProtocolError, OSError):
        for fd in fds:
            socket.close(fd)
        raise
