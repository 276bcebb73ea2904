"""Reads the log back: lines of a file that may be rotated, of a stream or of the journal."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

MAX_LINE_BYTES = 1 << 20
_PRIORITY = re.compile(rb"<[0-7]>")

Record = dict[str, Any]


def parse(line: bytes) -> Record | None:
    """Return the record of one line, with or without a journal priority before it; None for a foreign line."""
    line = line.strip()
    if (match := _PRIORITY.match(line)) is not None:
        line = line[match.end() :]
    if not line.startswith(b"{"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and isinstance(record.get("event"), str) and isinstance(record.get("ts"), str):
        return record
    return None


def stream(file: IO[bytes]) -> Generator[bytes, None, None]:
    while line := file.readline(MAX_LINE_BYTES):
        yield line


def follow(path: Path, last: int, pause: Callable[[], None]) -> Generator[bytes, None, None]:
    """Yield the last `last` lines of a file and then every line that comes, for ever; call `pause` between.

    After a rotation it reads the old file to its end and the new one from its start; a file that became shorter it
    reads from the start again.  Raises OSError when there is no such file at first; later it may be absent for a while.
    """
    file = path.open("rb")
    try:
        _seek_last(file, last)
        rest = b""
        while True:
            if chunk := file.read(1 << 16):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
                if len(rest) > MAX_LINE_BYTES:
                    yield rest
                    rest = b""
                continue
            pause()
            mine = os.fstat(file.fileno())
            if mine.st_size > file.tell():
                continue
            if mine.st_size < file.tell():
                file.seek(0)
                rest = b""
                continue
            try:
                other = path.open("rb")
            except FileNotFoundError:
                continue  # renamed, and the new file is not there yet
            found = os.fstat(other.fileno())
            if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                other.close()
                continue
            if rest:
                yield rest
            rest = b""
            file.close()
            file = other
    finally:
        file.close()


def last_lines(file: IO[bytes], last: int) -> Generator[bytes, None, None]:
    _seek_last(file, last)
    yield from stream(file)


def _seek_last(file: IO[bytes], last: int) -> None:
    """Seek to the start of the last `last` lines, from the end: logs are large."""
    at = file.seek(0, os.SEEK_END)
    end = at - 1  # a newline there ends the last line and begins none
    while last and at:
        start = max(0, at - (1 << 16))
        file.seek(start)
        block = file.read(at - start)
        stop = min(end - start, len(block))
        while last and (stop := block.rfind(b"\n", 0, stop)) >= 0:
            last -= 1
            if not last:
                file.seek(start + stop + 1)
                return
        at = start
    if last:
        file.seek(0)


def journal(unit: str, *, following: bool, last: int | None) -> Generator[bytes, None, None]:
    """Yield the messages of a systemd unit. Raises OSError when there is no journalctl."""
    command = ["journalctl", "--output=json", f"--unit={unit}", f"--lines={'all' if last is None else last}"]
    command += ["--follow"] if following else ["--no-pager"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            for line in stream(process.stdout):
                if (message := journal_message(line)) is not None:
                    yield message
        finally:
            process.terminate()


def journal_message(line: bytes) -> bytes | None:
    """Return the message of one line of `journalctl --output=json`, which lists bytes that are not UTF-8 as numbers."""
    try:
        message = json.loads(line)["MESSAGE"]
        return message.encode() if isinstance(message, str) else bytes(message)
    except (ValueError, KeyError, TypeError):
        return None


def records(lines: Iterable[bytes]) -> Iterator[Record]:
    for line in lines:
        if (record := parse(line)) is not None:
            yield record
