"""An engine core without a model: vLLM's real schedulers, our real connector, a real daemon and store.

This module does EngineCore's work around a scheduler in EngineCore's order (vllm/v1/engine/core.py: step,
step_with_batch_queue), in this process, so that a test decides when each rank gets on.  verdict.py holds the promises
at the end.
"""

from __future__ import annotations

import itertools
import logging
import random
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.connector.scheduler.early import ADOPTED_WITHIN_NS, hand_over
from kvprefetch.shmring.wire.records import FlagState
from tests.scheduler.model import BLOCK, Truth
from tests.scheduler.oracle import ON_PURPOSE, Oracle
from tests.scheduler.shape import (
    DRAFTS,
    MAX_MODEL_LEN,
    Shape,
    Site,
    cache_config,
    make_request,
    tensor_parallel_rank,
    vllm_config,
)
from tests.scheduler.workers import Workers
from tests.support.waiting import eventually, poll

FITS = MAX_MODEL_LEN - 4
REJECTED = 9
SETTLE_S = 0.05
DRAIN_S = 30.0

_numbers = itertools.count()


@dataclass
class Sent:
    """A request as its client sees it: the chunks sent, the tokens received."""

    name: str
    chunks: list[list[int]]
    out: int
    session: bool
    weights: int
    comparable: bool
    received: list[int] = field(default_factory=list)
    ended: bool = False
    aborted: bool = False


