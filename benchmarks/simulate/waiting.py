"""How long the scheduler waits at the head of the queue: the policies a simulation can choose from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.simulate.events import ns


@dataclass(frozen=True, slots=True)
class Wait:
    """What a policy may know at one visit of a request whose flag is still HINTED."""

    now_ns: int
    asked_ns: int
    ready_blocks: int
    """Blocks that could be loaded now, beyond the engine's own."""


# True: wait on, and look again when the flag moved or at the returned time.
Decide = Callable[[Wait], int | None]


def _best_effort(wait: Wait) -> int | None:
    return None


def _timeout(limit_s: float) -> Decide:
    def decide(wait: Wait) -> int | None:
        deadline = wait.asked_ns + ns(limit_s)
        return deadline if wait.now_ns < deadline else None

    return decide


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to serve a load. `decide` returns until when to wait, or None to take what is ready."""

    name: str
    says: str
    decide: Decide = _best_effort
    hints: bool = True
    """Whether a connector asks the daemon at all."""
    on_arrival: bool = True
    """Whether it does when the request arrives, or only when the scheduler reaches it."""
    direct: bool = False
    """No daemon: a look-up at the first visit, and the load once the KV blocks are allocated."""
    local: bool = False
    """Whether everything the store holds is in the engine's own cache."""


POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("local", "everything the store holds is in the engine's own cache (the ideal)", hints=False, local=True),
        Policy("recompute", "no connector", hints=False),
        Policy("no-prefetch", "as vLLM's own connector: looks up at the first visit, loads into allocated KV blocks",
               hints=False, direct=True),
        Policy("on-demand", "hint at the first scheduling visit instead of at arrival; waits up to 5 s", _timeout(5.0),
               on_arrival=False),
        Policy("best_effort", "prefetch; takes what is ready at the first visit"),
        Policy("timeout", "prefetch; waits up to 1 s", _timeout(1.0)),
        Policy("wait", "prefetch; waits up to 5 s", _timeout(5.0)),
    )
}  # fmt: skip
