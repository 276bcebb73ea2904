"""`kvprefetchd tail` and `explain`: the log, and one request of it, for human eyes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import stat
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

import click

from kvprefetch.client.control import Unavailable, ask, find_socket, look
from kvprefetch.client.explain import explain

from ...shmring.wire.admin import Report, WhyQuery
from ...shmring.wire.checks import nearest
from ..config.model import ConfigError
from ..telemetry import pretty, reader
from ..telemetry.events import EVENTS, LEVELS
from ..telemetry.reader import Record
from .common import NO_COLOR, Arguments, Real, declare, flag, option, show, socket_option
from .help_page import CommandGroup, HelpPage

UNIT = "kvprefetchd.service"
MOMENTS = "10m ago, or 2026-01-31T03:10 (UTC)"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
FILE = {
    "FILE": "the log, the standard output of serve; -: standard input; nothing: that, or where it is neither pipe nor "
    "file the log of the daemon that runs here, or ran last"
}
TAIL = HelpPage(
    "print the log as readable lines",
    details="Times are UTC. Lines of other programs are printed unchanged, unless you give a filter or --json. After "
    "the first Ctrl-C, which its writer gets too, a pipe is still read to its end.",
    examples=(
        ("kvprefetchd tail kvprefetchd.log", "all of it"),
        ("kvprefetchd serve | kvprefetchd tail", "a daemon's log as it comes"),
        ("kvprefetchd tail -f --event 'request.*' --slow 20 kvprefetchd.log", "requests that waited 20 ms or more"),
        ("kvprefetchd tail --journal --level warning -n 50", "the last 50 troubles, under systemd"),
        ("kvprefetchd tail --since 10m --level warning", "trouble of ten minutes, of the daemon that runs here"),
        ("kvprefetchd tail --json --engine 3f2a kvprefetchd.log > engine.jsonl", "one engine's lines, for a program"),
    ),
    exits={0: "read to its end, or interrupted", 69: "the log cannot be read, or the journal has nothing of the unit"},
    arguments=FILE,
    environment=NO_COLOR,
    also="kvprefetchd explain; docs/EVENTS.md has every event and field",
)
EXPLAIN = HelpPage(
    "draw one request's timeline from the log, and say where its time went",
    details="The log has a line for each hint of a request, written at its end. vLLM adds to the id that its client "
    "has: a part is enough. It asks the daemon why the store lacked blocks, for the last 1,024 such requests.",
    examples=(
        ("kvprefetchd explain cmpl-7 kvprefetchd.log", "from a file"),
        ("kvprefetchd explain cmpl-7 --journal", "from the service's journal"),
        ("kvprefetchd tail --slow 20 kvprefetchd.log", "which requests are worth it"),
        ("kvprefetchd explain --json cmpl-7 kvprefetchd.log", "for a program"),
    ),
    exits={0: "found", 69: "no such request, several of them, or no log"},
    arguments={"REQUEST_ID": "its id, or a part of it that no other request has"} | FILE,
    also="kvprefetchd tail; docs/EVENTS.md has the fields of the line",
)


class Moment(click.types.StringParamType):
    """A time, as `ts` of the log has it: so long ago, or in UTC."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            if ago := re.fullmatch(r"(\d{1,9})([smhd])", value):
                at = datetime.now(timezone.utc) - timedelta(seconds=int(ago[1]) * _SECONDS[ago[2]])
            else:
                at = datetime.fromisoformat(value.removesuffix("Z")).replace(tzinfo=timezone.utc)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither 10m (s, m, h or d ago) nor 2026-01-31T03:10 (UTC).", param, ctx)
        return at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def add(commands: CommandGroup) -> None:
    source = (
        click.Argument(["file"], type=click.Path(allow_dash=True), required=False),
        option(
            "--journal",
            metavar="[UNIT]",
            is_flag=False,
            flag_value=UNIT,
            help=f"read the journal of this unit ({UNIT})",
        ),
    )
    at_least = "only requests that made the scheduler wait at least MS milliseconds"
    declare(
        commands,
        "tail",
        run_tail,
        TAIL,
        *source,
        click.Option(["-f", "--follow"], is_flag=True, help="go on with what comes, across rotation"),
        option(
            "-n",
            "--lines",
            metavar="COUNT",
            type=click.IntRange(min=0),
            help="begin with the last COUNT lines that the filters let through (default: all; 10 with -f)",
        ),
        option(
            "--since",
            metavar="TIME",
            type=Moment(),
            help=f"only lines since then, of rotated files too: {MOMENTS}",
        ),
        option("--until", metavar="TIME", type=Moment(), help="only lines until then"),
        option("--event", metavar="NAME", multiple=True, help="only this event; * as in request.*; repeatable"),
        option("--request", metavar="ID", help="only requests with this in their id"),
        option("--engine", metavar="ID", help="only this engine: its id or the start of it"),
        option("--level", type=click.Choice(LEVELS), help="only this level and above"),
        option("--slow", metavar="MS", type=Real(min=0), help=at_least),
        flag("--json", "print the lines as JSON, as they were written"),
    )
    request = click.Argument(["request"], metavar="REQUEST_ID")
    declare(
        commands,
        "explain",
        run_explain,
        EXPLAIN,
        request,
        *source,
        socket_option(),
        flag("--json", "its line, spans and sentences as JSON"),
    )


