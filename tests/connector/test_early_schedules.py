"""Random schedules between vLLM's input thread and the admission: no wrong block is used, and nothing stays held.

vLLM's real scheduler, our real connector on real shared memory, and a daemon that stages and dies as chance wants.
Requests are hinted at early, and wait in the input queue while everything else happens: aborts, preemption, resets,
deadlines, and the daemon's death, also within the hint and within vLLM's questions.  No clock runs but the schedule's.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvprefetch.connector.attach.epoch import SchedulerEpoch
from kvprefetch.connector.scheduler.early import ADOPTED_WITHIN_NS, EarlyHints
from kvprefetch.connector.words.metadata import KVPrefetchWorkerMeta, RankWeights
from kvprefetch.shmring.wire.records import FlagState, Hint

from .fakes import BLOCK, MS, FakeDaemon, FakeLink
from .real import RealEngine

pytestmark = pytest.mark.usefixtures("_few_lines")
QUEUES = (1, 2, 3)
KEPT = 50  # schedules that one engine plays


@functools.lru_cache(maxsize=4096)
def content(digest: bytes, weights: int) -> bytes:
    """A token's bytes in each layer of this block."""
    return hashlib.sha256(digest + bytes([weights % 256])).digest()


class Daemon(FakeDaemon):
    """Stages what it is asked for, with the weights that it knew when it read the hint.

    `dead`: it does nothing.  `point` is called between what it does for the engine to see: it may be dead then.
    """

    dead = False
    point: Callable[[], object]

    def begin(self, rows: list[Any], weights: Callable[[], int], point: Callable[[], object]) -> None:
        self.rows, self.weights, self.point = rows, weights, point
        self.free_slots = list(range(self.layout.slot_count))
        self.staged: dict[int, tuple[Hint, int, list[int]]] = {}  # by flag: the hint, its weights, its slots

    def beat(self) -> None:
        if not self.dead:
            super().beat()

    def drain(self) -> None:
        before = len(self.hints)
        super().drain()
        for hint in self.hints[before:]:
            self.staged[hint.flag] = hint, self.weights(), []

    def act(self, chance: random.Random) -> None:
        """Some of its work: records read, blocks staged, deadlines passed, flags and slots free again."""
        for _ in self.work(chance):
            self.point()
            if self.dead:
                return

    def work(self, chance: random.Random) -> Iterator[None]:
        yield
        self.drain()
        for index, (hint, weights, slots) in list(self.staged.items()):
            yield
            flag = self.flags.flag(index)
            if flag.state in (FlagState.RELEASED, FlagState.CANCELLED, FlagState.FREE):
                self.take_back(index)
            elif flag.state == FlagState.HINTED and flag.generation == hint.generation and chance.random() < 0.7:
                more = min(chance.randrange(5), hint.blocks - hint.local_blocks - len(slots), len(self.free_slots))
                for _ in range(more):
                    self.fill(hint, weights, slots)
                    yield
                count, ended = hint.local_blocks + len(slots), chance.random() < 0.4
                self.flags.write_slots(index, 0, slots)
                yield
                self.flags.set_found(index, count)
                yield
                if chance.random() < 0.1:
                    self.move(index, FlagState.EXPIRED, 0)
                    self.spoil(slots)
                else:
                    self.move(index, FlagState.READY if ended else FlagState.HINTED, count if slots or ended else 0)

    def fill(self, hint: Hint, weights: int, slots: list[int]) -> None:
        at = hint.local_blocks + len(slots)
        slots.append(slot := self.free_slots.pop())
        data = content(hint.hashes[at * 32 : at * 32 + 32], weights)
        for rows in self.rows:
            rows[slot].reshape(-1, 32)[:] = np.frombuffer(data, np.uint8)

    def take_back(self, index: int) -> None:
        self.spoil(self.staged.pop(index)[2])
        if self.flags.flag(index).state != FlagState.FREE:
            self.move(index, FlagState.FREE, 0)

    def spoil(self, slots: list[int]) -> None:
        """Nothing may read them any more."""
        for slot in slots:
            for rows in self.rows:
                rows[slot][:] = 0xEE
        self.free_slots += slots
        slots.clear()


