"""Asynchronous loads end when the device's copies would: the scheduler's process says what is loaded, a worker waits.

A load's real end counts too: what a connector reports is held back until the modelled copy ends, and no longer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.lab.bed.timeline import Timeline

_TOLD = "bed_loads"


def tell() -> None:
    """Let vLLM's scheduler say with each step which requests begin an asynchronous load, and of which tokens."""
    original: Any = Scheduler.schedule
    if hasattr(original, "around"):
        return

    def schedule(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.connector is None:
            return original(self, *arguments, **options)
        allocated, external = self.connector.update_state_after_alloc, dict[str, int]()

        def noting(request: Any, blocks: Any, tokens: int) -> None:
            external[request.request_id] = tokens
            allocated(request, blocks, tokens)

        self.connector.update_state_after_alloc = noting
        try:
            output = original(self, *arguments, **options)
        finally:
            self.connector.update_state_after_alloc = allocated
        requests = [self.requests[name] for name, tokens in external.items() if tokens and name in self.requests]
        told = {
            each.request_id: (each.num_computed_tokens - external[each.request_id], each.num_computed_tokens)
            for each in requests
            if each.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        }
        setattr(output, _TOLD, told)
        return output

    schedule.around = original  # type: ignore[attr-defined]
    Scheduler.schedule = schedule  # type: ignore[method-assign]


class Loads:
    """A worker's asynchronous loads. `size`: bytes that tokens from a first to a last one have on this rank."""

    def __init__(self, clock: Callable[[], int], size: Callable[[int, int], int]) -> None:
        self._clock, self._size = clock, size
        self._ends_ns: dict[str, int] = {}
        self._held: set[str] = set()
        self.copied: set[str] = set()
        """Requests whose copies are over, so that no step needs to wait for them."""

    def begin(self, output: Any, timeline: Timeline | None, given_ns: int) -> None:
        """Begin the copies of the loads that a step brings, which came at that time."""
        for name, (first, end) in getattr(output, _TOLD, {}).items():
            if timeline is not None:
                self._ends_ns[name] = timeline.copy(self._size(first, end), given_ns)

    def arrived(self, output: KVConnectorOutput | None) -> KVConnectorOutput | None:
        """Return what a connector reports to the scheduler, without the loads whose copies still run."""
        now_ns, reported = self._clock(), self._held | set((output and output.finished_recving) or ())
        if not reported:
            return output
        self._held = {name for name in reported if self._ends_ns.get(name, 0) > now_ns}
        output = output or KVConnectorOutput()
        output.finished_recving = (reported - self._held) or None
        for name in output.finished_recving or ():
            if self._ends_ns.pop(name, None) is not None:
                self.copied.add(name)
        return output