class Engine:
    """One engine beside `site`'s daemon; without a site a plain one, with no connector at all."""

    def __init__(self, shape: Shape, site: Site | None, truth: Truth, *, weights: int = 0, prefix: str = "") -> None:
        self.shape, self.site, self.truth = shape, site, truth
        self.prefix = prefix or f"e{next(_numbers)}"
        self.requests: dict[str, Sent] = {}
        self.counts: Counter[str] = Counter()
        self.jitter = random.Random(0)
        self._stale = False  # the engine's own prefix cache may hold KV of other weights
        self._late_aborts: list[str] = []
        self._batches: deque[Any] = deque()
        self._names = itertools.count()
        # Requests that the input thread has made: turns of the loop until the scheduler gets each, and the request.
        self._input: list[tuple[int, Any]] = []
        self.logged = _Errors()
        config = vllm_config(shape, self.prefix, None if site is None else site.daemon.socket)
        drafts = DRAFTS if shape.drafts else 0
        cache = cache_config(shape.blocks, shape.groups, shape.retention, drafts=drafts)
        self.workers = Workers(
            shape.ranks,
            shape.blocks,
            truth,
            drafts=drafts,
            report_before_save=shape.report_before_save,
        )
        self.workers.weights = weights
        self.weights = {"": weights}  # by the name that keys have of them
        if site is not None:
            logging.getLogger("vllm.kvprefetch").addHandler(self.logged)
            for rank in self.workers.ranks:
                with tensor_parallel_rank(rank.number):
                    rank.connector = KVPrefetchConnector(config, KVConnectorRole.WORKER, cache)
                    rank.connector.register_kv_caches(rank.tensors)
                    rank.connector.worker_side.updates = self.workers.watched()
        scheduler_class = Scheduler if shape.queue == 1 else AsyncScheduler
        self.scheduler = scheduler_class(
            config,
            cache,
            StructuredOutputManager(config),
            block_size=shape.groups.unit_tokens,
            hash_block_size=shape.groups.hash_tokens,
            log_stats=False,
        )
        assert not getattr(self.scheduler, "defer_async_loads", False), "an engine that would do so is refused"
        self.scheduler.use_v2_model_runner = shape.second_runner
        self._aggregator = KVOutputAggregator(shape.ranks)
        self.oracle: Oracle | None = None
        if site is not None:
            assert isinstance(self.scheduler.connector, KVPrefetchConnector)
            self.side: Any = self.scheduler.connector.scheduler_side
            link: Any = self.scheduler.connector.link
            self.link = link
            eventually(self._attached, 20.0, "an attached engine")
            self.save_slots = self.link.epoch.credits.available()
            self.oracle = Oracle(self.scheduler, self.side, self.workers, truth, lambda: self.jitter.randrange(4))

    # --- what a client may do ---------------------------------------------------------------------------------------

    def add(self, tokens: list[int], out: int, *, session: bool = False, lag: int | None = None, **options: Any) -> str:
        """`lag`: turns of the loop from the input thread to the scheduler, which never gets it from REJECTED on.

        Without one there is no input thread.  `options`: of make_request.
        """
        name = f"r{next(self._names)}"
        # vLLM itself is wrong in some sessions: before 0.33 it counts drafts accepted past a chunk's end as computed,
        # and with two steps in flight a state has taken in a token that the session then cuts off
        # (test_schedules_groups.py).
        session = session and not self.shape.drafts and not (self.shape.has_states and self.shape.queue > 2)
        self.requests[name] = Sent(name, [tokens], out, session, self.workers.weights, not self._stale)
        options |= {"resumable": session, "arrival_time": float(len(self.requests))}
        request = make_request(name, tokens, out, **options)
        self.counts["requests"] += 1
        if lag is None:
            self.scheduler.add_request(request)
            return name
        thread = threading.Thread(target=hand_over, args=(self.scheduler.connector, request))
        thread.start()
        thread.join()
        self.counts["early"] += request in self.side.early.waiting
        if lag < REJECTED:
            self._input.append((lag, request))
        else:
            del self.requests[name]
        return name

    def _take_input(self) -> None:
        due = [request for lag, request in self._input if lag <= 0]
        self._input = [(lag - 1, request) for lag, request in self._input if lag > 0]
        for request in due:
            sent = self.requests[request.request_id]
            sent.weights, sent.comparable = self.workers.weights, not self._stale
            self.scheduler.add_request(request)

    def feed(self, name: str, tokens: list[int] | None) -> None:
        """The next chunk of a session, or its end."""
        sent = self.requests[name]
        if sent.ended or name not in self.scheduler.requests:
            return
        if tokens is not None and sum(map(len, sent.chunks)) + len(tokens) + (len(sent.chunks) + 1) * sent.out > FITS:
            tokens = None  # vLLM's front end lets no request in that is longer than the model can take
        if tokens is not None:
            sent.chunks.append(tokens)
        chunk = make_request(name, tokens or [1], sent.out, resumable=tokens is not None, arrival_time=0.0)
        self.scheduler.add_request(chunk)
        self.counts["chunks"] += 1
        sent.ended = tokens is None

    def abort(self, name: str, *, late: bool = False) -> None:
        """Now, or while the next step's output is on its way."""
        if late:
            self._late_aborts.append(name)
            return
        request = self.scheduler.requests.get(name)
        if request is None or request.is_finished():
            return
        loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        self.counts["aborts_while_loading" if loading else "aborts"] += 1
        self.requests[name].aborted = self.requests[name].ended = True
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def pause(self, state: PauseState) -> None:
        self.scheduler.set_pause_state(state)

    def forget(self, *, running: bool, connector: bool = False) -> None:
        """Reset the engine's own prefix cache, with the running requests preempted where vLLM can do that."""
        if self.site is not None and self.shape.settled:
            self.settle()
        if running:
            self._process_all()
            held = {request.request_id for request in self.scheduler.running}
            running = all(
                self.scheduler.kv_cache_manager.get_block_ids(name)[0] == []
                for name in self.scheduler.requests
                if name not in held
            )
        done = self.scheduler.reset_prefix_cache(running, reset_connector=connector)  # ours is always done
        self._name_weights()
        self.counts["forgets"] += done
        self._stale = self._stale and not done

    def _name_weights(self) -> None:
        """Note what the keys call the weights now: the scheduler side has not taken other ones into its keys yet."""
        if self.site is not None:
            self.weights.setdefault(self.side.resets.current.id, self.workers.weights)

    def new_weights(self, *, running: bool) -> None:
        """As a trainer does it: execute all queued steps, change the weights, reset the caches."""
        self.workers.settle()
        if self.oracle is not None:
            self.oracle.land()
        if running:
            self._process_all()
        self._update()
        self.forget(running=running, connector=True)
        self.counts["resets"] += 1

    def update_weights(self) -> None:
        """A trainer that resets nothing: steps whose output is on its way were executed before."""
        self.workers.settle()
        if self.oracle is not None:
            self.oracle.land()
        self._update()
        self.counts["updates"] += 1

    def _update(self) -> None:
        self.workers.update_weights()
        self._stale |= self.counts["steps"] > 0
        for sent in self.requests.values():
            # A session may go on for a while after its last chunk.
            sent.comparable = sent.comparable and sent.ended and sent.name not in self.scheduler.requests

    def fail_load(self, rank: int) -> None:
        """The next asynchronous load fails on this rank, after some of its bytes were written."""
        if self.oracle is not None:
            self.oracle.fail_next.add(rank % self.shape.ranks)

    def detach(self) -> None:
        """The connection ends; dispatched loads go on in the old epoch's memory, and a new epoch follows."""
        if self.link.epoch is not None:
            self.link.detach(self.link.epoch, ON_PURPOSE)
            self.counts["detaches"] += 1

    # --- the engine's loop ------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One turn of the engine's loop; False when it has nothing to do."""
        waiting = bool(self._input)
        self._take_input()
        if waiting and not (self.scheduler.has_requests() or self._batches):
            return True
        if not (self.scheduler.has_requests() or self._batches):
            return False
        if self.site is not None and self.shape.settled:
            self.settle()
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            if self.oracle is not None:
                self.oracle.scheduled(output)
            self.counts["steps"] += 1
            self.counts["preemptions"] += len(output.preempted_req_ids)
            self.counts["drafts"] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
            self.workers.execute(output)
            for _ in range(self.jitter.randrange(8)):
                self.workers.move(self.jitter.randrange(self.shape.ranks))
            self._batches.append(output)
            if len(self._batches) < self.shape.queue and (
                output.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()
            ):
                return True
        self._process()
        return True

    def run(self, steps: int, seed: int = 0) -> None:
        """Some turns of the engine's loop; `seed` decides how far the ranks lag behind."""
        self.jitter = random.Random(seed)
        for _ in range(steps):
            if not self.step():
                return

    def _process(self) -> None:
        """Wait for the oldest step and give its output to the scheduler."""
        expected = self._batches.popleft()
        output, reports = self.workers.finish()
        assert output is expected
        report = self._aggregator.aggregate(reports)
        assert report is not None
        if self.oracle is not None:
            self.oracle.reported(report.kv_connector_output)
        while self._late_aborts:
            self.abort(self._late_aborts.pop())
        results = self.scheduler.update_from_output(output, report)
        self._name_weights()
        for result in results.values():
            for one in result.outputs:
                sent = self.requests[one.request_id]
                sent.received += one.new_token_ids
                if one.finish_reason is not None and not sent.session:
                    sent.ended = True
        if self.shape.drafts and self.shape.queue == 1:
            drafts = self.workers.drafts
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), [list(d) for d in drafts.values()]))

    def _process_all(self) -> None:
        while self._batches:
            self._process()

    def settle(self, most_s: float = SETTLE_S) -> None:
        """Give the daemon the time it needs, so that a schedule means the same whenever it runs."""
        poll(self._quiet, most_s, pause_s=0.0005)

    def _quiet(self) -> bool:
        epoch = self.link.epoch
        if epoch is None:
            return False
        out = sum(len(save.slots) for save in self.side.saves.waiting.values())
        handles = [state.handle for state in self.side.requests.values() if state.handle is not None]
        return bool(epoch.credits.available() + out >= self.save_slots) and all(
            handle.look().state != FlagState.HINTED for handle in handles
        )

    def drain(self) -> None:
        """Let everything end."""
        self.pause(PauseState.UNPAUSED)
        deadline = time.monotonic() + DRAIN_S
        while True:
            for sent in self.requests.values():
                if sent.session and not sent.ended:
                    self.feed(sent.name, None)
            if not self.step():
                break
            assert time.monotonic() < deadline, f"the engine does not come to rest: {self.scheduler.requests.keys()}"

        if self.site is not None:  # as if the scheduler had not got the rejected ones for long
            early, epoch = self.side.early, self.link.epoch
            self.counts["forsaken"] += len(early.waiting)
            early.forget(epoch, time.monotonic_ns() + 2 * ADOPTED_WITHIN_NS)

    # --- the end ----------------------------------------------------------------------------------------------------

    def await_reset(self) -> None:
        """The daemon hears of a reset once it is attached and there are requests."""
        deadline = time.monotonic() + DRAIN_S
        while self.link.confirmed_reset < self.side.resets.generation:
            assert time.monotonic() < deadline, "a reset is not confirmed"
            time.sleep(0.02)
            self.add([1] * BLOCK, 1)
            self.drain()

    def close(self) -> None:
        self.scheduler.shutdown()
        for rank in self.workers.ranks:
            rank.connector.shutdown()
        logging.getLogger("vllm.kvprefetch").removeHandler(self.logged)

    def _attached(self) -> bool:
        epoch = self.link.epoch
        return epoch is not None and epoch.alive(time.monotonic_ns())


class _Errors(logging.Handler):
    """Errors that the connector logs, but for injected load failures."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.texts.append(f"{record.getMessage()}: {record.exc_info[1]!r}")
        elif ON_PURPOSE not in record.getMessage():
            self.texts.append(record.getMessage())
