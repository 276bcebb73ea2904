"""Watches the names that others may remove: of the control socket, of the HTTP door's, and of the daemon's picture.

A cleaner of temporary files, or an operator, removes the file; the daemon would go on, and no new engine would find it.
So the name is made anew, after a pause in which health shows that it is missing.  In that pause another daemon may
begin to serve there: from then on all the names are its own, and this daemon leaves them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..config.model import ConfigError
from ..telemetry.logs import Log

PAUSE_NS = 4_000_000_000  # from the first look that misses a name to each try to make it


class Name(NamedTuple):
    """One name: its path, whether it is there and still ours, and what makes it anew (OSError, ConfigError)."""

    path: str
    there: Callable[[], bool]
    make: Callable[[], None]


class Names:
    """Looks at names, and makes those anew that are missing. Runs on the main loop.

    The first one is the control socket's: who has that one has the others, so they are made only while it is there.
    """

    def __init__(self, names: Sequence[Name], log: Log) -> None:
        self._names, self._log = names, log
        self._missing: dict[str, tuple[int, str]] = {}  # by path: when it is made anew, and why that failed

    def look(self, now_ns: int) -> list[str]:
        """Look at all of them, and return a line for each that is missing; called once a second."""
        for name in self._names:
            due_ns, why = self._missing.get(name.path, (0, ""))
            if name.there():
                if due_ns:
                    self._back(name)
            elif not due_ns:
                self._missing[name.path] = now_ns + PAUSE_NS, ""
                self._log.warning("name.missing", file=name.path)
            elif now_ns >= due_ns and (name is self._names[0] or self._names[0].path not in self._missing):
                self._make(name, now_ns, why)
        return [
            f"others removed it: file={path!r}: {why or 'it is made anew in some seconds'}"
            for path, (_, why) in self._missing.items()
        ]

    def _make(self, name: Name, now_ns: int, before: str) -> None:
        try:
            name.make()
        except (OSError, ConfigError) as error:
            if (why := str(error)) != before:
                self._log.warning("name.missing", file=name.path, error=why)
            self._missing[name.path] = now_ns + PAUSE_NS, why
        else:
            self._back(name)

    def _back(self, name: Name) -> None:
        del self._missing[name.path]
        self._log.info("name.back", file=name.path)
