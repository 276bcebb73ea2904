"""How control messages are encoded and sent: JSON, one message in each SOCK_SEQPACKET packet, descriptors beside it."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from kvprefetch import __version__

from . import admin, attach
from .checks import first_error
from .records import PROTOCOL, ProtocolError

MAX_MESSAGE_BYTES = 1 << 16

FromEngine = attach.Hello | attach.Mapped | attach.Reset
ToEngine = attach.Refused | attach.Attached | attach.ResetDone | attach.Stored | attach.Absent | attach.Notice
Order = admin.SetMode | admin.Reload | admin.Remove
Query = admin.StatusQuery | admin.StatQuery | admin.WhyQuery | Order | admin.EngineQuery | admin.Announce
Reply = admin.Status | admin.Segments | admin.Removed | admin.Engine | admin.AnnounceStep | admin.Report
Message = FromEngine | ToEngine | Query | Reply
_MESSAGES: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def encode_message(message: Message) -> bytes:
    return message.model_dump_json(exclude_none=True).encode()


def decode_message(data: bytes) -> Message:
    """Parse one control message. Raises ProtocolError with field, value and bound; a foreign protocol comes first."""
    try:
        raw = json.loads(data)
        json.dumps(raw, ensure_ascii=False).encode()  # a lone surrogate would fail later, in a log or a metric label
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"control message is not JSON: {error}") from None
    if isinstance(raw, dict) and raw.get("type") == "hello" and raw.get("protocol") != PROTOCOL:
        raise ProtocolError(_skew(raw.get("protocol"), raw.get("version")))
    try:
        return _MESSAGES.validate_python(raw)
    except ValidationError as error:
        raise ProtocolError(first_error(error)) from None


def _skew(theirs: object, version: object) -> str:
    """Return one line for both logs: the protocols of the engine and of this daemon, and which of them to upgrade."""
    older = "engine" if isinstance(theirs, int) and theirs < PROTOCOL else "daemon"
    return (
        f"protocol differs: engine={theirs!r:.20} ({version!r:.40}) daemon={PROTOCOL} ({__version__!r}): upgrade "
        f"kvprefetch in the {older}'s environment and restart the {older}; until then this engine is served nothing"
    )


def send_message(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    socket.send_fds(sock, [encode_message(message)], list(fds))


def receive_message(sock: socket.socket, max_fds: int = 2) -> tuple[Message, list[int]] | None:
    """Wait for one packet; None at the end of file. The caller owns the descriptors. Raises ProtocolError, OSError."""
    data, fds, flags, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, max_fds, socket.MSG_CMSG_CLOEXEC)
    with ExitStack() as undo:
        for fd in fds:
            undo.callback(socket.close, fd)
        if not data:  # an empty packet, which may carry descriptors, reads like the end
            return None
        if flags & socket.MSG_CTRUNC and len(fds) < max_fds:
            raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)} (ulimit -n), for what came with a message")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError(f"control message is too large: max_bytes={MAX_MESSAGE_BYTES} max_fds={max_fds}")
        message = decode_message(data)
        undo.pop_all()
        return message, fds
