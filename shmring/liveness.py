"""Liveness: shared words say without a system call whether the other side is alive, hung or gone.

Gone: its control connection ended, and the thread that blocks on that connection stored the `*_GONE` word.
Hung: its heartbeat is too old (SIGSTOP, a GIL held by a foreign library); it may come back.
"""

from __future__ import annotations

import enum

from ._atomics import Words
from .layout import Line

HUNG_AFTER_NS = 5_000_000_000


class PeerState(enum.IntEnum):
    """A side's own state, in its `*_STATE` word."""

    STARTING = 0
    ACTIVE = 1
    CLOSING = 2


class PeerStatus(enum.Enum):
    """The other side's conclusion."""

    STARTING = "starting"
    ALIVE = "alive"
    HUNG = "hung"
    GONE = "gone"


# Plain names: an attribute of an enum class costs as much as a load.
_STARTING, _ACTIVE = int(PeerState.STARTING), int(PeerState.ACTIVE)
_ALIVE, _HUNG = PeerStatus.ALIVE, PeerStatus.HUNG


class Liveness:
    """One side's access to the liveness words of a segment. `now_ns` is CLOCK_MONOTONIC (time.monotonic_ns)."""

    def __init__(self, words: Words, *, consumer: bool) -> None:
        self._words = words
        self._load_acquire = words.load_acquire
        mine, peer = (Line.CONSUMER_BEAT, Line.PRODUCER_BEAT) if consumer else (Line.PRODUCER_BEAT, Line.CONSUMER_BEAT)
        self._my_beat, self._peer_beat = int(mine), int(peer)
        self._my_state = Line.CONSUMER_STATE if consumer else Line.PRODUCER_STATE
        self._peer_state = int(Line.PRODUCER_STATE if consumer else Line.CONSUMER_STATE)
        self._peer_gone = int(Line.PRODUCER_GONE if consumer else Line.CONSUMER_GONE)

    def beat(self, now_ns: int) -> None:
        # SYNC beat: read as it is, orders nothing
        self._words.store_release(self._my_beat, now_ns)

    def set_state(self, state: PeerState) -> None:
        # SYNC state: earlier stores visible with the state
        self._words.store_release(self._my_state, state)

    def peer_is_gone(self) -> None:
        """Record the end of the control connection, from the thread that saw it."""
        # SYNC gone: the watcher's earlier stores visible with the word
        self._words.store_release(self._peer_gone, 1)

    def peer(self, now_ns: int) -> PeerStatus:
        """Return the other side's status, by two or three acquire loads."""
        load = self._load_acquire
        # SYNC gone: the watcher's earlier stores visible with the word
        if load(self._peer_gone):
            return PeerStatus.GONE
        # SYNC state: earlier stores visible with the state
        state = load(self._peer_state)
        if state == _STARTING:
            return PeerStatus.STARTING
        if state != _ACTIVE:
            return PeerStatus.GONE
        # SYNC beat: read as it is, orders nothing
        # abs: a beat from the future must not read as alive for ever.
        return _HUNG if abs(now_ns - load(self._peer_beat)) > HUNG_AFTER_NS else _ALIVE
