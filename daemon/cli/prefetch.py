"""`kvprefetchd prefetch FILE`: announce prompts to an engine through the HTTP door, and wait for their blocks."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

import click

from ..config.model import hints_socket
from ..door.envelope import ACTION, MAX_ACTIONS, VERSION
from .client import EX_UNAVAILABLE, Unavailable
from .common import Arguments, SocketPage, declare, flag, option, socket_option
from .help_page import Group
from .prompts import Listed, read

PAGE = SocketPage(
    "stage the blocks of prompts before anybody asks for them",
    details="FILE has one JSON value per line: a list of a prompt's token ids, or of block hashes in hex, in the order "
    'of their prefix; or {"token_ids": […], "cache_salt": "…"}, {"block_hashes": […]}, with the other fields of '
    "kv.prefetch (docs/HINTS.md). The daemon fetches these blocks only while no request waits for one, into room that "
    "no request holds; the next request finds them, until others need the room. Root and the daemon's own user may "
    "name any engine, others their own. `warm` is another name of this command.",
    arguments={"FILE": "the list; - for standard input"},
    examples=(
        ("kvprefetchd prefetch system-prompts.jsonl", "before the first users come"),
        ("kvprefetchd prefetch - --engine ENGINE_ID < list.jsonl", "for one engine of several"),
    ),
    exits={
        0: "all of it that the store has is staged",
        1: "part of it is not: no room, or it could not be fetched",
        65: "a line was bad; it is named, and the good ones were done",
        69: "no daemon or no such engine, or it refused, or FILE cannot be read; one line says which",
        130: "interrupted; the output counts what was staged until then",
    },
    also="docs/HINTS.md, kvprefetchd store",
)
EX_DATA, EX_INTERRUPTED = 65, 130
AT_ONCE_BYTES = 4 << 20  # of the lines of one message
WAIT_MS = 10_000  # in one question what became of a message
SHOWN = 5  # bad lines that are named
PROGRESS_S = 0.2
PAUSE_S = 1.0  # after more prompts than the door takes in a second


def add(commands: Group) -> None:
    file = click.Argument(["file"], type=click.Path(allow_dash=True))
    engine = option("--engine", metavar="ID", default="", help="its id, or the start (default: the only one attached)")
    ttl = option(
        "--ttl", metavar="S", default=600, type=click.IntRange(1, 3600), help="seconds for which the room is theirs"
    )
    json_flag = flag("--json", "print the result as JSON")
    declare(commands, "prefetch", run, PAGE, file, engine, ttl, json_flag, socket_option())


def run(arguments: Arguments) -> int:
    sender = Sender(Door(arguments.socket), arguments.engine, arguments.ttl * 1000, progress=sys.stderr.isatty())
    try:
        with opened(arguments.file) as file:
            for line in read(file):
                sender.add(line)
            sender.flush()
    except KeyboardInterrupt:
        return EX_INTERRUPTED
    finally:
        sender.clear_progress()
        for kind, lines in (("bad", sender.bad), ("refused", sender.refused)):
            for number, error in lines[:SHOWN]:
                print(f"kvprefetchd: {arguments.file}: line {number}: {error}", file=sys.stderr)
            if len(lines) > SHOWN:
                print(f"kvprefetchd: {arguments.file}: {len(lines) - SHOWN} more {kind} lines", file=sys.stderr)
        print(as_json(sender) if arguments.json else described(sender))
    if sender.bad or sender.refused:
        return EX_DATA if sender.bad else EX_UNAVAILABLE
    return 1 if sender.counts["no_room"] or sender.counts["failed"] else 0


class Door:
    """HTTP requests over the door's Unix socket. Raises Unavailable where nobody listens there."""

    def __init__(self, control: Path) -> None:
        self._path = hints_socket(control)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Return status and answer."""
        connection = http.client.HTTPConnection("localhost", timeout=WAIT_MS / 1e3 + 20)
        where = f"socket={str(self._path)!r}"
        try:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(connection.timeout)
            connection.sock.connect(str(self._path))
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except OSError as error:
            advice = "start the daemon, or name its control socket with --socket"
            raise Unavailable(f"no door answers: {where}: {error.strerror or error}", advice) from None
        except (ValueError, http.client.HTTPException) as error:
            raise Unavailable(f"the door answered with something else: {where}: {error}") from None
        finally:
            connection.close()


class Sender:
    """Announces lines in messages of bounded size, each after the end of the one before. Raises Unavailable."""

    def __init__(self, door: Door, engine: str, ttl_ms: int, *, progress: bool) -> None:
        self._door, self._common, self._progress = door, {"engine": engine, "ttl_ms": ttl_ms}, progress
        self._lines: list[Listed] = []
        self._bytes, self._shown_s = 0, 0.0
        self.lines, self.engine = 0, ""
        self.bad: list[tuple[int, str]] = []
        self.refused: list[tuple[int, str]] = []
        self.counts: Counter[str] = Counter()

    def add(self, line: Listed) -> None:
        """Add a line, which may be a bad one."""
        self.lines += 1
        if line.error:
            self.bad.append((line.number, line.error))
            return
        self._lines.append(line)
        self._bytes += line.size
        if len(self._lines) == MAX_ACTIONS or self._bytes > AT_ONCE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Announce the collected lines, and wait until their blocks are staged."""
        lines, self._lines, self._bytes = self._lines, [], 0
        if not lines:
            return
        common = {"action_type": ACTION, "action_version": VERSION}
        actions = [
            {"action_id": str(each.number), **common, "payload": {**each.payload, **self._common}} for each in lines
        ]
        message_id = uuid.uuid4().hex
        envelope = {"protocol_version": "0.1", "message_id": message_id, "actions": actions}
        while (asked := self._door.ask("POST", "/v1/kv_hints", envelope))[0] == HTTPStatus.TOO_MANY_REQUESTS:
            time.sleep(PAUSE_S)
        answers, pause_s = _actions(*asked), 0.0
        while any(each["outcome"] in ("deferred", "accepted", "clipped") for each in answers):
            time.sleep(pause_s)
            pause_s = PROGRESS_S  # the door answers at once where too many callers wait
            answers = _actions(*self._door.ask("GET", f"/v1/kv_hints/{message_id}?wait_ms={WAIT_MS}"))
        for each in answers:
            self.engine = each["engine"] or self.engine
            if each["outcome"] == "rejected":
                self.refused.append((int(each["action_id"]), each["reason"]))
            blocks = Counter(each["blocks"])
            self.counts.update(blocks)
            if each["outcome"] == "completed":  # what was clipped had no room
                self.counts["no_room"] += blocks["asked"] - blocks["staged"] - blocks["started"] - blocks["missing"]
        self._show()

    def clear_progress(self) -> None:
        if self._shown_s:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _show(self) -> None:
        if self._progress and time.monotonic() - self._shown_s > PROGRESS_S:
            self._shown_s = time.monotonic()
            sys.stderr.write(f"\r\x1b[K{counted(self.counts)}")
            sys.stderr.flush()