class Link(FakeLink):
    """Its thread may lose an epoch or get one whenever somebody looks: `then` is called before."""

    then: Callable[[], object] = staticmethod(lambda: None)
    now: SchedulerEpoch | None

    @property  # type: ignore[override]
    def epoch(self) -> SchedulerEpoch | None:
        self.then()
        return self.now

    @epoch.setter
    def epoch(self, epoch: SchedulerEpoch | None) -> None:
        self.now = epoch


class Noted(dict[Any, Any]):
    """`early.waiting`, into which the hint is entered after it was pushed: `then` is called in between."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self._then = then

    def __setitem__(self, request: Any, early: Any) -> None:
        self._then()
        super().__setitem__(request, early)


class Scheduled(RealEngine):
    """An engine under random schedules. It checks every block of a prompt that a step uses."""

    link_class = Link
    link: Link
    daemon: Daemon

    def __init__(self, folder: Path, chance: random.Random, **options: Any) -> None:
        super().__init__(folder, **options)
        self.chance, self.counts, self.number = chance, Counter[str](), 0
        self.weights, self.weights_of = 0, {0: 0}  # the engine's, and those of each generation of resets
        self.input: list[Any] = []
        self.attach(1)
        early: Any = self.side.early
        on_input = functools.partial(self.interrupt, 0.1, self.kill, self.lose, self.revive, self.reset, self.forget)
        guess, early.waiting = early.cache.guess, Noted(on_input)
        early.cache.guess = lambda request, most: (on_input(), guess(request, most))[1]  # while a hint is made
        self.on_link = functools.partial(self.interrupt, 0.01, self.kill, self.lose, self.revive)
        self.acts: list[Callable[[], object]] = [
            *[self.come] * 6,
            *[self.deliver] * 5,
            *[self.turn] * 9,
            *[lambda: self.daemon.act(self.chance)] * 8,
            *[self.abort_one] * 2,
            *[self.forget] * 2,
            self.reject,
            self.reset,
            self.confirm,
            self.kill,
            self.lose,
            self.revive,
            self.wait,
        ]

    # --- the daemon -------------------------------------------------------------------------------------------------

    def attach(self, epoch: int) -> None:
        self.daemon = daemon = Daemon(self.clock, epoch=epoch)
        epochs = [self.epoch_of(daemon.layout) for _ in self.workers]
        for worker, mapped in zip(self.workers, epochs, strict=True):
            worker.link.epochs[epoch] = mapped
        self.link.confirmed_reset = self.side.resets.generation
        rows, weights = [each.rows for each in epochs], lambda: self.weights_of[self.link.confirmed_reset]
        daemon.begin(rows, weights, lambda: self.interrupt(0.01, self.kill))
        self.link.epoch = daemon.epoch()
        daemon.segment.close()  # its descriptor

    def kill(self) -> None:
        """It is dead, and the engine has not found out."""
        if self.chance.random() < 0.5 and not self.daemon.dead:
            self.daemon.dead = True
            self.counts["kills"] += 1

    def lose(self) -> None:
        """The link finds out."""
        if self.daemon.dead and (lost := self.link.epoch) is not None:
            self.link.epoch = None
            lost.ended()

    def revive(self) -> None:
        if self.daemon.dead:
            self.lose()
            self.attach(self.daemon.layout.epoch + 1)

    def confirm(self) -> None:
        """The daemon has heard of all resets."""
        self.link.confirms = self.chance.random() < 0.7
        if self.link.epoch is not None and self.link.resets and not self.daemon.dead:
            self.link.confirmed_reset = max(self.link.confirmed_reset, self.link.resets[-1][0])

    def interrupt(self, likely: float, *acts: Callable[[], object]) -> None:
        """Another thread or process does one of these."""
        if self.chance.random() < likely:
            self.link.then, then = lambda: None, self.link.then
            self.chance.choice(acts)()
            self.link.then = then
            self.counts["interrupted"] += 1

    # --- clients ----------------------------------------------------------------------------------------------------

    def come(self) -> None:
        """A prompt that ends in the middle of a block, so that no output fills one."""
        if len(self.input) + len(self.scheduler.requests) >= 7:
            return
        chance, self.number = self.chance, self.number + 1
        family, shared = chance.randrange(3), chance.randrange(9) * BLOCK
        tokens = [1000 * family + at for at in range(shared)]
        tokens += [5000 + chance.randrange(3)] * (chance.randrange(3) * BLOCK + chance.randrange(1, 9))
        name = f"r{chance.randrange(9)}" if chance.random() < 0.1 else f"n{self.number}"
        # vLLM's front end makes ids unique: its scheduler takes a step's tokens for those of the id's latest request.
        in_use = {*self.scheduler.requests, *(each.request_id for each in self.input)}
        if name in in_use.union(*(output.num_scheduled_tokens for output, _, _ in self.flight)):
            return
        request = self.request(name, tokens, chance.randrange(1, 6))
        before = len(self.side.early.waiting)
        self.side.early.hint(request)
        self.counts["early"] += len(self.side.early.waiting) > before
        self.input.append(request)

    def deliver(self) -> None:
        if self.input:
            request = self.input.pop(0)
            self.tokens[request.request_id] = []
            self.counts["adopted"] += request in self.side.early.waiting
            self.scheduler.add_request(request)

    def reject(self) -> None:
        """vLLM ends it before its scheduler has it."""
        if self.input:
            self.input.pop(0)
            self.counts["rejected"] += 1

    def abort_one(self) -> None:
        if self.scheduler.requests:
            self.abort(self.chance.choice(list(self.scheduler.requests)))
            self.counts["aborts"] += 1

    def wait(self) -> None:
        self.clock.advance_ms(self.chance.choice([1, 100, ADOPTED_WITHIN_NS // MS // 2, ADOPTED_WITHIN_NS // MS + 1]))
        self.daemon.beat()

    # --- the engine's loop ------------------------------------------------------------------------------------------

    def turn(self) -> None:
        if self.scheduler.has_requests():
            output = self.step()
            self.counts["preemptions"] += len(output.preempted_req_ids)
            meta = self.metas.pop()
            self.counts["loads"] += len(meta.loads)
            for worker in self.workers:  # they forget what this step does not name, where vLLM's go on for 64 steps
                for epoch in worker.link.epochs.keys() - {*meta.live_epochs, self.daemon.layout.epoch}:
                    del worker.link.epochs[epoch]
        elif self.flight:
            self.process()

    def rest(self) -> None:
        while self.flight:
            self.process()

    def held_elsewhere(self) -> bool:
        """Whether a load under way holds blocks: vLLM resets nothing then."""
        running = {request.request_id for request in self.scheduler.running}
        waiting = [name for name in self.scheduler.requests if name not in running]
        return bool(self.side.loads.running or any(self.table(name) for name in waiting))

    def forget(self) -> None:
        """The engine's own prefix cache is empty."""
        self.rest()
        self.counts["forgets"] += self.scheduler.reset_prefix_cache(not self.held_elsewhere())

    def reset(self) -> None:
        """Other weights: no KV of before may be used. A load under way holds its blocks, and vLLM then keeps them."""
        self.rest()
        if self.held_elsewhere():
            return
        self.weights += 1
        assert self.scheduler.reset_prefix_cache(True, reset_connector=True), "blocks are in use"
        self.counts["resets"] += 1
        number = self.side.resets.step.number
        digests = {rank: RankWeights(number, b"w%d" % self.weights, b"") for rank in range(self.options.ranks)}
        self.side.outputs(KVPrefetchWorkerMeta(weights=digests))
        later = range(max(self.weights_of) + 1, self.side.resets.generation + 1)
        self.weights_of.update(dict.fromkeys(later, self.weights))

    def forward(self, worker: Any, output: Any) -> None:
        memory = self.memory[self.workers.index(worker)].numpy()
        for name, tokens in output.num_scheduled_tokens.items():
            request, table = self.scheduler.requests[name], self.table(name)
            computed = request.num_computed_tokens - tokens
            for at in range(min(request.num_computed_tokens, request.num_prompt_tokens) // BLOCK):
                right = np.frombuffer(content(request.block_hashes[at], self.weights), np.uint8)
                if at < computed // BLOCK:
                    assert (memory[:, table[at]] == right).all(), f"a wrong block: {name} block={at} of={computed}"
                    self.counts["checked"] += 1
                else:
                    memory[:, table[at]] = right

    # --- a schedule -------------------------------------------------------------------------------------------------

    def play(self, turns: int) -> None:
        """So many acts, and then everything ends."""
        self.link.then = self.on_link
        for _ in range(turns):
            self.chance.choice(self.acts)()
        while self.input:
            self.chance.choice([self.deliver, self.deliver, self.reject])()
        self.link.then = lambda: None
        self.revive()
        self.clock.advance_ms(ADOPTED_WITHIN_NS // MS + 1)
        self.daemon.beat()
        self.tokens["last"] = []
        self.add("last", 3, out=9)  # a step gives back what nobody adopted
        for _ in range(300):
            self.daemon.act(self.chance)
            self.revive()
            if not (self.scheduler.has_requests() or self.flight):
                break
            self.turn()
        self.daemon.act(self.chance)
        self.revive()
        assert self.left() == []
        assert len(self.daemon.free_slots) == self.daemon.layout.slot_count, "slots stay taken"
        assert self.link.detached == []
        assert self.side.counters["failed_loads"] == 0


def explore(make: Callable[..., Any], queue: int, seeds: range) -> Counter[str]:
    """Play a schedule for each seed. Return counts of what happened."""
    total, engine = Counter[str](), None
    for seed in seeds:
        chance = random.Random(seed)
        if engine is None or seed % KEPT == 0:
            mode = chance.choice(["sync", "async", "auto"])
            options = {"in_flight": queue, "blocks": chance.choice([16, 24]), "budget": chance.choice([32, 128])}
            engine = make(Scheduled, chance=chance, seqs=3, load_mode=mode, wait_timeout_ms=50, **options)
            engine.counts = total
        engine.chance = chance
        try:
            engine.play(chance.randrange(10, 60))
        except BaseException as error:
            error.add_note(f"queue={queue} seed={seed}, on an engine since seed {seed - seed % KEPT}")
            raise
        total["schedules"] += 1
    return total


@pytest.fixture
def _few_lines() -> Iterator[None]:
    logging.disable(logging.WARNING)  # each reset of vLLM's cache is a line
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("queue", QUEUES)
def test_nothing_between_input_and_admission_uses_a_wrong_block_or_leaks(make: Callable[..., Any], queue: int) -> None:
    total = explore(make, queue, range(1000 * queue, 1000 * queue + 100))
    assert all(total[act] for act in ("rejected", "aborts", "forgets", "resets", "kills", "interrupted")), total
    assert all(total[what] for what in ("early", "adopted", "loads", "preemptions")), total


def test_a_hint_that_is_adopted_whatever_has_changed_is_found(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EarlyHints, "adopt", lambda hints, request, epoch: hints.waiting.pop(request, None))
    with pytest.raises(AssertionError, match="a wrong block"):
        explore(make, 2, range(100))


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(0, 100_000, 10_000))
def test_nor_do_a_hundred_thousand_schedules(make: Callable[..., Any], start: int) -> None:
    print(explore(make, QUEUES[start // 10_000 % len(QUEUES)], range(start, start + 10_000)))