def log_source_name(arguments: Arguments) -> str:
    """Return the log that `lines` reads, in words."""
    if arguments.journal is not None:
        return f"the journal of {arguments.journal}"
    return "standard input" if arguments.file in (None, "-") else str(arguments.file)


def lines(arguments: Arguments, *, following: bool = False) -> Generator[bytes | None, None, None]:
    """Yield the chosen log's lines; with `following` None after those that were there, and then what comes.

    With a time (`since`) also those of the files before it that reach there.

    Raises ConfigError when the user named no log, and Unavailable when nobody can read it, or a journal has none.
    """
    if arguments.journal is not None and arguments.file is not None:
        raise ConfigError(f"command line: FILE and --journal exclude each other: FILE={arguments.file!r}")
    if arguments.journal is None and arguments.file in (None, "-") and stat.S_ISCHR(os.fstat(0).st_mode):
        vars(arguments).update(named(daemon_s_log()))
    name, since = arguments.file or "-", getattr(arguments, "since", None)
    since_s = datetime.fromisoformat(since[:-1] + "+00:00").timestamp() if since else 0.0
    source: Iterator[bytes | None]
    with contextlib.ExitStack() as opened:
        try:
            if arguments.journal is not None:
                source = reader.journal(arguments.journal, following=following, since_s=since_s)
                if (first := next(source, None)) is None and not since and not following:
                    why = "it may be of another name, or not for this user to read"
                    raise Unavailable(f"{log_source_name(arguments)} has no entries: {why}")
                source = chain([first], source)
            elif name == "-":
                source = chain([None] if following else [], reader.stream(sys.stdin.buffer))
            else:
                here = reader.follow(Path(name)) if following else reader.stream(opened.enter_context(open(name, "rb")))
                source = chain(reader.rotated(name, since_s), here) if since else here
            yield from source
        except OSError as error:
            where = error.filename or name
            raise Unavailable(f"the log cannot be read: {error.strerror or error}: {where!r}") from None


def daemon_s_log() -> str:
    """Return where the log of the daemon goes that runs here, or that ran last; else why that is not known."""
    try:
        return look(find_socket(os.environ)).log
    except Unavailable as error:
        return error.what


