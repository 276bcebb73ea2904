"""Shared by the tests of deep queues: an engine beside its daemon, and a store filled for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab import control
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon, Record
from tests.lab.engine import Engine
from tests.lab.passes import Pass
from tests.lab.store import Store
from tests.support.auditor import Auditor, ask_daemon
from tests.support.waiting import eventually, poll

Prompts = Sequence[Sequence[int]]

# No request may wait past its deadline; the slack is for a thread that lost its core.
SLACK_S = 3.0


@dataclass(frozen=True)
class Pair:
    """An engine, the daemon it is attached to, and how long a request may wait there."""

    engine: Engine
    daemon: Daemon
    auditor: Auditor
    wait_s: float

    def run(self, prompts: Prompts, *, idle_timeout_s: float = 20.0, **options: Any) -> Pass:
        """Run a pass with an empty prefix cache: no request waits past the deadline, and afterwards nothing is held."""
        self.begin(prompts, **options)
        return self.finish(idle_timeout_s=idle_timeout_s)

    def begin(self, prompts: Prompts, **options: Any) -> None:
        """Begin a pass as :meth:`run` does, so that the caller can disturb it."""
        self.assert_idle()
        assert self.engine.reset_prefix_cache()
        self.engine.call("tests.e2e.probes:watch_waits")
        self.engine.begin(prompts, **options)

    def finish(self, *, idle_timeout_s: float = 20.0) -> Pass:
        """Return the pass that :meth:`begin` started, with the same checks as :meth:`run`."""
        result = self.collect()
        self.assert_idle(idle_timeout_s)
        return result

    def collect(self) -> Pass:
        """Do as :meth:`finish` does while something still holds the daemon's calls."""
        result = self.engine.finish()
        longest = self.engine.call("tests.e2e.probes:longest_wait_s")
        assert longest <= self.wait_s + SLACK_S, f"a request waited {longest:.1f} s of {self.wait_s} s"
        return result

    def assert_idle(self, timeout_s: float = 20.0) -> None:
        self.auditor.assert_idle(self.daemon.pid, self.daemon.socket, timeout_s)

    def wait_requests(self, count: int, timeout_s: float = 60.0) -> None:
        """Wait until the daemon knows exactly so many unfinished requests."""
        eventually(lambda: self.counters()["requests"] == count, timeout_s, f"{count} requests", pause_s=0.02)

    def counters(self) -> dict[str, int]:
        """Return the daemon's numbers of this engine, the only one attached."""
        [engine] = ask_daemon(self.daemon.socket).engines
        return {name: value for name, value in engine.items() if isinstance(value, int)}


def fill(pair: Pair, cluster: Store, *sets: Prompts) -> None:
    """Let the engine save all blocks of these prompts; return when the store holds each of them."""
    prompts = [prompt for each in sets for prompt in each]
    names = {key for prompt in prompts for key in control.block_keys(pair.engine.spec.model, list(prompt))}
    wanted = cluster.keys + len(names)
    for _ in range(4):  # a pass saves what it has credits for
        pair.run(prompts, max_tokens=1)
        if cluster.keys >= wanted:
            break
    assert cluster.keys == wanted


def patient(daemon: Daemon, wait_s: float, **extra: Any) -> dict[str, Any]:
    """Return a connector that lets requests wait up to `wait_s`, even if recomputing takes less."""
    return ours(daemon.socket, wait_timeout_ms=int(wait_s * 1000), **extra)


def wishing(**wishes: Any) -> dict[str, Any]:
    """Sampling parameters of requests with a wait policy, or a longest wait, of their own."""
    return {"extra_args": {"kv_transfer_params": {"kvprefetch": wishes}}}


def finished(result: Pass) -> bool:
    """Every request ran to its length."""
    return all(request.finish_reason == "length" for request in result.requests)


def traces(daemon: Daemon, result: Pass, indices: Sequence[int], timeout_s: float = 10.0) -> list[Record]:
    """The ``request.done`` lines of some requests of the last pass, in the order in which they were logged."""
    wanted = {result.requests[index].request_id for index in indices}

    def found() -> list[Record]:
        return [line for line in daemon.records("request.done") if line["request_id"].rpartition("-")[0] in wanted]

    poll(lambda: len({line["request_id"] for line in found()}) == len(wanted), timeout_s)
    return found()
