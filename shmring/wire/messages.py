"""The control socket between engine and daemon: where it is, its messages, and how they are encoded and sent.

JSON, one message per SOCK_SEQPACKET packet, descriptors beside it (SCM_RIGHTS).  admin.py has what operators say.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ... import __version__
from . import admin
from .fields import Fingerprint, KeyPrefix, Packet
from .records import PROTOCOL, ProtocolError

MAX_MESSAGE_BYTES = 1 << 16
HASH_PROBE_TOKENS = (1, 2, 3)  # see SchedulerInfo.hash_probe
MAX_SOCKET_PATH_BYTES = 107  # sun_path has 108, one of them the final zero
SHOWN_CHARACTERS = 120  # of a bad value, in the line that names it
_CREDENTIALS = struct.Struct("iII")  # struct ucred of unix(7)
# A CUDA IPC memory handle: 64 bytes in hexadecimal digits, or none.
Handle = Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")]


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


Message = (
    Hello | Refused | Attached | Mapped | Reset | ResetDone | Stored | Notice | admin.StatusQuery | admin.Status
    | admin.StatQuery | admin.Segments | admin.NamespacesQuery | admin.KnownNamespaces | admin.SetMode | admin.Purge
    | admin.Warm | admin.Warmed | admin.Report
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


def peer_of(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group id of the other side: of a connection when it was made, of its listener's when bound."""
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


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
