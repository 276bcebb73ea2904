"""Runs of the campaign: one fault each, while two engines serve, judged from outside of the product.

The world is a Mooncake master, a storage node behind a link, a daemon, and two engines.  The fault's victim is one of
them, or a process of the first engine; the second engine is the neighbour.  A run ends when everything is there again,
and both engines have their hits back.
"""

from __future__ import annotations

import os
import resource
import select
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvprefetch.client import Client
from tests.faults.faults import OF_ENGINE, OF_STORE, SIGNALS, Fault, Verdict
from tests.faults.points import POINTS, VARIABLE, Point, Trigger
from tests.lab import link, process
from tests.lab.checkpoint import TINY, make_checkpoint
from tests.lab.connectors import ours
from tests.lab.daemon import Daemon
from tests.lab.engine import Engine, EngineError, EngineSpec
from tests.lab.link import LimitedLink
from tests.lab.passes import Pass
from tests.lab.prompts import make_prompts
from tests.lab.store import Store
from tests.lab.template import Template
from tests.support import auditor
from tests.support.waiting import poll

LINK_MBIT, CRAWL_MBIT = 200.0, 0.5
LOST_PERCENT = 10
STORM = 3  # deaths of the daemon in a row
STEP_S = 0.25  # that a step may take longer than the longest one without a fault
NOTICED_MS = 100.0
REACHED_S = 20.0
# Until the daemon's picture must show that this is down; an idle daemon asks the master every ten seconds.
LOOKED_S = {"daemon": 4.0, "master": 15.0}
QUIET = ("master", "stop")  # it may be back before the daemon asked it
WELL_S = 90.0  # until all is as before: a transfer whose peer is gone waits inside Mooncake for up to 60 s
BLOCK, TOKENS = 32, 8
[FETCH] = (point for point in POINTS if point.name == "fetch begun")
PASSES = 3  # without a fault, to compare with
STAGING = "8MiB"  # for half of the prompts, so that each pass fetches


class Site:
    """An engine of the world with its prompts, of which `right` are the tokens."""

    def __init__(self, engine: Engine, prompts: list[list[int]], right: list[list[int]]) -> None:
        self.engine, self.prompts, self.right = engine, prompts, right
        self.hits = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)
        self.step_s = self.p99_s = 0.0  # without a fault

    def begin(self, prompts: Sequence[list[int]] = ()) -> None:
        """Serve its prompts, and some more."""
        assert self.engine.reset_prefix_cache()
        self.engine.call("tests.e2e.probes:watch_steps")
        self.engine.begin([*self.prompts, *prompts], max_tokens=TOKENS)

    def finish(self) -> tuple[Pass, float]:
        """Return the pass and its longest step."""
        return self.engine.finish(), float(self.engine.call("tests.e2e.probes:longest_step_s"))


