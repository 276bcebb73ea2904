"""`kvprefetchd tail`: the log for human eyes, filtered, from a file, a stream or the journal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from ...shmring.wire.checks import nearest
from ..telemetry import pretty
from ..telemetry.events import EVENTS, LEVELS
from ..telemetry.reader import Record, parse
from .common import Commands, declare
from .help_page import HelpPage
from .log_source import LOG_FILE, add_log_source, lines

PAGE = HelpPage(
    "print the log as readable lines",
    details="Times are UTC. Lines of other programs are printed unchanged, unless you give a filter or --json. After "
    "the first Ctrl-C, which its writer gets too, a pipe is still read to its end.",
    examples=(
        ("kvprefetchd tail kvprefetchd.log", "all of it"),
        ("kvprefetchd serve | kvprefetchd tail", "a daemon's log as it comes"),
        ("kvprefetchd tail -f --event 'request.*' --slow 20 kvprefetchd.log", "requests that waited 20 ms or more"),
        ("kvprefetchd tail --journal --level warning -n 50", "recent trouble, under systemd"),
        ("kvprefetchd tail --json --engine 3f2a kvprefetchd.log > engine.jsonl", "one engine's lines, for a program"),
    ),
    exits={0: "read to its end, or interrupted", 69: "the log cannot be read, or the journal has nothing of the unit"},
    files=LOG_FILE,
    environment={"NO_COLOR": "no colours on a terminal"},
    also="kvprefetchd explain; docs/EVENTS.md has every event and field",
)


def add(commands: Commands) -> None:
    parser = declare(commands, "tail", run, PAGE)
    add_log_source(parser)
    option = parser.add_argument
    option("-f", "--follow", action="store_true", help="go on with what comes, across rotation")
    option(
        "-n", "--lines", metavar="COUNT", type=_count, help="begin with the last COUNT lines (default: all; 10 with -f)"
    )
    option("--event", metavar="NAME", action="append", help="only this event; * as in request.*; repeatable")
    option("--request", metavar="ID", help="only requests with this in their id")
    option("--engine", metavar="ID", help="only this engine: its id or the start of it")
    option("--level", choices=LEVELS, help="only this level and above")
    option("--slow", metavar="MS", type=_ms, help="only requests that made the scheduler wait at least MS milliseconds")
    option("--json", action="store_true", help="print the lines as JSON, as they were written")


def run(arguments: argparse.Namespace) -> int:
    wanted = predicate(arguments)
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    with (
        contextlib.suppress(KeyboardInterrupt),
        to_the_end(arguments),
        lines(arguments, following=arguments.follow, last=arguments.lines) as log,
    ):
        for line in log:
            record = parse(line)
            if record is None:
                if wanted is None and not arguments.json:
                    text = line.decode(errors="replace").rstrip("\r\n").expandtabs()
                    print(pretty.printable(text), flush=arguments.follow)
            elif wanted is None or wanted(record):
                text = json.dumps(record) if arguments.json else pretty.line(record, colour=colour)
                print(text, flush=arguments.follow)
        sys.stdout.flush()
    return 0


@contextlib.contextmanager
def to_the_end(arguments: argparse.Namespace) -> Iterator[None]:
    """Ignore the first SIGINT while the log is a pipe: Ctrl-C goes to all of a pipeline, and the writer has last lines.
    The second one ends us."""
    if arguments.journal is not None or arguments.file not in (None, "-") or not stat.S_ISFIFO(os.fstat(0).st_mode):
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.default_int_handler))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def predicate(arguments: argparse.Namespace) -> Callable[[Record], bool] | None:
    """Return a test for wanted records; None when every line is wanted."""
    tests: list[Callable[[Record], Any]] = []
    if events := arguments.event:
        for name in events:
            if not any(fnmatchcase(event, name) for event in EVENTS):
                print(f"kvprefetchd: note: no event has the name {name!r}{nearest(name, EVENTS)}", file=sys.stderr)
        tests.append(lambda record: any(fnmatchcase(record["event"], name) for name in events))
    if (request := arguments.request) is not None:
        tests.append(lambda record: request in str(record.get("request_id", "")))
    if (engine := arguments.engine) is not None:
        tests.append(lambda record: str(record.get("engine", "")).startswith(engine))
    if arguments.level is not None:
        levels = LEVELS[LEVELS.index(arguments.level) :]
        tests.append(lambda record: record.get("level") in levels)
    if (least_ms := arguments.slow) is not None:
        tests.append(
            lambda record: (
                record["event"] == "request.done" and (pretty.figure(record, "exposed_ms") or 0.0) >= least_ms
            )
        )
    return (lambda record: all(test(record) for test in tests)) if tests else None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"should be a number of lines, 0 or more: {text!r}")
    return int(text)


def _ms(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"should be milliseconds, 0 or more: {text!r}")
