"""Whose namespace it is: an engine is served, and saves, only where engines like it store.

Keys name model, ranks and tokens, and nothing else that a block's bytes depend on.  So beside the blocks lies one value
with the fingerprint of those who store there, put by whoever saves first.  An engine with another one gets nothing from
the store and saves nothing there, until that value is gone.  Every few seconds it is seen whether it still lies there,
so that a namespace that was emptied can have other owners, and in between beside every fetch and save (`mark`): what
was read or put while it was another's does not count.
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
from ..store.marks import Found, Mark
from ..telemetry.logs import Log
from .jobs import Jobs

LOOK_NS = 5_000_000_000
RETRY_NS = 500_000_000  # where the store could not say whose it is
# Looks without an owner before one who was kept out takes the place: an owner that lives, and whose values were
# removed, comes first.
PATIENCE = 3
TROUBLE_NS = 10_000_000_000  # without an answer that says whose it is, before somebody is told
_FINGERPRINT: TypeAdapter[dict[str, str]] = TypeAdapter(Fingerprint)


class Whose(enum.Enum):
    """ASKING: no answer is here yet. UNKNOWN: the store could not say. OURS: or nobody's, to who only reads."""

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
        log: Log, clock_ns: Callable[[], int], changed: Callable[[Whose], None], *, saves: bool,
    ) -> None:  # fmt: skip
        """`saves`: whether the engine may; one that never does claims nothing."""
        self._store, self._engine, self._prefix, self._mine = store, engine, key_prefix, dict(fingerprint)
        self._pools, self._jobs, self._log, self._clock_ns, self._changed = pools, jobs, log, clock_ns, changed
        self._saves = self._claims = saves
        self.whose = Whose.ASKING if fingerprint else Whose.OURS
        self.mark: Mark | None = None  # what lay there when it was read last; None: nothing is compared
        self.tell: Callable[[Notice], None] | None = None
        self.differences = ""  # while it is theirs
        self.trouble = ""  # why it has not been known for long
        self._claimed = not fingerprint
        self._doubted = False
        self._looking = False
        self._next_ns = 0
        self._trouble_ns = 0  # since when what the store says is of no use; 0: it is, or it says nothing
        self._ownerless = 0  # looks in a row

    @property
    def known(self) -> bool:
        """Whether the store may be asked: there was an answer, and no doubt since."""
        return self.whose is not Whose.ASKING and not self._doubted

    @property
    def saves_wait(self) -> bool:
        """Whether what is to be saved there waits for an answer."""
        return not self.known or self.whose is Whose.UNKNOWN or (self.whose is Whose.OURS and not self._claimed)

    @property
    def why_not(self) -> str:
        """Why nothing of it may be used now, or nothing."""
        if self.whose is Whose.OURS:
            return ""
        return "its namespace is another's" if self.differences else "the store has not said yet whose its keys are"

    def switch(self, saving: bool) -> None:
        """Whether it saves now."""
        before, self._claims = self._claims, self._saves and saving
        if self._claims and not before:
            self.look()

    def doubt(self) -> None:
        """What is marked does not lie there any more: nothing new until the store said who is there now."""
        self._doubted = self.whose is Whose.OURS
        self.look()

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
        claims = self._claims and (self.whose is not Whose.THEIRS or self._ownerless >= PATIENCE)
        value = _FINGERPRINT.dump_json(self._mine) if claims else b""
        settled = self.whose is Whose.OURS and not self._doubted and (self._claimed or not claims)
        work = partial(_look, self._store, self._prefix + FINGERPRINT, value, self.mark if settled else None)
        self._jobs.start(self._pools.fingerprint, work, partial(self._seen, claims), None, self._unseen)

    def _unseen(self, why: str = "") -> None:
        """The store cannot say, or not in time; or what it says is of no use."""
        now = self._clock_ns()
        self._next_ns = min(self._next_ns, now + RETRY_NS)
        if self.whose is Whose.ASKING or (self.whose is Whose.OURS and (why or self._doubted)):
            self._turn(Whose.UNKNOWN)
        if why and self.whose is Whose.UNKNOWN and not self.trouble:
            self._trouble_ns = self._trouble_ns or now
            if now - self._trouble_ns >= TROUBLE_NS:
                self.trouble = why
                self._log.warning("namespace.unknown", key_prefix=self._prefix, error=why)
                self._notice(f"nothing is loaded or saved: it is not known whose its keys are: {why}")

    def _seen(self, claims: bool, found: Found | Mark | None) -> None:
        self._looking = False
        if found is None:
            self._trouble_ns = 0
            self._unseen()
        elif isinstance(found, Mark):
            pass  # it lies there as before
        elif found.there and not found.value:
            self._unseen(f"what lies there cannot be read: if that lasts, remove it with what is stored: {self._purge}")
        elif not found.there and self.whose is Whose.THEIRS and self._ownerless < PATIENCE:
            self._ownerless += 1
        elif not found.there and claims:
            self._unseen("nothing lies there, and the store takes nothing: it has no room, or no owner of memory")
        else:
            self._decide(found)

    def _decide(self, found: Found) -> None:
        """By what lies there; where nothing does, it is served to who saves nothing."""
        self._ownerless = self._trouble_ns = 0
        self.mark, self._claimed = found.mark, found.there
        differences = _differences(self._mine, found.value) if found.there else ""
        if differences and differences != self.differences:
            self._log.warning("namespace.refused", key_prefix=self._prefix, differences=differences)
            self._notice(
                f"nothing is loaded or saved: engines unlike this one store under its keys: {differences}: give it a "
                f"cache_prefix of its own or, when they are gone for good, remove what they stored: {self._purge}",
                refused=True,
            )
        elif (self.differences or self.trouble) and not differences:
            self._log.info("namespace.served", key_prefix=self._prefix)
            self._notice("loads and saves again: its keys are its own now")
        self.differences, self.trouble = differences, ""
        self._turn(Whose.THEIRS if differences else Whose.OURS)

    @property
    def _purge(self) -> str:
        return f"kvprefetchd store purge --engine {self._engine} --yes"

    def _notice(self, text: str, *, refused: bool = False) -> None:
        if self.tell is not None:
            self.tell(Notice(text=text, refused=refused))

    def _turn(self, whose: Whose) -> None:
        before, doubted = self.whose, self._doubted
        self.whose, self._doubted = whose, False
        if whose is not before or doubted:
            self._changed(before)


def _look(store: Store, key: str, value: bytes, mark: Mark | None) -> Found | Mark | None:
    """What is marked, if it lies there still; else what lies there now. None: the store cannot say."""
    try:
        return mark if mark is not None and store.unchanged(mark) else store.put_once(key, value)
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
