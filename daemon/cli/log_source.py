"""Where `tail` and `explain` read the log: a file, a stream or the journal."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from ..config.model import ConfigError
from ..telemetry import reader
from .client import Unavailable

POLL_S = 0.2
UNIT = "kvprefetchd.service"
LOG_FILE = {"FILE": "the standard output of serve; lines of other programs in it do no harm"}


def add_log_source(parser: argparse.ArgumentParser) -> None:
    """Add FILE and `--journal [UNIT]`."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="the log; - or nothing: standard input")
    text = f"read the journal of this unit (default: {UNIT})"
    parser.add_argument("--journal", metavar="UNIT", nargs="?", const=UNIT, help=text)


def log_source_name(arguments: argparse.Namespace) -> str:
    """Return the log that `lines` reads, in words."""
    if arguments.journal is not None:
        return f"the journal of {arguments.journal}"
    return "standard input" if arguments.file in (None, "-") else str(arguments.file)


def _not_empty(source: Generator[bytes, None, None], where: str) -> Generator[bytes, None, None]:
    """Yield the lines. Raises Unavailable at the end of a source without any."""
    empty = True
    with contextlib.closing(source):
        for line in source:
            empty = False
            yield line
    if empty:
        raise Unavailable(f"{where} has no entries: it may be of another name, or not for this user to read")


@contextlib.contextmanager
def lines(
    arguments: argparse.Namespace, *, following: bool = False, last: int | None = None
) -> Iterator[Generator[bytes, None, None]]:
    """Open the chosen log and yield its lines, from the `last` ones on; with `following` they do not end.

    Raises ConfigError when the user named no log, and Unavailable when nobody can read it.
    """
    name = str(arguments.file or "-")
    if arguments.journal is not None and arguments.file is not None:
        raise ConfigError(f"command line: FILE and --journal exclude each other: FILE={name!r}")
    try:
        with contextlib.ExitStack() as opened:
            if arguments.journal is not None:
                source = reader.journal(arguments.journal, following=following, last=last)
                if last != 0:
                    source = _not_empty(source, log_source_name(arguments))
            elif name == "-":
                if sys.stdin.isatty():
                    raise ConfigError("command line: nothing to read: name a FILE, pipe a log in, or give --journal")
                source = reader.stream(sys.stdin.buffer)
            elif following:
                source = reader.follow(Path(name), 10 if last is None else last, lambda: time.sleep(POLL_S))
            else:
                file = opened.enter_context(Path(name).open("rb"))
                source = reader.stream(file) if last is None else reader.last_lines(file, last)
            yield opened.enter_context(contextlib.closing(source))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unavailable(f"the log cannot be read: {error.strerror or error}: {error.filename or name!r}") from None