class World:
    """Use as a context manager. `slack_s`: more than the bounds of times, on a machine that does other things, too.

    `plain`: an engine of `template` without a connector, which has the model of the world's own.
    """

    def __init__(
        self,
        scratch: Path,
        seed: int = 1,
        *,
        slack_s: float = 0.0,
        template: Template | None = None,
        plain: Engine | None = None,
    ) -> None:
        self._scratch, self._slack_s = scratch, slack_s
        self._given = template, plain
        self._undo = ExitStack()
        self.trigger = Trigger(scratch / "faults")
        os.environ[VARIABLE] = str(scratch / "faults")
        self._seed = 1_000_000 * seed
        self._judge = auditor.Auditor()
        self._without_link = link.available()

    def __enter__(self) -> World:
        enter = self._undo.enter_context
        with self._undo:
            model = make_checkpoint(self._scratch / "model", TINY)
            self._spec = EngineSpec(model=model, prepare="tests.faults.points:install")
            template, plain = self._given
            self._template = template or enter(Template(self._spec.environment()))
            self._plain = plain or enter(Engine(EngineSpec(model=model), template=self._template))
            self._link = enter(LimitedLink(rate_mbit=LINK_MBIT)) if self._without_link is None else None
            self.store = enter(Store(memory="512 MB", link=self._link))
            extra = ("--save-share", "0.5", "--call-timeout-ms", "2000")
            self.daemon = Daemon(mooncake_config=self.store.config, staging=STAGING, extra=extra)
            self.daemon.argv[1:3] = ["-m", "tests.faults.points"]
            enter(self.daemon)
            self.client = Client(self.daemon.socket)
            self.first = self._site(12, seed=81, own_worker=True)
            self.second = self._site(8, seed=82, own_worker=False)
            self._undo.callback(lambda: self.first.engine.stop())
            self._undo.callback(lambda: self.second.engine.stop())
            self.fill()
            self._learn()
            self._opened = self._undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self._opened.close()
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _site(self, count: int, *, seed: int, own_worker: bool) -> Site:
        prompts = make_prompts(count, 300, seed=seed)
        engine = self._engine(own_worker)
        return Site(engine, prompts, self._plain.run(prompts, max_tokens=TOKENS).tokens)

    def _engine(self, own_worker: bool) -> Engine:
        kv_transfer = ours(self.daemon.socket, wait_timeout_ms=1_000)
        engine = Engine(self._spec.but(kv_transfer=kv_transfer, own_worker=own_worker), template=self._template)
        engine.start()
        assert poll(lambda: engine.call("tests.e2e.probes:attached"), 30), "the engine does not attach"
        return engine

    def fill(self) -> bool:
        """Serve until both engines find all of their prompts in the store; False if they do not in time."""
        deadline = time.monotonic() + WELL_S
        while time.monotonic() < deadline:
            served = [self._served(site) for site in (self.first, self.second)]
            if all(served):
                return True
        return False

    def _served(self, site: Site) -> bool:
        """Serve a pass, and return whether it found all, and fetched some of that."""
        before = self.trigger.passed()[FETCH]
        site.begin()
        result, _ = site.finish()
        poll(lambda: not self.held(), 5)
        assert result.tokens == site.right, "wrong tokens without a fault"
        return sum(result.cached_tokens) == site.hits and self.trigger.passed()[FETCH] > before

    def _learn(self) -> None:
        """Measure passes without a fault."""
        sites = (self.first, self.second)
        steps: dict[Site, list[float]] = {site: [] for site in sites}
        lasts: dict[Site, list[float]] = {site: [] for site in sites}
        before, self._passages = self.trigger.passed(), dict[Point, int]()
        for _ in range(PASSES):
            self.first.begin(self._new())
            self.second.begin()
            for site in sites:
                result, step_s = site.finish()
                steps[site].append(step_s)
                lasts[site].append(result.ttft_s(0.99))
            self._well()
        for site in sites:
            site.step_s, site.p99_s = max(steps[site]), statistics.median(lasts[site])
        for point, count in self.trigger.passed().items():
            self._passages[point] = (count - before[point]) // PASSES

    def _new(self) -> list[list[int]]:
        """Prompts that the store lacks."""
        self._seed += 1
        return make_prompts(4, 300, seed=self._seed)

    def cannot(self, fault: Fault) -> str | None:
        """Why this machine cannot have the fault, or None if it can."""
        if fault.victim == "link" and self._without_link is not None:
            return self._without_link
        return "nft is not installed (package nftables)" if fault.kind == "lossy" and not shutil.which("nft") else None

    # --- a run ------------------------------------------------------------------------------------------------------

    def run(self, fault: Fault) -> Verdict:
        """Serve, let the fault happen, judge, and mend."""
        verdict = self.disturb(fault)
        if not verdict.reached and len(verdict.failures) == 1:  # this pass came there less often than those before
            verdict = self.disturb(replace(fault, depth=0.0))
        self._mend(fault, verdict)
        return verdict

    def disturb(self, fault: Fault) -> Verdict:
        """Serve, let the fault happen, and judge what was served."""
        verdict = Verdict(fault.where, fault.victim, fault.kind)
        if not self._well():
            verdict.leaks += self.held()
        self.trigger.disarm()
        new = self._new()
        expected = [*self.first.right, *self._plain.run(new, max_tokens=TOKENS).tokens]
        with self._over(fault):
            if fault.point is not None and fault.point.attach:
                self.daemon.sigkill()  # the engines attach to the next one
                self.daemon.launch()
            pid = self._pid(fault.victim)
            nth = 1 + int(fault.depth * self._passages.get(fault.point, 0)) if fault.point is not None else 1
            ended = os.pidfd_open(pid)
            self.trigger.arm(fault.point, pid, SIGNALS.get(fault.kind, 0), nth)
            self.first.begin(new)
            self.second.begin()
            if fault.point is None:
                time.sleep(fault.seconds % 1.0)
                self.trigger.fire()
            verdict.reached = poll(lambda: self.trigger.fired, REACHED_S, pause_s=0.002)
            self._judge_health(fault, verdict)
            if fault.kind == "kill" and fault.victim not in OF_STORE and verdict.reached:
                self._judge_notice(ended, verdict)
            os.close(ended)
            if fault.victim == "daemon" and fault.kind in ("kill", "storm") and verdict.reached:
                for _ in range(STORM if fault.kind == "storm" else 1):
                    self.daemon.sigkill()  # where it is dead that is noted, and waited for
                    self.daemon.start()
            self._judge_pass(self.second, self.second.right, fault, verdict, neighbour=True)
            self._judge_pass(self.first, expected, fault, verdict, neighbour=False)
        return verdict

    def _pid(self, victim: str) -> int:
        engine = self.first.engine
        return {
            "scheduler": engine.scheduler_pid,
            "worker": engine.worker_pids[0],
            "daemon": self.daemon.pid,
            "master": self.store.master_pid,
            "storage node": self.store.node_pid,
            "link": os.getpid(),  # no signal
        }[victim]

    @contextmanager
    def _over(self, fault: Fault) -> Iterator[None]:
        """Let a fault that passes be over after its time, and at the end of the block in any case."""
        ended = threading.Event()

        def passing() -> None:
            while not self.trigger.fired and not ended.wait(0.002):
                pass
            with self._disturbed(fault):
                ended.wait(fault.seconds)

        if fault.kind in ("kill", "storm"):
            yield
            return
        with ThreadPoolExecutor(1) as pool:
            over = pool.submit(passing)
            try:
                yield
            finally:
                ended.set()
            over.result()

    @contextmanager
    def _disturbed(self, fault: Fault) -> Iterator[None]:
        """Have the fault for the length of the block; a victim that stands still does so already."""
        pid, files, link = self.trigger.pid, resource.RLIMIT_NOFILE, self._link
        if link is not None and fault.victim == "link":
            ways: dict[str, tuple[Callable[..., None], dict[str, Any], dict[str, Any]]] = {
                "cut": (link.cut, {"down": True}, {"down": False}),
                "crawl": (link.limit, {"rate_mbit": CRAWL_MBIT}, {"rate_mbit": LINK_MBIT}),
                "lossy": (link.lose, {"percent": LOST_PERCENT}, {"percent": 0}),
            }
            change, bad, good = ways[fault.kind]
            change(**bad)
            yield
            change(**good)
            return
        before = resource.prlimit(pid, files)
        if fault.kind == "starve":
            used = max(int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir())  # poll() takes no less
            resource.prlimit(pid, files, (used + 1, before[1]))
        yield
        with suppress(ProcessLookupError):
            resource.prlimit(pid, files, before)
            os.kill(pid, signal.SIGCONT)

    def _judge_notice(self, ended: int, verdict: Verdict) -> None:
        """The other side knows of a death soon after the kernel has ended the process, its last thread too."""
        select.select([ended], [], [], 15.0)
        gone_ns = time.monotonic_ns()
        late = poll(lambda: self.trigger.noticed_ns, 2.0 + self._slack_s, pause_s=0.005)
        verdict.noticed_ms = max(0.0, (late - gone_ns) / 1e6) if late else None
        if verdict.noticed_ms is None or verdict.noticed_ms > NOTICED_MS + 1e3 * self._slack_s:
            verdict.untrue.append(f"the death of the {verdict.victim} was noticed after {verdict.noticed_ms} ms")

    def _judge_health(self, fault: Fault, verdict: Verdict) -> None:
        """While the daemon or the master is down, the daemon's picture says so."""
        shortly = fault.kind == "stop" and fault.seconds <= LOOKED_S["daemon"]
        down = fault.victim in LOOKED_S and fault.kind in SIGNALS and (fault.victim, fault.kind) != QUIET
        if not verdict.reached or shortly or not down:
            return
        late_s = LOOKED_S[fault.victim] + self._slack_s
        if not poll(lambda: not self.client.health().well, late_s, pause_s=0.1):
            verdict.untrue.append(f"ready although the {fault.victim} is down")

    def _judge_pass(
        self, site: Site, right: Sequence[list[int]], fault: Fault, verdict: Verdict, *, neighbour: bool
    ) -> None:
        """Judge what a site served: all of it, right, in time."""
        died = not neighbour and fault.victim in OF_ENGINE and fault.kind == "kill" and verdict.reached
        name = "neighbour" if neighbour else "engine"
        try:
            result, step_s = site.finish()
        except (EngineError, OSError) as error:  # OSError: it died after its pass
            if not died:
                (verdict.neighbour if neighbour else verdict.hung).append(f"the {name} failed: {str(error)[:2000]}")
            return
        if died:
            return  # it had served all before it died
        wrong = sum(got != want for got, want in zip(result.tokens, right, strict=True))
        if wrong:
            verdict.wrong_tokens.append(f"{name}: {wrong} of {len(right)} requests have other tokens")
        if unfinished := [each.index for each in result.requests if each.finish_reason != "length"]:
            verdict.hung.append(f"{name}: requests {unfinished} did not finish")
        if neighbour or fault.victim not in OF_ENGINE:  # steps of an engine that stood still are long
            verdict.longest_step_ms = max(verdict.longest_step_ms, round(1e3 * (step_s - site.step_s), 1))
            if step_s > site.step_s + STEP_S + self._slack_s:
                verdict.hung.append(f"{name}: a step took {step_s:.3f} s; without a fault {site.step_s:.3f} s at most")
        if neighbour and fault.victim in OF_ENGINE and not (fault.point is not None and fault.point.attach):
            if (cached := sum(result.cached_tokens)) != site.hits:
                verdict.neighbour.append(f"the neighbour had {cached} cached tokens of {site.hits}")
            if (p99_s := result.ttft_s(0.99)) > 2 * site.p99_s + STEP_S + self._slack_s:
                verdict.neighbour.append(f"the neighbour's p99 was {p99_s:.3f} s; without a fault {site.p99_s:.3f} s")

    # --- after a run ------------------------------------------------------------------------------------------------

    def held(self) -> list[str]:
        """Return what the daemon holds although nobody serves, and what is left of what died."""
        return [*self._judge.pinned(self.daemon.pid, self.daemon.socket), *self._unattached()]

    def _unattached(self) -> list[str]:
        count = self.client.status().engine_count
        return [f"{count} engines are attached"] if count != 2 else []

    def _well(self) -> bool:
        def well() -> bool:
            with suppress(OSError, RuntimeError, AssertionError):
                return not self.held()
            return False

        return bool(poll(well, WELL_S, pause_s=0.05))

    def _mend(self, fault: Fault, verdict: Verdict) -> None:
        """Bring the victim back, and check that nothing of the fault is left."""
        if verdict.reached and fault.kind == "kill":
            if fault.victim in OF_ENGINE:
                self._engine_again(fault, verdict)
            elif fault.victim in OF_STORE:
                self._store_again(fault.victim)
        if not self.client.health(engines=2, wait_s=WELL_S).well:
            verdict.untrue.append("not ready although all is there again")
        if not self._well():
            verdict.leaks += self.held()
        if not self.fill():
            verdict.leaks.append("the hits did not come back")

    def _engine_again(self, fault: Fault, verdict: Verdict) -> None:
        engine = self.first.engine
        pids = engine.worker_pids if fault.victim == "worker" else [engine.scheduler_pid, *engine.worker_pids]
        if left := process.wait_gone(pids, 15.0):
            verdict.leaks.append(f"processes of the engine outlive its death: {left}")
        self.renew()

    def renew(self) -> None:
        """Replace the first engine by a new one."""
        self.first.engine.stop()
        self.first.engine = self._engine(own_worker=True)

    def _store_again(self, victim: str) -> None:
        """A new master; with it a new storage node, as the old master would count on the dead one's values.

        A new daemon, too: what its staging alone still has would not be stored again, and be lost at any later time.
        """
        if victim == "storage node":
            self.store.kill_nodes()
        self.store.kill_master()
        if victim == "storage node":
            self.store.start_master(joined=False)
            self.store.start_node()
        else:
            self.store.start_master()
        self.daemon.sigkill()
        self.daemon.start()
