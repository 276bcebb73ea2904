"""Prompts announced through the daemon's HTTP door (docs/HINTS.md), and what becomes of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvprefetch.daemon.config.model import door_socket
from kvprefetch.daemon.door.envelope import Answer, Answered
from kvprefetch.shmring.wire.checks import ACTION, ACTION_VERSION, ENVELOPE_VERSION, first_error

from .control import Busy, Unavailable

WAIT_S = 10.0  # in one question what became of a message
PAUSE_S = 0.2  # between questions: the door answers at once where too many callers wait


class Door:
    """HTTP requests over the door's Unix socket, beside the control socket."""

    def __init__(self, control: Path, timeout_s: float = 30.0) -> None:
        self._path, self._timeout_s = door_socket(control), timeout_s

    def ask(self, method: str, path: str, body: object = None, *, wait_s: float = 0.0) -> tuple[int, dict[str, Any]]:
        """Return status and answer, `wait_s` later than usual. Raises Unavailable where nobody listens."""
        connection = http.client.HTTPConnection("localhost", timeout=self._timeout_s + wait_s)
        where = f"socket={str(self._path)!r}"
        try:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(connection.timeout)
            connection.sock.connect(str(self._path))
            text = None if body is None else json.dumps(body)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer may be there already
                connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except OSError as error:
            advice = "start the daemon, or name its control socket"
            raise Unavailable(f"no door answers: {where}: {error.strerror or error}", advice) from None
        except (ValueError, http.client.HTTPException) as error:
            raise Unavailable(f"the door answered with something else: {where}: {error}") from None
        finally:
            connection.close()


class Announced:
    """The prompts of one message. `outcomes`: of each, in their order, as of the last question."""

    def __init__(self, door: Door, payloads: Sequence[Mapping[str, Any]]) -> None:
        self._door, self.message_id = door, uuid.uuid4().hex
        common = {"action_type": ACTION, "action_version": ACTION_VERSION}
        actions = [{"action_id": str(i), **common, "payload": payload} for i, payload in enumerate(payloads)]
        message = {"protocol_version": ENVELOPE_VERSION, "message_id": self.message_id, "actions": actions}
        self.outcomes = _outcomes(*door.ask("POST", "/v1/kv_hints", message))

    @property
    def done(self) -> bool:
        """Whether each prompt is staged as far as it came, or nothing comes of it."""
        return all(each.done for each in self.outcomes)

    def wait(self, timeout_s: float = math.inf) -> list[Answered]:
        """Ask until all is done, or for so long, at least once. Return the outcomes. Raises Unavailable."""
        until, pause_s = time.monotonic() + timeout_s, 0.0
        while True:
            time.sleep(pause_s)
            wait_s = max(0.0, min(WAIT_S, until - time.monotonic()))
            path = f"/v1/kv_hints/{self.message_id}?wait_ms={round(wait_s * 1e3)}"
            self.outcomes = _outcomes(*self._door.ask("GET", path, wait_s=wait_s))
            if self.done or (left_s := until - time.monotonic()) <= 0:
                return self.outcomes
            pause_s = min(PAUSE_S, left_s)


def _outcomes(status: int, answer: Mapping[str, Any]) -> list[Answered]:
    """Return what became of the prompts until now. Raises Unavailable."""
    if "actions" not in answer:
        kind = Busy if status == HTTPStatus.TOO_MANY_REQUESTS else Unavailable
        raise kind(str(answer.get("error", answer)))
    try:
        return Answer.model_validate(answer).actions
    except ValidationError as error:  # a daemon of another release
        raise Unavailable(f"the door answered with something else: {first_error(error, Answer)}") from None
