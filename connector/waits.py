"""How long the scheduler waited for us: what each None cost its request, in passes over the queue.

vLLM asks about a request when it has a seat and tokens left for it, and a None costs the request this pass.  A pass
that ends without asking about it again has given its seats or tokens to others: it would not have been admitted there
whatever we say, so from then on it queues as it would without us.  A None therefore counts until it is asked about
again or until the end of the next pass, whichever comes first.  That the answer was there sooner helps nobody: the
scheduler does not look in between.
"""

from __future__ import annotations

from collections import Counter

from .claims import Entry


class Waits:
    """Counts `waits` and `wait_ns`, and for each hint its own `waited_ns`. All times are CLOCK_MONOTONIC ns."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._pass = 0
        self._before: list[Entry] = []  # told None in the pass before
        self._now: list[Entry] = []  # and in this one

    def told(self, entry: Entry, now_ns: int) -> None:
        """The request was answered None: it has to wait."""
        if not entry.waited:
            entry.waited = True
            self._counters["waits"] += 1
        entry.told_ns, entry.told_in = now_ns, self._pass
        self._now.append(entry)

    def over(self, entry: Entry, now_ns: int) -> None:
        """The request is asked about again, or ended: what its last None cost is known."""
        if entry.told_ns:
            waited, entry.told_ns = now_ns - entry.told_ns, 0
            self._counters["wait_ns"] += waited
            if entry.handle is not None:
                entry.handle.waited_ns += waited

    def pass_ended(self, now_ns: int) -> None:
        """Who was told None in the pass before and not asked about in this one does not wait for us any more."""
        for entry in self._before:
            if entry.told_in != self._pass:
                self.over(entry, now_ns)
        self._before, self._now = self._now, []
        self._pass += 1
