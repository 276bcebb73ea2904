"""The leases of hits that wait for their fetch: look-ups renew them, on a clock of the test."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np

from kvprefetch.daemon.engine import leases as leases_module
from kvprefetch.daemon.engine.leases import Leases
from kvprefetch.daemon.engine.lookups import BATCH_DIGESTS, RENEWED_AT_ONCE, LookedUp, LookUps
from kvprefetch.daemon.engine.sessions import Chain, Sessions
from kvprefetch.daemon.engine.transfers import Found
from kvprefetch.daemon.planning.bad_values import BadValues
from kvprefetch.daemon.planning.runs import Lane
from tests.daemon.engine.asking import SECOND, Setup
from tests.daemon.planning.support import ONE_GROUP, FlagsModel, Planner, block

SESSION = bytes(16)


def test_hits_that_wait_longer_than_half_their_lease_are_asked_for_again() -> None:
    setup = Setup()
    setup.store("x", "a", "b", "c")
    setup.hint(1, "x")
    waiting = setup.hint(2, "a", "b", "c")
    setup.ask(0)
    setup.answer()
    setup.planner.next_order()
    setup.planner.next_order()
    setup.tick(5 * SECOND - 1)
    assert len(setup.sent) == 1
    setup.tick(5 * SECOND)
    assert setup.renewed() == [waiting]
    setup.stored.discard(block("c"))
    setup.answer(5 * SECOND)
    assert setup.renewals == {waiting: 2}
    assert setup.planner.requests[waiting].limit == 2, "shorter, not failed"
    setup.tick(10 * SECOND)
    assert len(setup.sent) == 3, "and again half a lease later"
    setup.tick(15 * SECOND)
    setup.planner.finish(waiting)
    setup.answer(15 * SECOND)
    assert len(setup.sent) == 3, "it ended before its turn"


def test_the_lease_of_blocks_that_are_taken_back_is_renewed_and_their_medium_kept() -> None:
    """Also when it was staged for a long time before, or never looked up; the last block lies only on disk."""
    setup = Setup()
    setup.store("x", "y")
    first = setup.hint(1, "x")
    setup.ask(0)
    setup.answer()
    planner = setup.planner
    planner.fetched(planner.next_order().number, [True], 1)  # type: ignore[union-attr]
    found = setup.hint(2, "x", priority=1)
    setup.tick(5 * SECOND)
    assert len(setup.sent) == 1, "nothing waits for a fetch"
    planner.finish(first)
    planner.looked_up(setup.hint(3, "y"), 1, b"\1")
    assert planner.next_order(Lane.DISK) is not None
    assert planner.requests[found].taken_back == 1
    setup.tick(10 * SECOND)
    assert setup.renewed() == [found]
    assert setup.sent[-1].digests == [(b"x.......\0",)]


def test_a_renewal_keeps_what_is_known_of_the_blocks_before_it() -> None:
    setup = Setup()
    key = setup.hint(1, "a", "b", "c")
    setup.ask(0)
    setup.answered(setup.sent[-1], [Found(b"\1\1\1", b"\1\0\1")], 0)
    assert setup.planner.next_order(Lane.DISK) is not None
    setup.tick(5 * SECOND)
    assert setup.sent[-1].parts[0].start == 1
    setup.answered(setup.sent[-1], [Found(b"\1\0", bytes(2))], 5 * SECOND)
    assert setup.planner.requests[key].limit == 2
    assert setup.planner.requests[key].on_disk == b"\1\0"


def test_a_renewal_that_fails_takes_nothing_away() -> None:
    setup = Setup()
    setup.store("x", "a")
    setup.hint(1, "x")
    waiting = setup.hint(2, "a")
    setup.ask(0)
    setup.answer()
    setup.planner.next_order()
    setup.tick(5 * SECOND)
    setup.answered(setup.sent[-1], None, 5 * SECOND)
    assert setup.planner.requests[waiting].limit == 1
    setup.up = False
    setup.tick(10 * SECOND)
    setup.tick(15 * SECOND - 1)
    assert len(setup.sent) == 2
    setup.up = True
    setup.tick(15 * SECOND)
    assert setup.renewed() == [waiting], "tried again when it is due again"
    assert len(setup.sent) == 3


def test_what_ends_while_the_store_is_not_asked_again_leaves_nothing() -> None:
    """Requests while it does not answer, and sessions' requests while it is full."""
    setup, sessions = Setup(), Sessions(ONE_GROUP)
    leases = Leases(10 * SECOND, setup.planner.requests, sessions)
    setup.up = False

    def some(first: int, count: int) -> None:
        for number in range(first, first + count):
            now = number * SECOND // 10
            setup.planner.finish(setup.hint(number, f"r{number}", now=now))
            sessions.arrived(SESSION, Chain(block("s"), 8), 0, now, 0.0)
            leases.keep(SESSION, now)
            assert leases.next(64, now, keep=False) is None

    some(0, 500)
    with contextlib.ExitStack() as undo:
        tracemalloc.start()
        undo.callback(tracemalloc.stop)
        some(1000, 3000)
        found = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, leases_module.__file__)])
    assert sum(each.size for each in found.traces) < 50_000


