"""`kvprefetchd warm FILE`: have an attached engine's blocks staged before anybody asks for them."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ...shmring.wire.admin import MAX_WARM_DIGESTS, Warm, Warmed
from .client import Conversation, Unavailable
from .common import SOCKET_ENVIRONMENT, SOCKET_FILE, Commands, add_socket, declare
from .help_page import Page
from .prompts import PromptHasher
from .warm_file import read

DETAILS = (
    "FILE has one JSON value per line: a list of block hashes in hex, in the order of their prefix, or of a prompt's "
    'token ids; or {"hashes": […]}, {"prompt_token_ids": […], "cache_salt": "…"}. Prompts need the engine\'s vLLM in '
    "this command's environment. Blocks are fetched only while no request waits for one, into room that no request "
    "holds; the next request finds them, until others need the room. Root and the daemon's own user may for any "
    "engine, others for their own."
)
PAGE = Page(
    examples=(
        ("kvprefetchd warm system-prompts.jsonl", "before the first users come"),
        ("kvprefetchd warm - --engine ENGINE_ID < list.jsonl", "for one engine of several"),
    ),
    exits={
        0: "all that the store has of it is staged",
        1: "part of it is not: no room, or it could not be fetched",
        65: "a line was bad; it is named, and the good ones were done",
        69: "no daemon or no such engine, or it refused, or FILE cannot be read; one line says which",
        130: "interrupted; what was staged until then is said",
    },
    files=SOCKET_FILE,
    environment=SOCKET_ENVIRONMENT | {"PYTHONHASHSEED": "as the engine's, to hash prompts"},
    also="docs/OPERATIONS.md, kvprefetchd store",
)
EX_DATA, EX_INTERRUPTED = 65, 130
TIMEOUT_S = 300.0  # of one order: those of others may go before it
SHOWN = 5  # bad lines
PROGRESS_S = 0.2


def add(commands: Commands) -> None:
    parser = declare(commands, "warm", "stage ahead what a file lists", run, PAGE, details=DETAILS)
    parser.add_argument("file", metavar="FILE", help="what to stage; - for standard input")
    parser.add_argument(
        "--engine", metavar="ID", default="", help="its id, or the start (default: the only one attached)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    add_socket(parser)


def run(arguments: argparse.Namespace) -> int:
    lines: Counter[str] = Counter()
    with opened(arguments.file) as file, Conversation(arguments.socket, TIMEOUT_S) as daemon:
        orders = Orders(daemon, arguments.engine, progress=sys.stderr.isatty())
        try:
            for line in read(file, PromptHasher(orders.engine)):
                lines["bad" if line.error else "good"] += 1
                if line.error and lines["bad"] <= SHOWN:
                    print(f"kvprefetchd: {arguments.file}: line {line.number}: {line.error}", file=sys.stderr)
                orders.add(line.digests)
            orders.flush()
        except KeyboardInterrupt:
            return EX_INTERRUPTED
        finally:
            orders.clear_progress()
            if lines["bad"] > SHOWN:
                print(f"kvprefetchd: {arguments.file}: {lines['bad'] - SHOWN} more bad lines", file=sys.stderr)
            print(as_json(orders, lines) if arguments.json else described(orders, lines))
    if lines["bad"]:
        return EX_DATA
    return 1 if orders.counts["no_room"] or orders.counts["failed"] else 0


class Orders:
    """What is listed, sent in orders of bounded size, each after the answer to the one before. Raises Unavailable."""

    def __init__(self, daemon: Conversation, engine: str, *, progress: bool) -> None:
        self._daemon, self._progress = daemon, progress
        self._run = uuid.uuid4().hex
        self._chains: list[list[str]] = []
        self._room = MAX_WARM_DIGESTS
        self._shown_s = 0.0
        self.counts: Counter[str] = Counter()
        self.engine = daemon.ask(Warm(run=self._run, engine=engine), Warmed)

    def add(self, digests: list[bytes]) -> None:
        """A chain of any length. Its next part is sent once the store is known to have all of this one."""
        self.counts["blocks"] += len(digests)
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
        """Send what is collected, and wait for its answer; how much of the last chain there is."""
        if not self._chains:
            return 0
        order = Warm(run=self._run, engine=self.engine.engine, chains=self._chains)
        self._chains, self._room = [], MAX_WARM_DIGESTS
        answer = self._daemon.ask(order, Warmed)
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


def described(orders: Orders, lines: Counter[str]) -> str:
    bad = f", {lines['bad']} bad" if lines["bad"] else ""
    return f"engine {orders.engine.engine}: {lines.total()} lines{bad}; {counted(orders.counts)}"


def counted(counts: Counter[str]) -> str:
    found = counts["staged"] + counts["fetched"] + counts["no_room"] + counts["failed"]
    failed = f", {counts['failed']} could not be fetched" if counts["failed"] else ""
    return (
        f"{counts['blocks']} blocks: {found} found ({counts['staged']} staged already, {counts['fetched']} fetched, "
        f"{counts['no_room']} without room{failed}), {counts['absent']} not in the store"
    )


def as_json(orders: Orders, lines: Counter[str]) -> str:
    names = ("blocks", "staged", "fetched", "no_room", "failed", "absent")
    return json.dumps({
        "engine": orders.engine.engine, "epoch": orders.engine.epoch, "lines": lines.total(), "bad_lines": lines["bad"],
        **{name: orders.counts[name] for name in names},
    })  # fmt: skip


@contextlib.contextmanager
def opened(name: str) -> Iterator[IO[bytes]]:
    """The file, or standard input for `-`. Raises Unavailable, also when it cannot be read to its end."""
    try:
        if name == "-":
            yield sys.stdin.buffer
        else:
            with Path(name).open("rb") as file:
                yield file
    except OSError as error:
        raise Unavailable(f"{name} cannot be read: {error.strerror or error}") from None
