"""Whose namespace it is: an engine is served, and saves, only where engines like it store.

Keys name model, ranks and tokens, and nothing else that a block's bytes depend on.  So beside the blocks lies one value
with the fingerprint of those who store there, put by whoever comes first.  An engine with another one gets nothing from
the store and saves nothing there, until that value is gone; it is looked at every few seconds, so that a namespace that
was emptied can have other owners, and so that it outlives the blocks in a store that evicts what is not used.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from functools import partial

from pydantic import TypeAdapter, ValidationError

from ...shmring.messages import Fingerprint, Notice
from ..pools import Pools
from ..store.buckets import FINGERPRINT
from ..store.client import Store, StoreUnavailable
from ..telemetry.logs import Log
from .jobs import Jobs

LOOK_NS = 5_000_000_000
RETRY_NS = 500_000_000  # where the store could not say whose it is
# Looks without an owner before one who was kept out takes the place: an owner that lives, and whose values were
# removed, comes first.
PATIENCE = 3
_FINGERPRINT: TypeAdapter[dict[str, str]] = TypeAdapter(Fingerprint)


class Whose(enum.Enum):
    """ASKING: the first answer is not here yet. UNKNOWN: the store could not say."""

    ASKING = enum.auto()
    UNKNOWN = enum.auto()
    OURS = enum.auto()
    THEIRS = enum.auto()


class Namespace:
    """The namespace of one engine's first rank, and whose it is. `changed` hears what `whose` was, when it changes.

    Without a fingerprint nothing is compared, and the namespace counts as its own.
    """

    def __init__(
        self, store: Store, engine: str, key_prefix: str, fingerprint: Mapping[str, str], pools: Pools, jobs: Jobs,
        log: Log, clock_ns: Callable[[], int], changed: Callable[[Whose], None],
    ) -> None:  # fmt: skip
        self._store, self._engine, self._prefix, self._mine = store, engine, key_prefix, dict(fingerprint)
        self._pools, self._jobs, self._log, self._clock_ns, self._changed = pools, jobs, log, clock_ns, changed
        self.whose = Whose.ASKING if fingerprint else Whose.OURS
        self.tell: Callable[[Notice], None] | None = None
        self.differences = ""  # while it is theirs
        self._looking = False
        self._next_ns = 0
        self._ownerless = 0  # looks in a row

    @property
    def why_not(self) -> str:
        """Why nothing of it may be used now, or nothing."""
        if self.whose is Whose.OURS:
            return ""
        return "its namespace is another's" if self.differences else "the store has not answered yet"

    def look(self) -> None:
        """Whenever the last look was: the namespace is to be used, or was emptied."""
        self._next_ns = 0
        self.tick()

    def tick(self) -> None:
        """Look when it is time to, and the store answers; not for an engine that is gone, and with it its claim."""
        now = self._clock_ns()
        if not self._mine or self._looking or self._jobs.closing or now < self._next_ns or not self._store.answering:
            return
        self._looking, self._next_ns = True, now + LOOK_NS
        waits = self.whose is Whose.THEIRS and self._ownerless < PATIENCE
        value = b"" if waits else _FINGERPRINT.dump_json(self._mine)
        work = partial(_look, self._store, self._prefix + FINGERPRINT, value)
        self._jobs.start(self._pools.fingerprint, work, self._seen, None, self._unseen)

    def _unseen(self) -> None:
        """The store cannot say, or not in time."""
        self._next_ns = min(self._next_ns, self._clock_ns() + RETRY_NS)
        if self.whose is Whose.ASKING:
            self._turn(Whose.UNKNOWN)

    def _seen(self, found: bytes | None) -> None:
        self._looking = False
        if found == b"" and self.whose is Whose.THEIRS:
            self._ownerless += 1
            return
        if not found:
            self._unseen()
            return
        self._ownerless = 0
        differences = _differences(self._mine, found)
        if differences and differences != self.differences:
            self._log.warning("namespace.refused", key_prefix=self._prefix, differences=differences)
            self._notice(
                f"nothing is loaded or saved: engines unlike this one store under its keys: {differences}: give it a "
                "cache_prefix of its own or, when they are gone for good, remove what they stored: "
                f"kvprefetchd store purge --engine {self._engine} --yes"
            )
        elif self.differences and not differences:
            self._log.info("namespace.served", key_prefix=self._prefix)
            self._notice("loads and saves again: those engines, and what they stored, are gone")
        self.differences = differences
        self._turn(Whose.THEIRS if differences else Whose.OURS)

    def _notice(self, text: str) -> None:
        if self.tell is not None:
            self.tell(Notice(text=text))

    def _turn(self, whose: Whose) -> None:
        before, self.whose = self.whose, whose
        if whose is not before:
            self._changed(before)


def _look(store: Store, key: str, value: bytes) -> bytes | None:
    try:
        return store.put_once(key, value)
    except StoreUnavailable:
        return None


def _differences(mine: Mapping[str, str], found: bytes) -> str:
    """What an owner says otherwise, in one line; "" for nothing. What only one of them names is not compared."""
    try:
        theirs = _FINGERPRINT.validate_json(found)
    except ValidationError:
        return "what lies there is no fingerprint"
    differing = sorted(name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name])
    return ", ".join(f"{name}={theirs[name]} here={mine[name]}" for name in differing)
