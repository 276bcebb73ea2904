"""One blocking call as a record, and the engine that it runs for.

A pool's threads take a call, run it, and note its result; everything else here runs on the main loop.
"""

from __future__ import annotations

import enum
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ...shmring.errors import SegmentCorrupt

if TYPE_CHECKING:  # what tests on a GPU do without (docs/BENCHMARKS.md)
    from ..telemetry.logs import Log

_T = TypeVar("_T")
MAX_TRACEBACK = 4_000  # characters of a traceback in the log, the newest


class CallKind(enum.Enum):
    """Calls of one kind share threads, and wait for no other kind. The value names the threads."""

    LOOK_UP = "lookup"
    FETCH_MEMORY = "fetch-memory"
    FETCH_DISK = "fetch-disk"
    SAVE = "save"  # and removals, so that no put brings a removed key back
    ATTACH = "attach"  # memory, which must not wait behind a store call that hangs
    SLAB = "slab"  # device memory: one call at a time, as each goes by what is free then
    COPY = "copy"  # to device memory


FETCHES = (CallKind.FETCH_MEMORY, CallKind.FETCH_DISK)  # by lane


class EngineCalls:
    """One engine's calls: how many run, and whether their results still matter.

    `running`: until it is 0 the engine's memory stays mapped and registered.  `closing`: results go nowhere any more.
    `owes`: there is more of an event's work to do, or to say, at the next turn.  `broken`: nothing more is done for it
    but its end.  `corrupt`: because of this in the engine's memory; None where an exception says that the daemon itself
    is at fault.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self.running = 0
        self.closing = self.broken = self.owes = False
        self.corrupt: str | None = None

    def contain(self, work: Callable[..., _T], default: _T, *args: Any) -> _T:
        """Return what `work(*args)` returns; return `default`, and break the engine, if it raises anything.

        So no value from an engine's memory ends the loop, whichever check is missing, and no state that an exception
        left half changed is acted on.
        """
        if self.broken and not self.closing:
            return default
        try:
            return work(*args)
        except Exception as error:
            self._breaks(error)
        return default

    def _breaks(self, error: Exception) -> None:
        self.broken = True
        if isinstance(error, SegmentCorrupt):
            self.corrupt = self.corrupt or str(error)
        else:
            self.failed(error)

    def failed(self, error: Exception) -> None:
        """Log an exception that is a fault of the daemon's."""
        where = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
        self._log.error("engine.fault", error=repr(error), traceback=where)

    def take(self, event: Callable[..., _T], default: _T, *args: Any) -> _T:
        """Let something happen to the engine, as `contain` does, and then let it carry on."""
        result = default
        if self.broken and not self.closing:
            return default
        try:
            result = event(*args)
            self.carry_on()
        except Exception as error:
            self._breaks(error)
        return result

    def carry_on(self) -> None:
        """Do what is to be done after each event: nothing, unless there is more to an engine."""

    def job_failed(self, error: BaseException) -> None:
        """Log what a call raised, so that one faulty call takes no other with it."""
        self._log.error("job.failed", error=repr(error))


@dataclass(eq=False)
class Call:
    """One blocking call. `run` runs on a thread; what it returned, or raised, goes to `on_result` on the main loop.

    `on_overdue` comes before that, once, when the call is past its deadline; a call without it has no deadline.
    `engine`: None stands for the daemon itself; otherwise the pool counts it as `running` there.  The pool sets the
    rest.  `taken`: by the thread that runs the call, or by its refusal.
    """

    kind: CallKind
    run: Callable[[], Any]
    on_result: Callable[[Any], None]
    on_overdue: Callable[[], None] | None = None
    engine: EngineCalls | None = None
    started_ns: int = field(default=0, init=False)
    stuck: bool = field(default=False, init=False)
    done: bool = field(default=False, init=False)
    result: Any = field(default=None, init=False)  # what `run` returned, or the exception that it raised
    taken: threading.Lock = field(default_factory=threading.Lock, init=False)

    def runs_longer(self, than_ns: int, now_ns: int) -> bool:
        return self.started_ns > 0 and now_ns - self.started_ns >= than_ns and not self.done

    def finish(self, result: Any) -> None:
        """Hand the result in, unless its engine is gone."""
        if (engine := self.engine) is None:
            self.on_result(result)
            return
        engine.running -= 1
        if isinstance(result, BaseException):
            engine.job_failed(result)
        if not engine.closing:
            engine.take(self.on_result, None, result)

    def give_up(self) -> None:
        """Say that it is past its deadline, unless its engine is gone."""
        if self.on_overdue is None:
            return
        if self.engine is None:
            self.on_overdue()
        elif not self.engine.closing:
            self.engine.take(self.on_overdue, None)