def named(place: str) -> dict[str, str | None]:
    """Return FILE and --journal for where a daemon's log goes. Raises ConfigError where nobody can read that."""
    if place == reader.JOURNAL:
        return {"file": None, "journal": UNIT}
    if place.startswith("/"):
        return {"file": place, "journal": None}
    raise ConfigError(f"command line: nothing to read: name a FILE, pipe a log in, or give --journal: log={place!r}")


def run_tail(arguments: Arguments) -> int:
    bounds = (arguments.since, arguments.until)
    filters = (arguments.event, arguments.request, arguments.engine, arguments.level, arguments.slow, *bounds)
    everything = not any(each is not None and each != () for each in filters)
    for name in arguments.event:
        if not any(fnmatchcase(event, name) for event in EVENTS):
            print(f"kvprefetchd: note: no event has the name {name!r}{nearest(name, EVENTS)}", file=sys.stderr)
    colour = pretty.wants_colour(sys.stdout)

    def chosen(line: bytes) -> bool:
        if everything and not arguments.json:
            return True
        record = reader.parse(line)
        return record is not None and wanted(record, arguments)

    with contextlib.suppress(KeyboardInterrupt), to_the_end(arguments):
        found = (line for line in lines(arguments, following=arguments.follow) if line is None or chosen(line))
        for line in last(found, arguments):
            if (record := reader.parse(line)) is None:
                text = pretty.printable(line.decode(errors="replace").rstrip("\r\n").expandtabs())
            else:
                text = json.dumps(record) if arguments.json else pretty.line(record, colour=colour)
            print(text, flush=arguments.follow)
        sys.stdout.flush()
    return 0


def last(found: Iterable[bytes | None], arguments: Arguments) -> Iterator[bytes]:
    """Yield the last lines of those that were there, as many as are wanted, and then what comes."""
    count = 10 if arguments.follow and arguments.lines is None else arguments.lines
    kept = deque[bytes](maxlen=count)
    for line in found:
        if line is None:
            yield from kept
            kept, count = deque(), None
        elif count is None:
            yield line
        else:
            kept.append(line)
    yield from kept


@contextlib.contextmanager
def to_the_end(arguments: Arguments) -> Iterator[None]:
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


def wanted(record: Record, arguments: Arguments) -> bool:
    event, level = record["event"], arguments.level
    waited_ms = pretty.figure(record, "exposed_ms") or 0.0
    return (
        (arguments.since is None or record["ts"] >= arguments.since)
        and (arguments.until is None or record["ts"] <= arguments.until)
        and (not arguments.event or any(fnmatchcase(event, name) for name in arguments.event))
        and (arguments.request is None or arguments.request in str(record.get("request_id", "")))
        and (arguments.engine is None or str(record.get("engine", "")).startswith(arguments.engine))
        and (level is None or record.get("level") in LEVELS[LEVELS.index(level) :])
        and (arguments.slow is None or (event == "request.done" and waited_ms >= arguments.slow))
    )


def why(record: Record, socket: Path) -> list[str]:
    """Say why the store lacks blocks of a request, as far as its line and the daemon know."""
    if pretty.count(record, "found_blocks") >= pretty.count(record, "hint_blocks"):
        return []
    said = [f"Only requests with the same {record['named_by']} have its hashes."] if record.get("named_by") else []
    with contextlib.suppress(Unavailable, ValueError):
        query = WhyQuery(engine=str(record.get("engine")), request=str(record.get("request_id")))
        said += ask(socket, query, Report).text.splitlines()
    return said


def run_explain(arguments: Arguments) -> int:
    with contextlib.suppress(KeyboardInterrupt):
        found = explain(arguments.request, filter(None, lines(arguments)), where=log_source_name(arguments))
        if arguments.json:
            lives = [life._asdict() | {"spans": [span._asdict() for span in life.spans]} for life in found]
            show({"requests": [life | {"why": why(life["record"], arguments.socket)} for life in lives]})
        else:
            for life in found:
                print(life.text, *map(pretty.printable, why(life.record, arguments.socket)), "", sep="\n")
    return 0
