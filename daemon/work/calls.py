"""The blocking store jobs of one engine: counted, and what goes wrong in one of them stays with that engine.

Everything here runs on the main loop.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ...shmring.errors import SegmentCorrupt

if TYPE_CHECKING:  # what tests on a GPU do without (docs/PERFORMANCE.md)
    from ..telemetry.logs import Log

_T = TypeVar("_T")


class Jobs:
    """Store jobs in flight, in whose name they are handed to the pools, and whether their results still matter.

    `running`: until it is 0 the engine's staging stays mapped and registered.  `closing`: results go nowhere any more.
    `corrupt`: what was found wrong with the engine's memory.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.running = 0
        self.closing = False
        self.corrupt: str | None = None

    def contain(self, work: Callable[[], _T], default: _T) -> _T:
        """Do what reads this engine's memory: when that turns out corrupt, this epoch is over and nothing else."""
        try:
            return work()
        except SegmentCorrupt as error:
            self.corrupt = self.corrupt or str(error)
            return default

    def start(
        self, submit: Callable[..., None], job: Callable[[], Any], done: Callable[[Any], None], failed: Any,
        overdue: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """Run a store job; until it returns, past its deadline too, it counts as running.

        `failed` stands for the result when the job raised: one faulty call must not take other requests with it.
        `overdue` comes first, and once, when the call is past its deadline.
        """
        self.running += 1

        def finished(future: Future[Any]) -> None:
            self.running -= 1
            if (error := future.exception()) is not None:
                self._log.error("job.failed", error=repr(error))
            if not self.closing:
                self.contain(partial(done, failed if error is not None else future.result()), None)

        def late() -> None:
            if not self.closing and overdue is not None:
                self.contain(overdue, None)

        submit(job, finished, late if overdue is not None else None, self)