PROMPT = 8192  # blocks: 128k tokens of 16 each
MS = 1_000_000


def held(prompts: int) -> list[int]:
    """Hint so many long prompts, which wait for six seconds with a lease of two; return those that never lost it.

    A call takes 1 ms, and for each digest of a new prompt 8 us, for each that is renewed 1.5 us, as measured with the
    medium and without it.
    """
    planner = Planner(1, FlagsModel(), chunk_blocks=1)
    look_ups = LookUps(
        planner.requests, BadValues(), Leases(2 * SECOND, planner.requests, Sessions(ONE_GROUP)), timeout_ns=4 * SECOND
    )
    for number in range(prompts):
        digests = b"".join(block.to_bytes(8, "big") for block in range(number << 20, (number << 20) + PROMPT))
        assert look_ups.add(planner.hinted((number, 1), digests), 0, answering=True) is None
    ends = np.full((prompts, PROMPT), np.iinfo(np.int64).max)  # of each digest's lease
    lost: set[int] = set()
    slices = Counter[int]()  # digests that were asked for the first time
    batch, asked_ns, back, before = None, 0, 0, 0
    for now in range(0, 6 * SECOND, MS):
        if batch is not None and now >= back:
            for question in batch.questions:
                number = question.request.key[0]
                start, slices[number] = slices[number], slices[number] + len(question.names)
                ends[number, start : slices[number]] = asked_ns + 2 * SECOND
            for part in batch.parts:
                assert part.request is not None
                ends[part.request.key[0], part.start : part.start + len(part.names)] = asked_ns + 2 * SECOND
            found = [Found(b"\1" * len(digests), b"") for digests in batch.digests]
            for answer in look_ups.answered(batch, found, now):
                if isinstance(answer, LookedUp):
                    planner.choose(answer.request)
            batch = None
        if now % (100 * MS) == 0:
            lost.update(np.flatnonzero((ends < now).any(axis=1)).tolist())
            assert not look_ups.tick(now)
        if batch is None and (batch := look_ups.next_batch(now)) is not None:
            count = sum(map(len, batch.digests))
            most = max(before, RENEWED_AT_ONCE) + BATCH_DIGESTS
            assert not batch.parts or count < most, "new requests wait longer for each other"
            before = 0 if batch.parts else count
            asked_ns, back = now, now + MS + count * (1500 if batch.parts else 8000)
    return [number for number in range(prompts) if number not in lost]


def test_a_lease_of_two_seconds_holds_many_prompts_of_128k_tokens() -> None:
    """Beside new prompts: test_renewals.py."""
    assert held(16) == list(range(16))


def test_of_more_prompts_than_can_be_renewed_the_most_urgent_keep_their_lease() -> None:
    kept = held(40)
    assert kept == list(range(len(kept)))
    assert len(kept) >= 10


def test_a_renewal_of_blocks_that_are_chosen_no_more_takes_nothing_away() -> None:
    """With several groups a shorter prefix has other blocks at the places of the question."""
    setup = Setup()
    setup.store("x", *"abc")
    setup.hint(1, "x")
    waiting = setup.hint(2, *"abc")
    setup.ask(0)
    setup.answer()
    setup.planner.next_order()
    setup.planner.next_order()
    setup.tick(5 * SECOND)
    assert setup.renewed() == [waiting]
    parts: Any = setup.sent[-1].parts
    parts[0] = parts[0]._replace(names=tuple(block(name) for name in "def"))
    setup.answered(setup.sent[-1], [Found(bytes(3), bytes(3))], 5 * SECOND)
    assert setup.renewals == {}
    assert setup.planner.requests[waiting].limit == 3