def _actions(_: int, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what became of the actions until now. Raises Unavailable."""
    if "actions" not in answer:
        raise Unavailable(str(answer.get("error", answer)))
    found: list[dict[str, Any]] = answer["actions"]
    return found


def described(sender: Sender) -> str:
    bad = f", {len(sender.bad)} bad" if sender.bad else ""
    bad += f", {len(sender.refused)} refused" if sender.refused else ""
    return f"engine {sender.engine or '-'}: {sender.lines} lines{bad}; {counted(sender.counts)}"


def counted(counts: Counter[str]) -> str:
    failed = f", {counts['failed']} could not be fetched" if counts["failed"] else ""
    return (
        f"{counts['asked']} blocks: {counts['staged'] + counts['started']} found ({counts['staged']} staged already, "
        f"{counts['fetched']} fetched, {counts['no_room']} without room{failed}), {counts['missing']} not in the store"
    )


def as_json(sender: Sender) -> str:
    names = ("asked", "staged", "fetched", "no_room", "failed", "missing")
    counts = {name: sender.counts[name] for name in names}
    return json.dumps({"engine": sender.engine, "lines": sender.lines, "bad_lines": len(sender.bad), **counts})


@contextlib.contextmanager
def opened(name: str) -> Iterator[IO[bytes]]:
    """Open the file, or standard input for `-`. Raises Unavailable, also when it cannot be read to its end."""
    try:
        if name == "-":
            yield sys.stdin.buffer
        else:
            with Path(name).open("rb") as file:
                yield file
    except OSError as error:
        raise Unavailable(f"{name} cannot be read: {error.strerror or error}") from None
