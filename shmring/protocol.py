"""What engine and daemon say to each other: hint-ring records, the meaning of flag states, control messages.

Both sides import this module; the rest of shmring does not (it knows nothing of KV).  `PROTOCOL` changes whenever a
record, a state or a message does; two sides of different protocol refuse each other in the handshake.

Flag states and who may make each transition (always a compare-and-swap, always carrying the generation):

    engine   FREE -> HINTED                          a hint is about to be pushed
    daemon   HINTED,k -> HINTED,k'   -> READY,n      blocks [local_blocks, k') staged; READY: no more will come
    engine   HINTED | READY -> CLAIMED,n             the engine answers n blocks (n <= count); they are its
    engine   CLAIMED -> READY                        the answer was not used in this pass
    engine   CLAIMED -> RELEASED                     every rank copied the blocks (or none ever will)
    engine   HINTED | READY -> CANCELLED             the request does not want them any more
    daemon   HINTED | READY -> EXPIRED               revoked: room was needed, or a deadline passed, or a reset
    engine   EXPIRED -> FREE                         seen
    engine   HINTED -> FREE                          the ring was full: the hint was never pushed
    daemon   RELEASED | CANCELLED -> FREE            unpinned
"""

from __future__ import annotations

import enum
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

PROTOCOL = 2
MAX_MESSAGE_BYTES = 1 << 16
MAX_REQUEST_ID_BYTES = 512


class ProtocolError(Exception):
    """A record or message that does not follow the protocol; the text names field, value and bound."""


def default_socket(environ: Mapping[str, str] = os.environ) -> str:
    """Where daemon and engines meet: $RUNTIME_DIRECTORY (systemd), $XDG_RUNTIME_DIR/kvprefetch or /run/kvprefetch."""
    if runtime := environ.get("RUNTIME_DIRECTORY"):
        return os.path.join(runtime.split(":")[0], "kvprefetchd.sock")
    if session := environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(session, "kvprefetch", "kvprefetchd.sock")
    return "/run/kvprefetch/kvprefetchd.sock"


class FlagState(enum.IntEnum):
    """States of a completion flag; the transitions stand in the module's docstring."""

    FREE = 0
    HINTED = 1
    READY = 2
    CLAIMED = 3
    RELEASED = 4
    CANCELLED = 5
    EXPIRED = 6


class RecordKind(enum.IntEnum):
    """Kinds of hint-ring records."""

    HINT = 1
    ASK = 2
    DONE = 3
    SAVED = 4


class Outcome(enum.IntEnum):
    """How a hinted request ended for the engine (DONE records, `request.done` log lines).

    LATE: nothing was ready at the bound of its wait; RECOMPUTED: nothing was ready, and recomputing was sooner.
    """

    LOADED = 0
    MISS = 1
    LATE = 2
    ABORTED = 3
    UNUSED = 4
    EVICTED = 5
    LOST = 6
    RECOMPUTED = 7


# version, groups, hash bytes, request-id bytes, flag, blocks, local blocks, priority, prompt tokens, generation,
# arrival ns
_HINT = struct.Struct("<BBHHxxIIIiIQQ")
_ASK = struct.Struct("<BxxxIQQ")
_DONE = struct.Struct("<BBxxIIIQQQQ")
# version, groups, hash bytes, dropped, blocks, reset generation, save id
_SAVED = struct.Struct("<BBHBxxxIxxxxQQ")


class Hint(NamedTuple):
    """A request arrived: `hashes` holds `blocks` raw digests of `hash_bytes`, one per block_size chunk, in order.

    Blocks [0, local_blocks) were in the engine's own prefix cache; times are CLOCK_MONOTONIC nanoseconds.
    """

    flag: int
    generation: int
    request_id: str
    blocks: int
    local_blocks: int
    priority: int
    prompt_tokens: int
    arrival_ns: int
    hash_bytes: int
    hashes: memoryview

    def digest(self, block: int) -> bytes:
        start = block * self.hash_bytes
        return bytes(self.hashes[start : start + self.hash_bytes])


class Ask(NamedTuple):
    """The scheduler reached the request and found it pending."""

    flag: int
    generation: int
    asked_ns: int


class Done(NamedTuple):
    """The engine is done with a flag (now RELEASED or CANCELLED): a nudge, and the engine's half of the timeline.

    `loaded_blocks` were taken from staging; times are 0 where the event did not happen.
    """

    flag: int
    generation: int
    outcome: Outcome
    loaded_blocks: int
    asked_ns: int
    claimed_ns: int
    loaded_ns: int


class Saved(NamedTuple):
    """Every rank copied these blocks into their save slots; with `dropped` none did, and the slots come back."""

    save_id: int
    reset_generation: int
    dropped: bool
    slots: list[int]
    hashes: list[bytes]


