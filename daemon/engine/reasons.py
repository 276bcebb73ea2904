"""Why an engine's requests wait: what the store gave meanwhile, whether staging had room, who lost a block. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..planning.requests import Failure
from ..planning.runs import Lane
from ..store.errors import ErrorClass
from ..telemetry.trace import Work
from ..work.rates import Rates

_OF_A_NODE = (ErrorClass.TRANSFER, ErrorClass.UNDER_WAY)


class Reasons:
    """Of one engine. Times in ns, of one clock."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._starved_ns, self._since_ns = [0, 0], [0, 0]  # by lane; since when it is: 0, it is not

    def note_room(self, lane: Lane, now_ns: int, *, starved: bool) -> None:
        """Enter whether the lane's next fetch waits for room in staging."""
        if since_ns := self._since_ns[lane]:
            self._starved_ns[lane] += now_ns - since_ns
        self._since_ns[lane] = now_ns if starved else 0

    def work(self, lane: Lane, now_ns: int) -> Work:
        """Return what the lane did since the daemon started."""
        since_ns, meter = self._since_ns[lane], self._rates.fetches[lane]
        starved_ns = self._starved_ns[lane] + (now_ns - since_ns if since_ns else 0)
        return Work(lane, *meter.total(now_ns), starved_ns, meter.known.get("hour"))


def failure(outcome: Sequence[ErrorClass], aside: Collection[str]) -> Failure:
    """Say why a fetch failed: by its first block that did not come."""
    why = next(each for each in outcome if each is not ErrorClass.OK)
    return Failure(why.value, " ".join(sorted(aside)) if why in _OF_A_NODE else "")
