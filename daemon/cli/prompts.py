"""Hashes a prompt's blocks as one engine does, by vLLM's own functions. The only importer of vllm here.

Another hash would name nothing in the store.  So the hasher first compares its hash of a block of known tokens with the
engine's (SchedulerInfo.hash_probe).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from ...shmring.wire.admin import Warmed
from ...shmring.wire.attach import HASH_PROBE_TOKENS
from .warm_file import Prompt


class CannotHash(ValueError):
    """No prompt can be hashed as this engine does; the text is one line."""


class PromptHasher:
    """Hashes prompts for one engine; the first prompt loads vLLM."""

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
    algorithm, size = engine.hash_algorithm, engine.block_tokens
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