def encode_hint(hint: Hint, *, groups: int = 1) -> tuple[bytes, bytes, memoryview]:
    """The parts of a HINT record, in order; the hashes are not copied."""
    request_id = hint.request_id.encode(errors="replace")[:MAX_REQUEST_ID_BYTES]
    head = _HINT.pack(
        PROTOCOL, groups, hint.hash_bytes, len(request_id), hint.flag, hint.blocks, hint.local_blocks,
        max(-(1 << 31), min((1 << 31) - 1, hint.priority)), hint.prompt_tokens, hint.generation, hint.arrival_ns,
    )  # fmt: skip
    return head, request_id, hint.hashes


def decode_hint(payload: memoryview) -> Hint:
    """Parse a HINT record; `hashes` is a view into it. Raises ProtocolError."""
    version, groups, hash_bytes, id_bytes, flag, blocks, local, priority, tokens, generation, arrival = _unpack(
        _HINT, payload
    )
    _check_version(version, groups)
    wanted = _HINT.size + id_bytes + blocks * hash_bytes
    if not 1 <= hash_bytes <= 64 or len(payload) != wanted or id_bytes > MAX_REQUEST_ID_BYTES:
        raise ProtocolError(f"hint size differs: bytes={len(payload)} expected={wanted} hash_bytes={hash_bytes}")
    if local > blocks or blocks == 0:
        raise ProtocolError(f"local_blocks out of bounds: local_blocks={local} blocks={blocks}")
    name = bytes(payload[_HINT.size : _HINT.size + id_bytes]).decode(errors="replace")
    hashes = payload[_HINT.size + id_bytes :]
    return Hint(flag, generation, name, blocks, local, priority, tokens, arrival, hash_bytes, hashes)


def encode_ask(ask: Ask) -> bytes:
    return _ASK.pack(PROTOCOL, ask.flag, ask.generation, ask.asked_ns)


def decode_ask(payload: memoryview) -> Ask:
    version, flag, generation, asked = _unpack(_ASK, payload)
    _check_version(version, 1)
    return Ask(flag, generation, asked)


def encode_done(done: Done) -> bytes:
    return _DONE.pack(
        PROTOCOL, done.outcome, done.flag, done.loaded_blocks, 0, done.generation, done.asked_ns, done.claimed_ns,
        done.loaded_ns,
    )  # fmt: skip


def decode_done(payload: memoryview) -> Done:
    version, outcome, flag, blocks, _, generation, asked, claimed, loaded = _unpack(_DONE, payload)
    _check_version(version, 1)
    try:
        return Done(flag, generation, Outcome(outcome), blocks, asked, claimed, loaded)
    except ValueError:
        raise ProtocolError(f"unknown outcome: outcome={outcome}") from None


def encode_saved(saved: Saved, *, groups: int = 1) -> bytes:
    hash_bytes = len(saved.hashes[0]) if saved.hashes else 0
    head = _SAVED.pack(
        PROTOCOL, groups, hash_bytes, saved.dropped, len(saved.slots), saved.reset_generation, saved.save_id
    )
    return b"".join((head, struct.pack(f"<{len(saved.slots)}I", *saved.slots), *saved.hashes))


def decode_saved(payload: memoryview) -> Saved:
    version, groups, hash_bytes, dropped, blocks, reset_generation, save_id = _unpack(_SAVED, payload)
    _check_version(version, groups)
    wanted = _SAVED.size + blocks * 4 + (0 if dropped else blocks * hash_bytes)
    if len(payload) != wanted or hash_bytes > 64 or (not dropped and hash_bytes == 0):
        raise ProtocolError(f"saved size differs: bytes={len(payload)} expected={wanted} hash_bytes={hash_bytes}")
    slots = list(struct.unpack_from(f"<{blocks}I", payload, _SAVED.size))
    hashes: list[bytes] = []
    if not dropped:
        base = _SAVED.size + blocks * 4
        hashes = [bytes(payload[base + i * hash_bytes : base + (i + 1) * hash_bytes]) for i in range(blocks)]
    return Saved(save_id, reset_generation, bool(dropped), slots, hashes)


def _unpack(record: struct.Struct, payload: memoryview) -> tuple[Any, ...]:
    if len(payload) < record.size:
        raise ProtocolError(f"record too short: bytes={len(payload)} min={record.size}")
    return record.unpack_from(payload, 0)


def _check_version(version: int, groups: int) -> None:
    if version != PROTOCOL:
        raise ProtocolError(f"record protocol differs: protocol={version} expected={PROTOCOL}")
    if groups != 1:
        raise ProtocolError(f"only one KV-cache group is served: groups={groups} max=1")


# --- control messages: JSON, one message per SOCK_SEQPACKET packet, descriptors beside it (SCM_RIGHTS) ---------------


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class WorkerShape(_Message):
    """One rank's share of a block and where its objects live in the store (vllm-compatible keys)."""

    block_bytes: list[Annotated[int, Field(ge=1, le=1 << 32)]] = Field(min_length=1, max_length=16)
    key_prefix: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(min_length=1, max_length=16)
    # Of `put_factor` ranks that hold the same shard, this one puts the chunks i with i % put_factor == put_turn.
    put_factor: int = Field(ge=1, le=4096)
    put_turn: int = Field(ge=0, le=4095)


