"""Reads the log back: lines of a file that may be rotated, of a stream or of the journal."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

MAX_LINE_BYTES = 1 << 20

Record = dict[str, Any]


def parse(line: bytes) -> Record | None:
    """Return the record of one line, also behind a journal's priority or an engine's; None for a foreign line."""
    try:
        record = json.loads(line[max(0, line.find(b"{")) :])
    except (ValueError, RecursionError):
        return None
    if isinstance(record, dict) and isinstance(record.get("event"), str) and isinstance(record.get("ts"), str):
        return record
    return None


def stream(file: IO[bytes]) -> Generator[bytes, None, None]:
    while line := file.readline(MAX_LINE_BYTES):
        yield line


def tail(path: Path, last: int, *, following: bool) -> Generator[bytes, None, None]:
    """Return the last `last` lines of a file, and with `following` what comes, across rotations, for ever: tail(1).

    Raises OSError where the file cannot be read at first.
    """
    path.open("rb").close()
    command = ["tail", "-n", str(last), *(["-F"] if following else []), "--", str(path)]
    return _said(command, subprocess.DEVNULL)  # it tells of rotations there


def journal(unit: str, *, following: bool, last: int | None) -> Generator[bytes, None, None]:
    """Return the messages of a systemd unit. Raises OSError at the first one when there is no journalctl."""
    command = ["journalctl", "--quiet", "--output=cat", f"--unit={unit}"]
    return _said([*command, f"--lines={'all' if last is None else last}", "--follow" if following else "--no-pager"])


def _said(command: Sequence[str], errors: int | None = None) -> Generator[bytes, None, None]:
    """Yield the lines that a command prints, and end it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as process:
        try:
            assert process.stdout is not None
            yield from stream(process.stdout)
        finally:
            process.terminate()


def records(lines: Iterable[bytes]) -> Iterator[Record]:
    for line in lines:
        if (record := parse(line)) is not None:
            yield record
