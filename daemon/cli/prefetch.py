"""`kvprefetchd prefetch FILE`: announce prompts to an engine through the HTTP door, and wait for their blocks."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import click

from kvprefetch.client import Announced, Busy, Client, Prompt, Unavailable

from ...shmring.wire.checks import ACTION, ACTION_VERSION
from ..door.envelope import MAX_ACTIONS, Action, Bad, payload
from ..telemetry.pretty import fitting
from .common import EX_UNAVAILABLE, Arguments, SocketPage, declare, flag, option, show, socket_option
from .help_page import CommandGroup

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
MAX_LINE_BYTES = 8 << 20
AT_ONCE_BYTES = 4 << 20  # of the lines of one message
FORMER = {"hashes": "block_hashes", "prompt_token_ids": "token_ids"}  # names of earlier releases
FORMER_KEYS = {"blocks": "announced", "absent": "missing"}  # of --json in the release before, printed for one longer
SHOWN = 5  # bad lines that are named
PROGRESS_S = 0.2
ANSWER_S = 30.0  # the door hashes all prompts of a message first
PAUSE_S = 1.0  # after more prompts than the door takes in a second


def add(commands: CommandGroup) -> None:
    file = click.Argument(["file"], type=click.Path(allow_dash=True))
    engine = option("--engine", metavar="ID", default="", help="its id, or the start (default: the only one attached)")
    ttl = option(
        "--ttl", metavar="S", default=600, type=click.IntRange(1, 3600), help="seconds for which the room is theirs"
    )
    json_flag = flag("--json", "print the result as JSON")
    declare(commands, "prefetch", run, PAGE, file, engine, ttl, json_flag, socket_option())


def run(arguments: Arguments) -> int:
    client = Client(arguments.socket, timeout_s=ANSWER_S)
    sender = Sender(client, arguments.engine, arguments.ttl * 1000, progress=sys.stderr.isatty())
    try:
        with opened(arguments.file) as file:
            for number, line in lines(file):
                sender.add(number, line)
            sender.flush()
    except KeyboardInterrupt:
        return _ended(sender, arguments, EX_INTERRUPTED)
    except Unavailable as error:
        _ended(sender, arguments, EX_UNAVAILABLE, str(error))
        raise
    if sender.bad or sender.refused:
        return _ended(sender, arguments, EX_DATA if sender.bad else EX_UNAVAILABLE)
    return _ended(sender, arguments, 1 if sender.counts["no_room"] or sender.counts["failed"] else 0)


def _ended(sender: Sender, arguments: Arguments, status: int, *why: str) -> int:
    """Name bad lines, print the result, and return the exit status. `why` it ends is said by others on a terminal."""
    sender.clear_progress()
    problems = [f"{arguments.file}: line {number}: {error}" for number, error in (*sender.bad, *sender.refused)]
    for line in problems[:SHOWN]:
        print(f"kvprefetchd: {fitting(line)}", file=sys.stderr)
    if len(problems) > SHOWN:
        print(f"kvprefetchd: {arguments.file}: {len(problems) - SHOWN} more lines", file=sys.stderr)
    if arguments.json:
        names = ("announced", "staged", "fetched", "no_room", "failed", "missing")
        counts = {name: sender.counts[FORMER_KEYS.get(name, name)] for name in (*names, *FORMER_KEYS)}
        numbers = {"engine": sender.engine, "lines": sender.lines, "bad_lines": len(sender.bad), **counts}
        show(numbers, ok=status == 0, problems=[*problems, *why])
    else:
        print(described(sender))
    return status


class Sender:
    """Announces lines in messages of bounded size, each after the end of the one before. Raises Unavailable."""

    def __init__(self, client: Client, engine: str, ttl_ms: int, *, progress: bool) -> None:
        self._client, self._engine, self._ttl_ms, self._progress = client, engine, ttl_ms, progress
        self._waiting: list[tuple[int, Prompt]] = []  # with the number of its line
        self._bytes, self._shown_s = 0, 0.0
        self.lines, self.engine = 0, ""
        self.bad: list[tuple[int, str]] = []
        self.refused: list[tuple[int, str]] = []
        self.counts: Counter[str] = Counter()

    def add(self, number: int, line: bytes) -> None:
        """Add a line, which may be a bad one."""
        self.lines += 1
        try:
            self._waiting.append((number, parse(line)))
        except ValueError as error:
            self.bad.append((number, str(error)))
            return
        self._bytes += len(line)
        if len(self._waiting) == MAX_ACTIONS or self._bytes > AT_ONCE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Announce the collected lines, and wait until their blocks are staged."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if not waiting:
            return
        numbers, prompts = zip(*waiting, strict=True)
        for number, each in zip(numbers, self._announced(prompts).wait(), strict=True):
            self.engine = each.engine or self.engine
            if each.outcome == "rejected":
                self.refused.append((number, each.reason))
            blocks = each.blocks.model_dump()
            self.counts.update(blocks)
            if each.outcome not in ("rejected", "missing"):  # what was clipped had no room, and others may end early
                looked_up = blocks["staged"] + blocks["started"] + blocks["missing"]
                self.counts["no_room" if looked_up else "failed"] += blocks["announced"] - looked_up
                self.counts["failed"] += blocks["started"] - blocks["fetched"] - blocks["no_room"] - blocks["failed"]
        self._show()

    def _announced(self, prompts: Sequence[Prompt]) -> Announced:
        while True:
            try:
                return self._client.prefetch(prompts, engine=self._engine, ttl_ms=self._ttl_ms)
            except Busy:
                time.sleep(PAUSE_S)

    def clear_progress(self) -> None:
        if self._shown_s:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _show(self) -> None:
        if self._progress and time.monotonic() - self._shown_s > PROGRESS_S:
            self._shown_s = time.monotonic()
            sys.stderr.write(f"\r\x1b[K{counted(self.counts)}")
            sys.stderr.flush()


def described(sender: Sender) -> str:
    bad = f", {len(sender.bad)} bad" if sender.bad else ""
    bad += f", {len(sender.refused)} refused" if sender.refused else ""
    return f"engine {sender.engine or '-'}: {sender.lines} lines{bad}; {counted(sender.counts)}"


def counted(counts: Counter[str]) -> str:
    failed = f", {counts['failed']} could not be fetched" if counts["failed"] else ""
    return (
        f"{counts['announced']} blocks: {counts['staged'] + counts['started']} found ({counts['staged']} staged "
        f"already, {counts['fetched']} fetched, {counts['no_room']} without room{failed}), {counts['missing']} not in "
        "the store"
    )


def parse(line: bytes) -> Prompt:
    """Parse one line. Raises ValueError in one line, with field, value and bound."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"too long: max_bytes={MAX_LINE_BYTES}")
    try:
        raw: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if isinstance(raw, list):  # short for the object with one field
        raw = {"block_hashes" if any(isinstance(each, str) for each in raw) else "token_ids": raw}
    if not isinstance(raw, dict):
        raise ValueError("a list or an object is wanted")
    found: dict[str, Any] = {FORMER.get(str(name), str(name)): value for name, value in raw.items()}
    try:
        return payload(Action(action_id="line", action_type=ACTION, action_version=ACTION_VERSION, payload=found))
    except Bad as error:
        raise ValueError(str(error).removeprefix("action line: ")) from None


def lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield number and text of each line that is not empty; of one that is too long only the beginning, too long as
    well."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number, rest = number + 1, line
        while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
            pass
        if line.strip():
            yield number, line


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
