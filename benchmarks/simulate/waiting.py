"""The policies that a simulation compares: the connector's wait policies, late or no hints, and the ideal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvprefetch.connector.policy import Policy as WaitName


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to serve a load. `wait` is the connector's policy; the flags choose the other differences."""

    name: str
    says: str
    wait: WaitName = "adaptive"
    timeout_ms: int = 5000
    hints: bool = True
    """Whether a connector asks the daemon at all."""
    on_arrival: bool = True
    """Whether it asks when the request arrives, or only when the scheduler reaches it."""
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
        Policy("on-demand", "adaptive, but the hint is sent at the first scheduling visit", on_arrival=False),
        Policy("on-demand-wait", "wait, but the hint is sent at the first scheduling visit", "wait", on_arrival=False),
        Policy("best_effort", "takes what is ready at the first visit", "best_effort"),
        Policy("timeout", "waits up to 5 s", "timeout"),
        Policy("wait", "waits for the fetch to end", "wait"),
        Policy("adaptive", "weighs the blocks' pace against recomputing them (the default)"),
    )
}  # fmt: skip
