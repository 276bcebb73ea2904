"""How long a pass of vLLM's scheduler may wait for blocks at no cost: the step under way runs on meanwhile. Pure.

With asynchronous scheduling vLLM launches a step while the one before it runs, and then has nothing to do.  A request
whose fetch ends before that is loaded in this pass, and so in no later step than one with all its KV local.

A step under way began when the one before it ended, or at its launch, and takes as long as such steps took lately.  The
wait ends at SHARE of it, or in time for the copy to end with it, less LAUNCH_NS.  Where the pass or the step under way
then ends late all the same, because the machine has no core to spare, nothing waits for a while: PAUSED_STEPS, and
twice as many each time.
"""

from __future__ import annotations

import math
from typing import Any

from ..engine import compat
from ..engine.steps import StepTimes
from .request_state import SAVING, RequestState

SHARE = 0.75
# No step counts for more: one that took seconds (a kernel that is compiled, a process that stood still) is in the
# averages for a while, and the next ones do not take as long.
LONGEST_NS = 500_000_000
LAUNCH_NS = 2_000_000  # from the end of a pass to the launch of its step; the step under way ends later than that
PAUSED_STEPS = (64, 8192)  # the first pause, and the longest


class Slack:
    """One engine's. `allowed`: it schedules asynchronously, waits for no other engine, and has one pipeline stage.

    `overlap`: see `Geometry.fenced_blocks`.  `grammars`: requests with one that were admitted.
    """

    def __init__(self, steps: StepTimes, *, allowed: bool, overlap: bool = False) -> None:
        self._steps, self.allowed, self._overlap = steps, allowed, overlap
        self.grammars: set[RequestState] = set()
        # Of a pass that waited, until its step has ended: ends of its wait, of the step under way.
        self.expected: tuple[float, float] | None = None
        self._launched: tuple[int, int] | None = None  # its step, and when it ended, or 0 where that was late
        self._copied_ns = 0.0  # when all copies that were ordered have probably ended
        self._paused_until, self._pause = 0, PAUSED_STEPS[0]

    def until_ns(self, state: RequestState, now_ns: int, copy_ns: float = 0.0) -> float:
        """Until when the pass may wait for this request; 0 for not at all. `copy_ns`: how long its copy will take.

        A grammar's next token is computed between two steps, so the scheduler is not ahead of the device.
        """
        if not self.allowed or self._steps.begun < self._paused_until:
            return 0.0
        began_ns, duration_ns = self._steps.under_way()
        if not began_ns or state.request.use_structured_output:
            return 0.0
        if any(each.phase >= SAVING for each in self.grammars):
            return 0.0
        duration_ns = min(duration_ns, LONGEST_NS)
        waits_ns = SHARE * duration_ns
        if self._overlap:
            left_ns = duration_ns - max(0.0, self._copied_ns - now_ns)
            waits_ns = min(waits_ns, left_ns - copy_ns if copy_ns < left_ns - LAUNCH_NS else left_ns)
        return began_ns + waits_ns - LAUNCH_NS

    def hidden_ns(self, now_ns: int) -> float:
        """For how long the step under way probably runs beside one more copy; 0 or less for not at all."""
        began_ns, duration_ns = self._beside()
        return began_ns + min(duration_ns, LONGEST_NS) - LAUNCH_NS - max(now_ns, self._copied_ns) if began_ns else 0.0

    def copies(self, now_ns: int, copy_ns: float) -> None:
        """One more load is ordered. Copies wait for each other, those beside a forward, too; inf: it is not known."""
        if copy_ns < math.inf:
            self._copied_ns = max(now_ns, self._copied_ns) + copy_ns

    def overlaps(self, output: Any) -> bool:
        """Whether the copies of this pass may run beside the step under way. `output`: vLLM's, of this pass."""
        return self._beside()[0] > 0 and not compat.changes_blocks(output)

    def _beside(self) -> tuple[int, float]:
        """As `StepTimes.under_way`, where copies may run beside that step."""
        return self._steps.under_way() if self._overlap and self.allowed else (0, 0.0)

    def waited(self, until_ns: float) -> None:
        """This pass did wait, at most until then."""
        began_ns, duration_ns = self._steps.under_way()
        self.expected = until_ns, began_ns + duration_ns * (2.0 - SHARE)

    def launched(self, now_ns: int) -> None:
        """The pass that waited has ended, and its step is launched."""
        assert self.expected is not None
        self._launched = self._steps.begun, now_ns if now_ns < self.expected[0] + LAUNCH_NS else 0

    def ended(self, now_ns: int) -> bool:
        """The output of the oldest step in flight is there. Return whether the launch behind it seems to be late."""
        if self._launched is None or self.expected is None or self._steps.passed + 1 < self._launched[0] - 1:
            return False
        launched_ns, ends_ns = self._launched[1], self.expected[1]
        late = not launched_ns or now_ns - launched_ns < LAUNCH_NS or now_ns > ends_ns
        self.expected = self._launched = None
        if late:
            self._paused_until = self._steps.begun + self._pause
        self._pause = min(2 * self._pause, PAUSED_STEPS[1]) if late else max(self._pause // 2, PAUSED_STEPS[0])
        return late
