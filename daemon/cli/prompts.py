"""The list of `kvprefetchd warm`: chains of block hashes, or prompts, which it hashes as the engine does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...kv.hashing import BlockHasher
from ...shmring.wire.admin import Digest, Warmed
from ...shmring.wire.checks import first_error

MAX_LINE_BYTES = 32 << 20
MAX_BLOCKS = 1 << 20  # of one line, as of one hint
MAX_TOKENS = 1 << 24


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Hashes(_Entry):
    """The hashes of a prefix's blocks in hex, in order."""

    hashes: list[Digest] = Field(min_length=1, max_length=MAX_BLOCKS)


class Prompt(_Entry):
    """A prompt, and its request's salt if it has one."""

    prompt_token_ids: list[Annotated[int, Field(ge=0, lt=1 << 63)]] = Field(min_length=1, max_length=MAX_TOKENS)
    cache_salt: str | None = Field(default=None, min_length=1)


class WarmLine(NamedTuple):
    """One line: its digests (none for a prompt without a whole block), or its error."""

    number: int
    digests: list[bytes]
    error: str = ""


def read(file: IO[bytes], hashed: Callable[[Prompt], list[bytes]]) -> Iterator[WarmLine]:
    """Yield every line that is not empty; `hashed` returns a prompt's digests or raises ValueError with one line."""
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        try:
            entry = parse(line)
            digests = hashed(entry) if isinstance(entry, Prompt) else [bytes.fromhex(text) for text in entry.hashes]
            yield WarmLine(number, digests)
        except ValueError as error:
            yield WarmLine(number, [], str(error))


def parse(line: bytes) -> Hashes | Prompt:
    """Parse one line. Raises ValueError in one line, with field, value and bound."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"too long: max_bytes={MAX_LINE_BYTES}")
    try:
        raw: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if isinstance(raw, list):  # short for the object with one field
        raw = {"hashes" if any(isinstance(each, str) for each in raw) else "prompt_token_ids": raw}
    if not isinstance(raw, dict) or ("hashes" in raw) == ("prompt_token_ids" in raw):
        raise ValueError("one of hashes and prompt_token_ids is wanted, or a list of one of them")
    try:
        return Hashes.model_validate(raw) if "hashes" in raw else Prompt.model_validate(raw)
    except ValidationError as error:
        raise ValueError(first_error(error)) from None


def _lines(file: IO[bytes]) -> Iterable[bytes]:
    """Yield the lines; of one that is too long only the beginning, which is too long as well."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        rest = line
        while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
            pass
        yield line


def hashed(engine: Warmed, prompt: Prompt) -> list[bytes]:
    """Return the digests of the blocks of this prompt that a request could load. Raises CannotHash."""
    start, probe = bytes.fromhex(engine.hash_start), bytes.fromhex(engine.hash_probe)
    hasher = BlockHasher(engine.hash_algorithm, start, engine.hash_tokens, probe)
    digests, size = hasher(prompt.prompt_token_ids, prompt.cache_salt), hasher.digest_bytes
    return [digests[at : at + size] for at in range(0, len(digests), size)]
