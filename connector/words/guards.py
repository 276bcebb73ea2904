"""Keep our errors inside: what a method answers where it raises. The hooks that vLLM calls most guard themselves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from ...shmring.errors import SegmentCorrupt

log = logging.getLogger("vllm.kvprefetch")

FAILED = "kvprefetch: %s failed; the engine goes on without it"

_F = TypeVar("_F", bound=Callable[..., Any])


def guarded(default: Any) -> Callable[[_F], _F]:
    """Return `default` (called, when it is callable) where the method raises."""
    return _kept(Exception, lambda side, method, error: log.error(FAILED, method.__name__, exc_info=error), default)


def detaching(default: Any) -> Callable[[_F], _F]:
    """Where the daemon's memory cannot be right, drop the epoch and answer `default`."""
    return _kept(SegmentCorrupt, lambda side, method, error: side.detach(error), default)


def _kept(kind: type[Exception], note: Callable[[Any, Any, Exception], object], default: Any) -> Callable[[_F], _F]:
    def wrap(method: _F) -> _F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **options: Any) -> Any:
            try:
                return method(self, *args, **options)
            except kind as error:
                note(self, method, error)
                return default() if callable(default) else default

        return call  # type: ignore[return-value]

    return wrap
