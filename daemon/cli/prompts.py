"""The list of `kvprefetchd warm`: chains of block hashes, or prompts, which it hashes as the engine's vLLM does.

The only importer of vllm in the daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...shmring.wire.admin import Digest, Warmed
from ...shmring.wire.attach import HASH_PROBE_TOKENS
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


class CannotHash(ValueError):
    """No prompt can be hashed as this engine does; the text is one line."""


class PromptHasher:
    """Hashes prompts for one engine; the first prompt loads vLLM.

    Another hash would name nothing in the store.  So it first compares its hash of a block of known tokens with the
    engine's (SchedulerInfo.hash_probe).
    """

    def __init__(self, engine: Warmed) -> None:
        self._engine = engine
        self._hasher: Callable[[Prompt], list[bytes]] | CannotHash | None = None

    def __call__(self, prompt: Prompt) -> list[bytes]:
        """Return the digests of the blocks that a request could load: full ones, but never the last token's.

        Raises CannotHash, for every prompt alike.
        """
        if self._hasher is None:
            try:
                self._hasher = _hasher(self._engine)
            except CannotHash as error:
                self._hasher = error
        if isinstance(self._hasher, CannotHash):
            raise self._hasher
        return self._hasher(prompt)


def _hasher(engine: Warmed) -> Callable[[Prompt], list[bytes]]:
    algorithm, size = engine.hash_algorithm, engine.hash_tokens
    if not algorithm:
        raise CannotHash(f"prompts cannot be hashed: engine {engine.engine} did not say how it does; list hashes")
    if not engine.hash_probe:
        raise CannotHash(
            f"prompts cannot be hashed as in engine {engine.engine}: its {algorithm} begins with a number that is "
            "random in each process; set PYTHONHASHSEED for the engine, or list hashes"
        )
    try:
        with _errors_only():
            from vllm.sampling_params import SamplingParams
            from vllm.utils.hashing import get_hash_fn_by_name
            from vllm.v1.core import kv_cache_utils
            from vllm.v1.request import Request

        function = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(function)
        probe = kv_cache_utils.hash_block_tokens(function, None, HASH_PROBE_TOKENS).hex()
    except (ImportError, OSError, RuntimeError, ValueError, AttributeError) as error:
        raise CannotHash(
            f"prompts need the engine's vLLM in the environment of this command, hashes do not: {error}"
        ) from None
    if probe != engine.hash_probe:
        raise CannotHash(
            f"prompts are hashed otherwise here than in engine {engine.engine} ({algorithm}): give this command the "
            f"engine's vLLM and its PYTHONHASHSEED (here {os.environ.get('PYTHONHASHSEED', 'not set')}), or list hashes"
        )
    blocks = kv_cache_utils.get_request_block_hasher(size, function)

    def hashed(prompt: Prompt) -> list[bytes]:
        tokens = prompt.prompt_token_ids[: (len(prompt.prompt_token_ids) - 1) // size * size]
        one = SamplingParams(max_tokens=1)
        request: Any = Request(
            request_id="warm",
            prompt_token_ids=tokens,
            sampling_params=one,
            pooling_params=None,
            cache_salt=prompt.cache_salt,
            block_hasher=blocks,
        )
        return list(request.block_hashes)

    return hashed


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    """vLLM reads these when it is imported; processes that this one starts later must not inherit them."""
    before = dict(os.environ)
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        yield
    finally:
        for name in {"VLLM_LOGGING_STREAM", "VLLM_LOGGING_LEVEL"} - before.keys():
            del os.environ[name]
