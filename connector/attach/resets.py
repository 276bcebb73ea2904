"""The weights that an engine's keys name: after a reset, and after an update in place, by a digest of what they are.

At a reset the weights get an id that no others ever have, and the daemon hears it at once: nothing older is found or
stored any more.  Nothing else goes on before every rank has reported its digest (updates.py); then the daemon hears the
id that they have together, which engines with equal weights share.  Until then `generation` is ahead of what the daemon
was told, so that the hot paths need one comparison for both.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from ..identity.weights import combined
from ..words.metadata import OfReset, RankWeights
from .epoch import SchedulerEpoch
from .link import Link

log = logging.getLogger("vllm.kvprefetch")


class Weights(NamedTuple):
    """What the daemon is told: the weights since `generation`. `id`: 32 hex digits of the keys, "" since the start."""

    generation: int = 0
    id: str = ""


class News(Enum):
    """What ranks' reports mean. OTHERS: the weights were updated before anything was computed since the start.

    CHANGED: they have changed since the first step of the last reset, or of the start.
    """

    NOTHING = "nothing"
    OTHERS = "others"
    CHANGED = "changed"


class Resets:
    """`current` is replaced as a whole: the link's thread reads it for a hello.

    `generation`: the one that the daemon must have confirmed before anything is hinted, loaded or saved.  `step`: what
    the workers are to know.
    """

    def __init__(self, link: Link[SchedulerEpoch], world_size: int) -> None:
        self.current, self.generation, self.step = Weights(), 0, OfReset()
        self._link, self._world_size = link, world_size
        self._of_ranks = dict[int, RankWeights]()
        self._unproven = set[str]()  # ids that an update left as they were
        self._sent: tuple[int, Weights] | None = None

    def begin(self) -> None:
        """The weights may be others from now on, or will be before the next step."""
        self.current = Weights(self.generation + 1, uuid.uuid4().hex)
        self.generation += 2
        self.step = OfReset(self.step.number + 1)
        self._of_ranks.clear()

    def hear(self, reports: Mapping[int, RankWeights]) -> News:
        """Return what the reports of a step mean for what this engine computed before it."""
        mine = [each for each in reports.values() if each.number == self.step.number]
        if any(not each.digest for each in mine):
            log.warning(
                "kvprefetch: the weights were updated without a reset right before or after. This engine stores no KV "
                "that it computed before, but vLLM goes on with it: reset at each update"
            )
            return News.CHANGED
        if not mine or self.generation:
            return News.NOTHING
        self.generation = 1
        return News.OTHERS

    def agree(self, reports: Mapping[int, RankWeights]) -> None:
        """Note the ranks' digests. With that of the last rank the weights have their id."""
        self._of_ranks.update({rank: each for rank, each in reports.items() if each.number == self.step.number})
        if self.step.agreed or len(self._of_ranks) < self._world_size:
            return
        ranks = [each for _, each in sorted(self._of_ranks.items())]
        ident, what = combined([each.digest for each in ranks]), "which engines with equal weights share"
        if any(each.before for each in ranks) and combined([each.before or each.digest for each in ranks]) == ident:
            self._unproven.add(ident)
        if ident in self._unproven:
            ident = uuid.uuid4().hex
            what = "which no other engine has: an update left all values that are compared as they were"
        self.current, self.step = Weights(self.generation, ident), self.step._replace(agreed=True)
        log.info("kvprefetch: reset %d: later KV has the weights %s, %s", self.generation, ident, what)

    def tell(self, epoch: SchedulerEpoch | None) -> None:
        """Send the current weights to the daemon, once in an epoch, without waiting for the answer."""
        if epoch is None or not self.current.generation or self._sent == (epoch.number, self.current):
            return
        if self._link.send_reset(*self.current):
            self._sent = epoch.number, self.current
