"""The scheduler side: hints at arrival, one flag load per poll, claims before answers, slots back when acknowledged.

Rules that keep the engine's contract:

* An answer is given only for blocks this side has claimed and whose slot numbers it has read and checked, so that a
  dispatched load cannot fail.  It is honoured to the end even when the daemon dies right after: the bytes lie in
  segments the workers have mapped and nobody writes any more.  A claim not dispatched in its pass is given up at the
  pass's end.
* A dispatched load belongs to its load_id: finish, abort, preemption and an ended epoch do not touch it.
* A request is settled once it was admitted, missed, or used up its late hints: no more hints until it is preempted.
* After a reset that the daemon has not confirmed, nothing is hinted, loaded or saved.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from ..shmring.errors import SegmentCorrupt
from ..shmring.wire.attach import Stored
from ..shmring.wire.records import Outcome
from . import hints
from .claims import NOTHING, PENDING, Claims, Entry, Reply
from .config import ConnectorConfig
from .events import SavedBlocks
from .loads import Loads
from .metadata import KVPrefetchMetadata, KVPrefetchWorkerMeta, SaveOrder
from .policy import WaitPolicy
from .saves import Saves
from .session import SchedulerSession
from .stats import Tally
from .steps import StepTimes
from .support import Geometry
from .waits import Waits

RESET_RETRY_NS = 5_000_000_000
RESET_TIMEOUT_MS = 5000  # where neither the configuration nor a disk tier asks for another
# Between two looks of an idle engine; the kernel makes it about twice as long.
PAUSE_S = 50e-6


class SessionSource(Protocol):
    """What the scheduler side needs of the link."""

    @property
    def session(self) -> SchedulerSession | None: ...
    @property
    def confirmed_reset(self) -> int: ...
    def detach(self, reason: str) -> None: ...
    @property
    def stored(self) -> deque[Stored]: ...
    def send_reset(self, generation: int, timeout_ms: int) -> bool: ...
    def request_reset(self, generation: int, timeout_ms: int) -> bool: ...


_F = TypeVar("_F", bound=Callable[..., Any])


def _detaching(default: Any) -> Callable[[_F], _F]:
    """What the daemon wrote cannot be true: drop the session and answer `default`."""

    def wrap(method: _F) -> _F:
        @functools.wraps(method)
        def guarded(self: SchedulerSide, *args: Any, **options: Any) -> Any:
            try:
                return method(self, *args, **options)
            except SegmentCorrupt as error:
                self._corrupt(error)
                return default

        return guarded  # type: ignore[return-value]

    return wrap


class SchedulerSide:
    """One engine's scheduler. `local_tokens` says how many tokens of a request the engine's own prefix cache holds,
    `local_cached_blocks` how many blocks that cache holds at all, `still_cached` whether it has this block id under
    this digest; `clock_ns` is CLOCK_MONOTONIC, `pause` sleeps between two looks of an idle engine. With `publish`,
    `take_events` tells of saved blocks."""

    def __init__(
        self, config: ConnectorConfig, geometry: Geometry, link: SessionSource, *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        pause: Callable[[], None] = lambda: time.sleep(PAUSE_S),
        local_tokens: Callable[[Any], int] = lambda request: 0,
        local_cached_blocks: Callable[[], int] = lambda: 0,
        still_cached: Callable[[int, bytes], bool] = lambda block_id, digest: False,
        publish: bool = False,
    ) -> None:  # fmt: skip
        self.counters: Counter[str] = Counter()
        self.tally = Tally(self.counters)
        self.local_tokens, self.local_cached_blocks, self.still_cached = local_tokens, local_cached_blocks, still_cached
        self._config, self._geometry, self._link, self._clock_ns = config, geometry, link, clock_ns
        self._saving = geometry.saves and config.mode == "on"
        self._session: SchedulerSession | None = None
        self._entries: dict[str, Entry] = {}
        self._answered: set[str] = set()
        # Admitted requests that may still have blocks to save.
        self._unsaved: dict[str, Entry] = {}
        self._loads = Loads(geometry, self.counters)
        self._events = SavedBlocks(geometry, self._take_stored) if publish and self._saving else None
        self._saves = Saves(
            geometry, decode=config.save_decode_cache, counters=self.counters, events=self._events,
            still_cached=lambda block_id, digest: self.still_cached(block_id, digest),
        )  # fmt: skip
        self._steps = StepTimes()
        self._claims = Claims(
            config, geometry, WaitPolicy(self._steps, geometry.block_tokens),
            self._saves if self._saving else None, self.counters, clock_ns, pause,
        )  # fmt: skip
        self._waits = Waits(self.counters)
        # What the step before scheduled and has not finished since, and how many requests this pass admitted.
        self._running: set[str] = set()
        self._admitted = 0
        self._generation = 0
        self._reset_asked_ns = 0
        self._stale_local = False

    # --- arrival ----------------------------------------------------------------------------------------------------

    @_detaching(None)
    def arrived(self, request: Any) -> None:
        """A new request: one hint, unless there is nothing to gain."""
        if request.resumable:
            return  # a session's later chunks are never asked about, and its tokens may be cut back
        loadable = self._geometry.loads and not request.skip_reading_prefix_cache
        entry = Entry(request, loadable, request.num_preemptions)
        self._entries[request.request_id] = entry
        session = self._usable_session()
        if session is None or not loadable or not self._config.hint_on_arrival:
            return
        if not session.alive(self._clock_ns()):
            return
        self._claims.hint(entry, session, self.local_tokens(request) // self._geometry.block_tokens)

    # --- matching ---------------------------------------------------------------------------------------------------

    @_detaching(NOTHING)
    def match(self, request: Any, num_computed_tokens: int) -> Reply:
        """vLLM's get_num_new_matched_tokens: may be asked any number of times, makes no system call while pending."""
        entry = self._entries.get(request.request_id)
        if entry is None:
            return NOTHING
        self._waits.over(entry, self._clock_ns())
        if entry.preemptions != request.num_preemptions:
            entry.restart()
        # Asked only with nothing computed: all tokens known now are this admission's prefill.
        entry.progress.prefill_tokens = request.num_tokens
        start = num_computed_tokens // self._geometry.block_tokens
        if start and self._stale_local:
            entry.progress.tainted = True
        if entry.loading:
            # Its load failed with no good token.  It holds nothing any more, yet stands first of those that hold
            # blocks, before one that may hold what it lacks; this answer sends it back among those that wait for room.
            entry.loading = False
            return PENDING
        if entry.settled or not entry.loadable:
            return NOTHING
        answer = entry.answer
        if answer is not None:
            if answer.start == start:
                return answer.count * self._geometry.block_tokens, answer.asynchronous
            self._claims.withdraw(entry)
            self._answered.discard(request.request_id)
        session = self._usable_session()
        if session is None:
            return NOTHING
        reply = self._claims.match(entry, session, start, taken=len(self._running) + self._admitted)
        if entry.answer is not None:
            self._answered.add(request.request_id)
        if reply[0] is None and entry.wait is not None:  # it does not just give way to one before it
            self._waits.told(entry, self._clock_ns())
        return reply

    # --- after allocation -------------------------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: Callable[[], Any], num_external_tokens: int) -> None:
        """vLLM's update_state_after_alloc; `block_ids()` gives the request's block ids per group."""
        self._admitted += 1
        entry = self._entries.get(request.request_id)
        if num_external_tokens > 0:
            answer = entry.answer if entry is not None else None
            if entry is None or answer is None or num_external_tokens > answer.count * self._geometry.block_tokens:
                # Not ours to survive: the engine would compute on blocks nobody fills.
                raise RuntimeError(
                    f"blocks were allocated for an answer that was not given: request={request.request_id} "
                    f"tokens={num_external_tokens}"
                )
            self._answered.discard(request.request_id)
            self._loads.dispatch(entry, block_ids()[self._geometry.group], num_external_tokens)
        elif entry is not None:
            self._admitted_without_load(entry)
        if entry is not None and self._saving and not self._saves.complete(entry.progress):
            self._unsaved[request.request_id] = entry

    @_detaching(None)
    def disk_tokens(self, request: Any) -> int | None:
        """Of the load dispatched last, which is this request's, the tokens that came from disk; None: not known."""
        blocks = self._loads.disk_blocks(request.request_id, self._session)
        return None if blocks is None else blocks * self._geometry.block_tokens

    @_detaching(None)
    def _admitted_without_load(self, entry: Entry) -> None:
        """Recomputed, all local, or another connector's: also the second call after an asynchronous load."""
        self._answered.discard(entry.request.request_id)
        entry.settled, entry.loading = True, False
        self._claims.finish(entry, Outcome.UNUSED)

    # --- the step ---------------------------------------------------------------------------------------------------

    def take_loads(self) -> KVPrefetchMetadata:
        """The step's metadata with the loads dispatched in this pass: they are in it whatever else goes wrong."""
        return KVPrefetchMetadata(loads=self._loads.take_orders(), live_epochs=self.live_epochs())

    def live_epochs(self) -> tuple[int, ...]:
        """The epochs that load orders name, or may name from now on.

        The link's thread calls it, too, after it dropped its session: an epoch that is missing then is never named
        again, because `_usable_session` looks at the link once more after it adopted an epoch.  The session is read
        first: an order of its epoch is among the loads before the session changes.
        """
        session = self._session
        return tuple(self._loads.epochs() | ({session.epoch} if session is not None else set()))

    @_detaching(None)
    def plan_step(self, output: Any, meta: KVPrefetchMetadata) -> None:
        """The rest of build_connector_meta: answers not used are given up, saves are planned, SAVED records pushed."""
        self._step_begins(output, loading=bool(meta.loads))
        session = self._usable_session()
        while self._answered:
            self._claims.withdraw(self._entries[self._answered.pop()])
        if session is not None and (self._unsaved or self._saves.left) and session.alive(self._clock_ns()):
            meta.saves.extend(self._plan_saves(session, output))
        self._saves.flush()

    def _plan_saves(self, session: SchedulerSession, output: Any) -> Iterator[SaveOrder]:
        """This step's saves. vLLM asks about every request (`match`) before it schedules it, again when preempted."""
        scheduled, block_tokens = output.num_scheduled_tokens, self._geometry.block_tokens
        for request_id, entry in list(self._unsaved.items()):
            request, progress, tokens = entry.request, entry.progress, scheduled.get(request_id)
            if tokens is None or request.num_computed_tokens + tokens < (progress.saved + 1) * block_tokens:
                continue  # not in this step, or no block of it ends in this step
            block_ids = functools.partial(output.kv_connector_block_state.get_block_ids, request_id)
            if (order := self._saves.plan(session, progress, request, tokens, block_ids)) is not None:
                yield order
            if self._saves.complete(progress):
                del self._unsaved[request_id]
        if (order := self._saves.plan_left(session)) is not None:
            yield order

    def _step_begins(self, output: Any, *, loading: bool) -> None:
        scheduled = output.num_scheduled_tokens
        prefill_tokens = 0
        if output.total_num_scheduled_tokens != len(scheduled):  # otherwise every request has one token: decodes
            for request_id, tokens in scheduled.items():
                if tokens > 1 and (entry := self._entries.get(request_id)) is not None:
                    # More than one token not computed yet: not drafts. vLLM advances num_computed_tokens afterwards.
                    left = entry.request.num_tokens - entry.request.num_computed_tokens
                    prefill_tokens += min(tokens, left) if left > 1 else 0
        executed = output.total_num_scheduled_tokens > 0
        now = self._clock_ns()
        self._steps.began(now, prefill_tokens, executed=executed, typical=not loading)
        self._running, self._admitted = set(scheduled), 0
        self._claims.new_pass()
        self._waits.pass_ended(now)

    def step_ended(self) -> None:
        """The output of the oldest step in flight was processed: called exactly once per step, empty ones included."""
        self._steps.ended(self._clock_ns())

    @_detaching(None)
    def outputs(self, worker_meta: Any, *, failed_blocks: bool = False) -> None:
        """vLLM's update_connector_output: what the ranks finished, and whether a load left blocks unfilled.

        Ours or, in a MultiConnector, another's: the engine recomputes these blocks, but steps in flight computed on
        what stood there, also those of requests that share them.
        """
        if failed_blocks:
            self._saves.drop()
            for entry in self._entries.values():
                entry.progress.tainted |= entry.settled  # all that were admitted are
        if not isinstance(worker_meta, KVPrefetchWorkerMeta):
            return
        self._saves.acknowledge(worker_meta.saves, worker_meta.failed_saves)
        now = self._clock_ns()
        for load in self._loads.acknowledge(worker_meta.loads, worker_meta.failed_loads):
            if load.handle.session is self._session:
                hints.finish(load.handle, Outcome.LOADED, loaded=load.blocks, loaded_ns=now)
        self._saves.flush()

    @_detaching(False)
    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping although it has no request: acknowledgements come with steps."""
        if self._loads.pending or self._saves.unacknowledged:
            return True
        session = self._session
        if session is None or not session.alive(self._clock_ns()):
            return False
        return self._saves.unpushed > 0 or (self._saves.left > 0 and session.credits.available() > 0)

    def take_events(self) -> Sequence[Any]:
        """vLLM KV events of blocks that are in the store by now."""
        return () if self._events is None else self._events.take()

    def _take_stored(self) -> Iterator[Stored]:
        stored = self._link.stored
        while stored:
            yield stored.popleft()

    # --- ends -------------------------------------------------------------------------------------------------------

    @_detaching(None)
    def finished(self, request: Any, block_ids: Sequence[int] = ()) -> None:
        """The request has ended, for whatever reason, and gives these blocks back; a dispatched load goes on."""
        self._running.discard(request.request_id)
        self._unsaved.pop(request.request_id, None)
        entry = self._entries.pop(request.request_id, None)
        if entry is None:
            return
        if entry.preemptions == request.num_preemptions and not self._stale_local:
            self._saves.leave(entry.progress, request, block_ids)
        self._answered.discard(request.request_id)
        self._waits.over(entry, self._clock_ns())
        self._claims.finish(entry, Outcome.ABORTED)

    @_detaching(None)
    def _give_up_handles(self) -> None:
        for entry in self._entries.values():
            self._claims.finish(entry, Outcome.LOST)

    def reset(self) -> bool:
        """The weights changed: nothing older may be served or stored.

        True only when the daemon confirmed that the stored keys are gone.  Without a daemon it is False, because a
        store may hold keys of the old weights all the same; the reset is then repeated when a daemon is there, and
        until it is confirmed this engine neither loads nor saves.
        """
        self._generation += 1
        self._reset_asked_ns = self._clock_ns()  # asked for below, so not here as one that is owed
        self._usable_session()
        self._give_up_handles()
        self._answered.clear()
        self._stale_local = self.local_cached_blocks() > 0
        for entry in self._entries.values():
            entry.settled, entry.late_hints, entry.wait = False, 0, None
            if entry.request.num_computed_tokens > 0:
                entry.progress.tainted = True
                # It goes on filling the engine's own prefix cache from where it stands.
                self._stale_local = True
        self._saves.reset(self._generation)
        return self._link.request_reset(self._generation, self._reset_timeout_ms())

    def _reset_timeout_ms(self) -> int:
        """As configured, else long enough for the daemon's store to confirm a reset."""
        least_ms = session.removal_ms if (session := self._link.session) is not None else 0
        return self._config.reset_timeout_ms or max(RESET_TIMEOUT_MS, least_ms)

    def _usable_session(self) -> SchedulerSession | None:
        """The link's session, unless a reset is owed to it."""
        while (session := self._link.session) is not self._session:
            self._adopt(session)
        if self._link.confirmed_reset >= self._generation:
            return session
        if session is not None and (now := self._clock_ns()) - self._reset_asked_ns > RESET_RETRY_NS:
            self._reset_asked_ns = now
            self._link.send_reset(self._generation, self._reset_timeout_ms())
        return None

    def _adopt(self, session: SchedulerSession | None) -> None:
        """Another epoch: handles, undispatched claims and saves of the old one are void."""
        old, self._session = self._session, session
        for entry in self._entries.values():
            entry.handle, entry.answer = None, None
        self._answered.clear()
        if old is not None:
            self._saves.forget(old)

    def _corrupt(self, error: SegmentCorrupt) -> None:
        self.counters["detached"] += 1
        self._link.detach(str(error))
        self._adopt(None)
