"""How much of the main loop's time the questions of one user may take: a share, and a burst after a quiet time.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SHARE = 0.1
BURST_NS = 20_000_000


@dataclass
class Budget:
    """The time that each user's questions took lately, which fades at SHARE. Times are ns; `now_ns` never falls."""

    _used: dict[int, tuple[float, int]] = field(default_factory=dict)  # by user: ns that count, and when they did

    def left(self, uid: int, now_ns: int) -> bool:
        """Whether the loop may answer another question of this user now."""
        return self._level(uid, now_ns) < BURST_NS

    def spend(self, uid: int, used_ns: int, now_ns: int) -> None:
        """Enter a question that took `used_ns` to answer."""
        self._used[uid] = (self._level(uid, now_ns) + used_ns, now_ns)

    def tick(self, now_ns: int) -> None:
        """Forget the users whose questions do not count any more."""
        self._used = {uid: used for uid, used in self._used.items() if self._level(uid, now_ns)}

    def _level(self, uid: int, now_ns: int) -> float:
        used_ns, at_ns = self._used.get(uid, (0.0, now_ns))
        return max(0.0, used_ns - SHARE * (now_ns - at_ns))
