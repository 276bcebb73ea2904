"""Reads the log back: lines of a file that may be rotated, of a stream or of the journal."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import subprocess
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

MAX_LINE_BYTES = 1 << 20
JOURNAL = "the journal"  # as the daemon names where its log goes
LOOK_S = 0.2  # between looks at a file that is followed

# Names in lines of the release before, which this release still reads.
FORMER_OUTCOMES = {"late": "timed_out", "evicted": "local_gap", "lost": "voided", "untold": "unreported"}

Record = dict[str, Any]


def parse(line: bytes) -> Record | None:
    """Return the record of one line, also behind a journal's priority or an engine's; None for a foreign line."""
    try:
        record = json.loads(line[max(0, line.find(b"{")) :])
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and isinstance(record.get("event"), str) and isinstance(record.get("ts"), str):
        if record["event"] == "request.done" and "asked_ms" in record:
            record["visited_ms"] = record.pop("asked_ms")
            record["outcome"] = FORMER_OUTCOMES.get(str(record.get("outcome")), record.get("outcome"))
        return record
    return None


def stream(file: IO[bytes] | gzip.GzipFile) -> Generator[bytes, None, None]:
    while line := file.readline(MAX_LINE_BYTES):
        yield line


def rotated(path: str, since_s: float) -> Generator[bytes, None, None]:
    """Yield the lines of the log's files before `path` that end after that time (Unix), the oldest first.

    They are named as logrotate names them: .1, or .1.gz, for the newest.  Raises OSError for one that cannot be read.
    """
    files = list[Path]()
    with contextlib.suppress(FileNotFoundError):
        while True:
            each = Path(f"{path}.{len(files) + 1}")
            each = each if each.exists() else Path(f"{each}.gz")
            if each.stat().st_mtime < since_s:
                break
            files.append(each)
    for each in reversed(files):
        with gzip.open(each) if each.suffix == ".gz" else each.open("rb") as file, contextlib.suppress(EOFError):
            yield from stream(file)  # of a packed one that is not whole, what it has


def follow(path: Path) -> Generator[bytes | None, None, None]:
    """Yield a file's lines, None where all that was there is read, and then what comes, for ever.

    A file that was cut is read from its beginning; one that was renamed to its end, once the new one has a line.
    Raises OSError where the file cannot be read at first.
    """
    file, begun, there = path.open("rb"), b"", False
    try:
        while True:
            left = _replaced(file, path)  # then what is read now is all of the one before
            for piece in stream(file):
                begun += piece
                if left or begun.endswith(b"\n") or len(begun) >= MAX_LINE_BYTES:
                    yield begun
                    begun = b""
            if left:
                with contextlib.suppress(OSError):
                    new = path.open("rb")
                    file.close()
                    file = new
                continue
            if not there:
                yield None
                there = True
            time.sleep(LOOK_S)
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)
                begun = b""
    finally:
        file.close()


def _replaced(file: IO[bytes], path: Path) -> bool:
    """Whether another file has the path, and a line: its writer has left the one before."""
    with contextlib.suppress(OSError):
        now = path.stat()
        return now.st_size > 0 and not os.path.samestat(now, os.fstat(file.fileno()))
    return False


def journal(unit: str, *, following: bool, since_s: float = 0.0) -> Generator[bytes | None, None, None]:
    """Yield the messages of a systemd unit since a time (Unix); with `following` None, and what comes, for ever.

    Raises OSError at the first one when there is no journalctl.
    """
    command = ["journalctl", "--quiet", "--no-pager", "--output=cat", f"--unit={unit}"]
    begin = ["--lines=0"]
    for line in _said([*command, f"--since=@{int(since_s)}", *(["--show-cursor"] if following else [])]):
        if line.startswith(b"-- cursor: "):
            begin = ["--no-tail", f"--after-cursor={line[11:].decode().strip()}"]
        else:
            yield line
    if following:
        yield None
        yield from _said([*command, "--follow", *begin])


def _said(command: Sequence[str]) -> Generator[bytes, None, None]:
    """Yield the lines that a command prints, and end it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield from stream(process.stdout)
        finally:
            process.terminate()


def records(lines: Iterable[bytes]) -> Iterator[Record]:
    for line in lines:
        if (record := parse(line)) is not None:
            yield record
