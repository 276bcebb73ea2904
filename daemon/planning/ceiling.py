"""The ceiling of waste: when so many fetched blocks went unused that prefetch must hold back. Pure."""

from __future__ import annotations

WINDOW = 16  # times the slots: of so many fetched blocks, older ones count half, those before them a quarter, and so on


class Ceiling:
    """Fetched blocks of one engine, and those of them that no request loaded; warmed ones aside.

    `share`: of the fetched blocks, at most so many may go unused; 1: no ceiling.  `unused`: staged blocks that no
    request holds and none loaded yet.  They count as wasted until one loads them.
    """

    def __init__(self, share: float, slot_count: int) -> None:
        self._share, self._window = share, WINDOW * slot_count
        self._fetched = self._wasted = 0.0
        self.unused = 0

    def fetched(self, blocks: int) -> None:
        self._fetched += blocks
        if self._fetched > self._window:
            self._fetched, self._wasted = self._fetched / 2, self._wasted / 2

    def wasted(self, blocks: int) -> None:
        """Note fetched blocks whose slots were given up before any load."""
        self._wasted += blocks

    @property
    def passed(self) -> bool:
        """Whether more blocks than `share` went unused, of the window or of half of it if so little was fetched."""
        most = self._share * max(self._fetched, self._window / 2)
        return self._share < 1 and self._wasted + self.unused > most
