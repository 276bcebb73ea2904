"""Keep our errors inside: what a method answers where it raises. The hooks that vLLM calls most guard themselves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ..shmring.errors import SegmentCorrupt

log = logging.getLogger("vllm.kvprefetch")

FAILED = "kvprefetch: %s failed; the engine goes on without it"

_F = TypeVar("_F", bound=Callable[..., Any])


def guarded(default: Any) -> Callable[[_F], _F]:
    """Return `default` (called, when it is callable) where the method raises."""

    def wrap(method: _F) -> _F:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception:
                log.exception(FAILED, method.__name__)
                return default() if callable(default) else default

        return call  # type: ignore[return-value]

    return wrap


def detaching(default: Any) -> Callable[[_F], _F]:
    """Where the daemon's memory cannot be right, drop the session and answer `default`."""

    def wrap(method: _F) -> _F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            try:
                return method(self, *args, **options)
            except SegmentCorrupt as error:
                self.detach(error)
                return default

        return call  # type: ignore[return-value]

    return wrap
