"""Removes all keys of some prefixes, and their files on disk, which the master does not know.

The master forgets an object at once, but no file of a disk goes with it, and the next start would find the object
again.  So a removal deletes the matching bucket files of this process's own disk too, and repeats the sweep until two
heartbeats of the disk brought nothing back: Mooncake registers a value again when its way to disk ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .errors import StoreUnavailable
from .namespaces import name_of
from .recent_keys import RecentKeys

_OF_A_KEY = rb"[ -~\x80-\xff]"
_MAX_LEAST_MS = 600_000


class Removal(NamedTuple):
    """Whether every key is `gone` (its truth value), and how many `keys` were removed."""

    gone: bool
    keys: int

    def __bool__(self) -> bool:
        return self.gone


class Calls(Protocol):
    """The store's calls that a removal makes; each raises StoreUnavailable."""

    def exist(self, keys: Sequence[str]) -> list[bool]: ...
    def described(self, keys: Sequence[str]) -> list[Sequence[Any]]: ...
    def remove(self, pattern: str) -> int: ...


class Removals:
    """The removals of one store, which need to know its recent keys and the puts in flight. Any thread may call.

    A key is seen when a question finds it or a put stores it; nobody reads a key sooner.  A put returns with its keys
    in the store, so a removal waits for the puts of its keys.
    """

    def __init__(self, disk: Path | None, log: Any, clock: Callable[[], float]) -> None:
        """`disk`: the folder of this process's own disk. `clock`: seconds, monotonic."""
        self._disk, self._log, self._clock = disk, log, clock
        heartbeat_s = float(os.environ.get("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "10"))
        self._settle_s = 2 * heartbeat_s + 0.5 if disk else 0.0
        # How long a removal takes at least; half a second is for the calls.
        self.least_ms = min(_MAX_LEAST_MS, int(1e3 * (self._settle_s + 0.5))) if disk else 0
        self.seen = RecentKeys()
        self._state = threading.Condition()
        self._puts: dict[object, Sequence[str]] = {}

    @contextlib.contextmanager
    def putting(self, keys: Sequence[str]) -> Iterator[None]:
        put = object()
        with self._state:
            self._puts[put] = keys
        try:
            yield
        finally:
            with self._state:
                del self._puts[put]
                self._state.notify_all()

    def run(self, calls: Calls, prefixes: Sequence[str], timeout_s: float) -> Removal:
        """Sweep until nothing comes back or the time is up."""
        theirs, a_key = patterns(prefixes)
        ours = re.compile(rf"{a_key}\Z").match
        deadline = self._clock() + timeout_s
        with self._state:
            if not self._state.wait_for(
                lambda: not any(ours(key) for keys in self._puts.values() for key in keys), timeout_s
            ):
                return Removal(False, 0)
        seen = [key for key in self.seen.all() if ours(key)]
        quiet_since: float | None = None
        durable, checked, most = True, set[str](), 0  # what comes back was counted before
        while True:
            with contextlib.suppress(StoreUnavailable):
                if self._disk is None and quiet_since is None:
                    durable = all(each.is_memory_replica() for replicas in calls.described(seen) for each in replicas)
                count = calls.remove(theirs)
                files = purge(self._disk, a_key, checked) if self._disk else 0
                most, now = max(most, count, files), self._clock()
                if count or files or quiet_since is None or any(calls.exist(seen)):
                    quiet_since = now
                elif now - quiet_since >= self._settle_s:
                    self.seen.discard(seen)
                    self._log.info("store.removed", prefixes=len(prefixes), durable=durable)
                    return Removal(durable, most)
            if self._clock() >= deadline:
                return Removal(False, most)
            time.sleep(0.1)


def patterns(prefixes: Sequence[str]) -> tuple[str, str]:
    """Return regular expressions for keys, one of these prefixes and hex digits: Mooncake's, anchored, and Python's.

    They match the keys of all ranks: a part that stayed would count as a part of a block that is stored later.
    """
    names = dict.fromkeys(map(name_of, prefixes))
    # Every special character of ECMAScript's grammar, and nothing else: std::regex refuses needless escapes of letters.
    theirs = [re.sub(r"([\\^$.|?*+()\[\]{}])", r"\\\1", name) for name in names]
    of_any = [
        "|".join(re.sub(r"@([tp]p_rank):\\\*(?=@)", r"@\1:[0-9*]+", each) for each in escaped)
        for escaped in (theirs, map(re.escape, names))
    ]
    return f"^(?:{of_any[0]})[0-9a-fA-F]+$", f"(?:{of_any[1]})[0-9a-fA-F]+"


def purge(directory: Path, a_key: str, checked: set[str]) -> int:
    """Delete the bucket files with a key that `a_key`, a regular expression, matches as a whole; return their number.

    `checked` keeps the names of files without such a key.  Mooncake's bucket backend writes `<id>.bucket` with the
    values and `<id>.meta` with the keys as plain bytes (protobuf), control characters before and behind; the embedded
    store keeps one key in each.  The .meta goes first: the next start ignores a .bucket without one.
    """
    pattern = re.compile(rb"(?<!%b)%b(?!%b)" % (_OF_A_KEY, a_key.encode(), _OF_A_KEY))
    deleted = 0
    for meta in directory.glob("*.meta"):
        if meta.name in checked:
            continue
        with contextlib.suppress(FileNotFoundError):  # Mooncake evicted it meanwhile
            content = meta.read_bytes()
            if pattern.search(content):
                meta.unlink()
                meta.with_suffix(".bucket").unlink(missing_ok=True)
                deleted += 1
            elif content:  # an empty one is being written
                checked.add(meta.name)
    return deleted
