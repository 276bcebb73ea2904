"""The ways to get a prompt's KV that are compared: without a store, vLLM's own connector, LMCache, and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.bench.setting import Setting
from tests.lab import connectors

LOCAL, RECOMPUTED = "local", "recomputed"
OURS = "kvprefetch"
ON_DEMAND = "kvprefetch-on-demand"
SESSIONS = "kvprefetch-sessions"  # the requests name their sessions
UPSTREAM = ("upstream-sync", "upstream-async")
LMCACHE = ("lmcache", "lmcache-eager")
# What our connector is given, beyond what all of ours have.
OPTIONS: dict[str, dict[str, Any]] = {
    ON_DEMAND: {"hint_on_arrival": False, "wait_policy": "wait"},
    OURS: {"wait_policy": "adaptive"},
    "kvprefetch-wait": {"wait_policy": "wait"},
    SESSIONS: {"wait_policy": "adaptive"},
}
ALL = (LOCAL, RECOMPUTED, *UPSTREAM, *LMCACHE, *OPTIONS)
DEFAULT = (LOCAL, "upstream-async", ON_DEMAND, OURS)
# They load whatever the store has, so their hits are known beforehand.
PATIENT = {LOCAL, *UPSTREAM, *LMCACHE, ON_DEMAND, "kvprefetch-wait"}


def ours(variant: str) -> bool:
    """Whether it is our connector."""
    return variant in OPTIONS


def bare(variant: str) -> bool:
    """Whether its engine has no connector."""
    return variant in (LOCAL, RECOMPUTED)


def left_out(variant: str, setting: Setting, lmcache_python: Path | None) -> str | None:
    """Why the variant cannot run at this point, or None if it can."""
    if variant in LMCACHE:
        if lmcache_python is None:
            return "no interpreter with LMCache was given (--lmcache-python)"
        if setting.hit < 1:
            return "LMCache has no mode that only loads: it would store what the point wants missing"
    if setting.far == "disk" and not (ours(variant) or bare(variant)):
        return "the slow disk is the daemon's own"
    return None


def transfer(variant: str, socket: Path, **more: Any) -> dict[str, Any] | None:
    """The engine's `kv_transfer_config`. All only load, so that a pass leaves the store as it was.

    LMCache's comes from its server (tests/lab/lmcache.py).  `more`: options of our connector.
    """
    if variant in OPTIONS:
        return connectors.ours(socket, role="kv_consumer", key_format="vllm", **{**more, **OPTIONS[variant]})
    if variant in UPSTREAM:
        return connectors.upstream(role="kv_consumer", lookup_async=variant == "upstream-async")
    return None
