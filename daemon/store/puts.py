"""The puts in flight: a removal waits for those of its keys, since a put brings its keys when it returns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence


class Puts:
    """Any thread may call."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._keys: dict[object, Sequence[str]] = {}

    @contextlib.contextmanager
    def of(self, keys: Sequence[str]) -> Iterator[None]:
        """A put of these keys is in flight."""
        put = object()
        with self._state:
            self._keys[put] = keys
        try:
            yield
        finally:
            with self._state:
                del self._keys[put]
                self._state.notify_all()

    def wait(self, for_key: Callable[[str], object], timeout_s: float) -> bool:
        """Wait until no put of such a key is in flight; False when the time is up."""
        with self._state:
            return self._state.wait_for(
                lambda: not any(for_key(key) for keys in self._keys.values() for key in keys), timeout_s
            )
