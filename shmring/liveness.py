"""Liveness: shared words say without a system call whether the other side is alive, hung or gone.

Gone: its control connection ended, and the thread that blocks on that connection stored the `*_GONE` word.
Hung: its heartbeat is too old (SIGSTOP, a GIL held by a foreign library); it may come back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import partial

from ._atomics import Words
from .layout import Line

HUNG_AFTER_NS = 5_000_000_000


class PeerState(enum.IntEnum):
    """A side's own state, in its `*_STATE` word."""

    STARTING = 0
    ACTIVE = 1
    CLOSING = 2


class PeerStatus(enum.IntEnum):
    """The other side's conclusion."""

    STARTING = 0
    ALIVE = 1
    HUNG = 2
    GONE = 3


class Liveness:
    """One side's access to the liveness words of a segment. `now_ns` is CLOCK_MONOTONIC (time.monotonic_ns)."""

    def __init__(self, words: Words, *, consumer: bool) -> None:
        self._words = words
        mine, peer = (Line.CONSUMER_BEAT, Line.PRODUCER_BEAT) if consumer else (Line.PRODUCER_BEAT, Line.CONSUMER_BEAT)
        self._my_beat = int(mine)
        self._my_state = Line.CONSUMER_STATE if consumer else Line.PRODUCER_STATE
        peer_state = Line.PRODUCER_STATE if consumer else Line.CONSUMER_STATE
        self._peer_gone = int(Line.PRODUCER_GONE if consumer else Line.CONSUMER_GONE)
        # status(now_ns): `peer` as a plain number, in one call of C.
        self.status: Callable[[int], int] = partial(
            words.peer, self._peer_gone, int(peer_state), int(peer), HUNG_AFTER_NS
        )

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
        """Return the other side's status, by at most three acquire loads."""
        return PeerStatus(self.status(now_ns))
