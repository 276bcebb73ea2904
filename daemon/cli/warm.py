"""`kvprefetchd warm FILE`: stage an attached engine's blocks before anybody asks for them."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click

from ...shmring.wire.admin import MAX_WARM_DIGESTS, Warm, Warmed
from .client import Conversation, Unavailable
from .common import Arguments, SocketPage, declare, flag, option, socket_option
from .help_page import Group
from .prompts import hashed, read

PAGE = SocketPage(
    "stage the blocks that a file lists before anybody asks for them",
    details="FILE has one JSON value per line: a list of block hashes in hex, in the order of their prefix, or of a "
    'prompt\'s token ids; or {"hashes": […]}, {"prompt_token_ids": […], "cache_salt": "…"}. The command hashes '
    "prompts as the engine does; it needs no vLLM. The daemon fetches these blocks only while no request waits for "
    "one, into room that no request holds; the next request finds them, until others need the room. Root and the "
    "daemon's own user may name any engine, others their own.",
    arguments={"FILE": "the list; - for standard input"},
    examples=(
        ("kvprefetchd warm system-prompts.jsonl", "before the first users come"),
        ("kvprefetchd warm - --engine ENGINE_ID < list.jsonl", "for one engine of several"),
    ),
    exits={
        0: "all of it that the store has is staged",
        1: "part of it is not: no room, or it could not be fetched",
        65: "a line was bad; it is named, and the good ones were done",
        69: "no daemon or no such engine, or it refused, or FILE cannot be read; one line says which",
        130: "interrupted; the output counts what was staged until then",
    },
    also="docs/OPERATIONS.md, kvprefetchd store",
)
EX_DATA, EX_INTERRUPTED = 65, 130
NAME = "kvprefetchd.warm"  # of the announcements, in the log
TIMEOUT_S = 300.0  # of one message: those of others may go before it
SHOWN = 5  # bad lines that are named
PROGRESS_S = 0.2


def add(commands: Group) -> None:
    file = click.Argument(["file"], type=click.Path(allow_dash=True))
    engine = option("--engine", metavar="ID", default="", help="its id, or the start (default: the only one attached)")
    declare(commands, "warm", run, PAGE, file, engine, flag("--json", "print the result as JSON"), socket_option())


def run(arguments: Arguments) -> int:
    lines: Counter[str] = Counter()
    with opened(arguments.file) as file, Conversation(arguments.socket, TIMEOUT_S) as daemon:
        sender = Sender(daemon, arguments.engine, progress=sys.stderr.isatty())
        try:
            for line in read(file, functools.partial(hashed, sender.engine)):
                error = line.error or sender.error(line.digests)
                lines["bad" if error else "good"] += 1
                if error and lines["bad"] <= SHOWN:
                    print(f"kvprefetchd: {arguments.file}: line {line.number}: {error}", file=sys.stderr)
                sender.add([] if error else line.digests)
            sender.flush()
        except KeyboardInterrupt:
            return EX_INTERRUPTED
        finally:
            sender.clear_progress()
            if lines["bad"] > SHOWN:
                print(f"kvprefetchd: {arguments.file}: {lines['bad'] - SHOWN} more bad lines", file=sys.stderr)
            print(as_json(sender, lines) if arguments.json else described(sender, lines))
    if lines["bad"]:
        return EX_DATA
    return 1 if sender.counts["no_room"] or sender.counts["failed"] else 0


class Sender:
    """Sends the list in Warm messages of bounded size, each after the answer to the one before. Raises Unavailable."""

    def __init__(self, daemon: Conversation, engine: str, *, progress: bool) -> None:
        self._daemon, self._progress = daemon, progress
        self._chains: list[list[str]] = []
        self._room = MAX_WARM_DIGESTS
        self._shown_s = 0.0
        self.counts: Counter[str] = Counter()
        self.engine = daemon.ask(Warm(name=NAME, engine=engine), Warmed)

    def error(self, digests: list[bytes]) -> str:
        """Return why the engine cannot take this chain; empty if it can."""
        if len({len(digest) for digest in digests}) > 1:
            return "the hashes differ in length"
        if self.engine.whole_prompts and len(digests) > MAX_WARM_DIGESTS:
            return f"too long for an engine with several KV groups: hashes={len(digests)} max={MAX_WARM_DIGESTS}"
        return ""

    def add(self, digests: list[bytes]) -> None:
        """Add a chain of any length. Its next part is sent only if the store has all of this one."""
        self.counts["blocks"] += len(digests) * self.engine.hash_tokens // self.engine.block_tokens
        for start in range(0, len(digests), MAX_WARM_DIGESTS):
            part = digests[start : start + MAX_WARM_DIGESTS]
            if len(part) > self._room:
                self.flush()
            self._chains.append([digest.hex() for digest in part])
            self._room -= len(part)
            left = len(digests) - start - len(part)
            if left and self.flush() < len(part):
                self.counts["absent"] += left
                return

    def flush(self) -> int:
        """Send the collected chains and wait for the answer. Returns how many blocks of the last chain exist."""
        if not self._chains:
            return 0
        message = Warm(name=NAME, engine=self.engine.engine, chains=self._chains)
        self._chains, self._room = [], MAX_WARM_DIGESTS
        answer = self._daemon.ask(message, Warmed)
        if answer.epoch != self.engine.epoch:
            raise Unavailable(f"engine {answer.engine} was attached anew: what was staged for it is gone")
        for name in ("staged", "fetched", "absent", "no_room", "failed"):
            self.counts[name] += getattr(answer, name)
        self._show()
        return answer.found[-1]

    def clear_progress(self) -> None:
        if self._shown_s:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _show(self) -> None:
        if self._progress and time.monotonic() - self._shown_s > PROGRESS_S:
            self._shown_s = time.monotonic()
            sys.stderr.write(f"\r\x1b[K{counted(self.counts)}")
            sys.stderr.flush()


def described(sender: Sender, lines: Counter[str]) -> str:
    bad = f", {lines['bad']} bad" if lines["bad"] else ""
    return f"engine {sender.engine.engine}: {lines.total()} lines{bad}; {counted(sender.counts)}"


def counted(counts: Counter[str]) -> str:
    found = counts["staged"] + counts["fetched"] + counts["no_room"] + counts["failed"]
    failed = f", {counts['failed']} could not be fetched" if counts["failed"] else ""
    return (
        f"{counts['blocks']} blocks: {found} found ({counts['staged']} staged already, {counts['fetched']} fetched, "
        f"{counts['no_room']} without room{failed}), {counts['absent']} not in the store"
    )


def as_json(sender: Sender, lines: Counter[str]) -> str:
    engine = {"engine": sender.engine.engine, "epoch": sender.engine.epoch}
    names = ("blocks", "staged", "fetched", "no_room", "failed", "absent")
    counts = {name: sender.counts[name] for name in names}
    return json.dumps({**engine, "lines": lines.total(), "bad_lines": lines["bad"], **counts})


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
