"""How much of something each user may take: a share of the time, and a burst after a quiet time.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SHARE = 0.1  # of the main loop's time, for the questions of one user
BURST_NS = 1_000_000  # more at a time would keep the GIL from the threads of store calls


@dataclass
class Budget:
    """What each user took lately, up to a `burst`; it fades by `share` in a ns. `now_ns` never falls."""

    share: float = SHARE
    burst: float = BURST_NS
    _used: dict[int, tuple[float, int]] = field(default_factory=dict)  # by user: how much counts, and when it did

    def left(self, uid: int, now_ns: int) -> float:
        return max(0.0, self.burst - self._level(uid, now_ns))

    def take(self, uid: int, wanted: int, now_ns: int) -> bool:
        """Enter so much, if it is left."""
        if may := self.left(uid, now_ns) >= wanted:
            self.spend(uid, wanted, now_ns)
        return may

    def spend(self, uid: int, used: int, now_ns: int) -> None:
        """Enter what this user took, such as the ns that a question cost."""
        self._used[uid] = (self._level(uid, now_ns) + used, now_ns)

    def tick(self, now_ns: int) -> None:
        """Forget the users of whom nothing counts any more."""
        self._used = {uid: used for uid, used in self._used.items() if self._level(uid, now_ns)}

    def _level(self, uid: int, now_ns: int) -> float:
        used, at_ns = self._used.get(uid, (0.0, now_ns))
        return max(0.0, used - self.share * (now_ns - at_ns))
