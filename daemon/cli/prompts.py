"""The list of `kvprefetchd prefetch`: one prompt a line, as token ids or block hashes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

from ...client import Prompt
from ...shmring.wire.checks import ACTION, ACTION_VERSION
from ..door.envelope import Action, Bad, payload

MAX_LINE_BYTES = 8 << 20
FORMER = {"hashes": "block_hashes", "prompt_token_ids": "token_ids"}  # names of earlier releases


class Listed(NamedTuple):
    """One line: its prompt, or its error. `size`: in bytes."""

    number: int
    size: int
    prompt: Prompt | None
    error: str = ""


def read(file: IO[bytes]) -> Iterator[Listed]:
    """Yield every line that is not empty."""
    for number, line in enumerate(_lines(file), 1):
        if line.strip():
            try:
                yield Listed(number, len(line), parse(line))
            except ValueError as error:
                yield Listed(number, len(line), None, str(error))


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


def _lines(file: IO[bytes]) -> Iterable[bytes]:
    """Yield the lines; of one that is too long only the beginning, which is too long as well."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
            pass
        yield line