class SchedulerShape(_Message):
    """What the scheduler side wants of its control segment."""

    max_blocks: int = Field(ge=1, le=(1 << 20) - 1)
    max_hint_bytes: int = Field(ge=1, le=1 << 28)
    loads: bool
    saves: bool
    # Wants to be told by Stored messages what became of its saves.
    events: bool = False


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
    """The daemon will not serve this process, in one line. `final`: asking again changes nothing."""

    type: Literal["refused"] = "refused"
    error: str
    final: bool


class Attached(_Message):
    """All processes said hello. Descriptors: scheduler (control segment, doorbell), worker (staging segment)."""

    type: Literal["attached"] = "attached"
    epoch: int = Field(ge=1, le=(1 << 63) - 1)
    segment_bytes: int = Field(ge=1)
    slot_count: int = Field(ge=1, le=(1 << 32) - 1)
    slot_bytes: int = Field(ge=0)


class Mapped(_Message):
    """The process mapped what it was handed; when all did, the daemon becomes ACTIVE in the control segment."""

    type: Literal["mapped"] = "mapped"
    epoch: int = Field(ge=1)


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


class StatusQuery(_Message):
    """Anyone who may attach asks what the daemon holds; needs no hello."""

    type: Literal["status_query"] = "status_query"


class StatQuery(_Message):
    """Anyone who may attach asks for a look at the control segments; the answer is Segments with their descriptors."""

    type: Literal["stat_query"] = "stat_query"


class Segments(_Message):
    """Names of the attached engines; beside it, in this order, a read-only descriptor of each one's control segment."""

    type: Literal["segments"] = "segments"
    engines: list[str]


class SlowRequest(_Message):
    """One of the requests that ended lately and for which the scheduler waited longest."""

    request_id: str
    engine: str
    outcome: str
    exposed_ms: float
    fetched_bytes: int
    ago_s: float


class Status(_Message):
    """The daemon's engines (the first 32 of `engine_count`), each with its gauges and counters.

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
    engines: list[dict[str, int | str]]
    engine_count: int = 0
    uptime_s: float = 0.0
    calls: dict[str, float] = Field(default_factory=dict)
    slowest: list[SlowRequest] = Field(default_factory=list)


class SetMode(_Message):
    """An operator (root or the daemon's user) switches what the daemon does for every engine; answered by Report."""

    type: Literal["set_mode"] = "set_mode"
    mode: Literal["on", "shadow", "off"]


class Purge(_Message):
    """An operator removes every stored value of these namespaces; answered by Report.

    A namespace is what stands before a block's hash in its keys: `prefixes`, or those of an attached engine's ranks.
    """

    type: Literal["purge"] = "purge"
    engine: str = Field(default="", max_length=256)
    prefixes: list[Annotated[str, Field(min_length=1, max_length=1024)]] = Field(default_factory=list, max_length=64)
    timeout_ms: int = Field(ge=1, le=600_000)


class Report(_Message):
    """What became of an operator's order: whether it was done, and one line that says so."""

    type: Literal["report"] = "report"
    ok: bool
    text: str


Message = (
    Hello | Refused | Attached | Mapped | Reset | ResetDone | Stored | StatusQuery | Status | StatQuery | Segments
    | SetMode | Purge | Report
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
        raise ProtocolError(f"protocol differs: protocol={raw.get('protocol')!r} expected={PROTOCOL}")
    try:
        return _MESSAGES.validate_python(raw)
    except ValidationError as error:
        raise ProtocolError(first_error(error)) from None


def first_error(error: ValidationError) -> str:
    """The first problem of a failed validation in one line: key, bound, value."""
    item = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in item["loc"]) or "value"
    message = item["msg"][0].lower() + item["msg"][1:]
    if item["type"] == "missing":
        return f"{key}: {message}"
    return f"{key}: {message}: {key}={item['input']!r}"


def send_message(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one packet with its descriptors."""
    data = encode_message(message)
    if fds:
        socket.send_fds(sock, [data], list(fds))
    else:
        sock.send(data)


def receive_message(sock: socket.socket, max_fds: int = 2) -> tuple[Message, list[int]] | None:
    """Block for one packet; None at the end of file. The caller owns the descriptors. Raises ProtocolError."""
    data, fds, flags, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, max_fds, socket.MSG_CMSG_CLOEXEC)
    try:
        if not data:
            for fd in fds:  # an empty packet reads like the end, and may carry descriptors
                socket.close(fd)
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError(f"control message is too large: max_bytes={MAX_MESSAGE_BYTES} max_fds={max_fds}")
        return decode_message(data), fds
    except ProtocolError:
        for fd in fds:
            socket.close(fd)
        raise
