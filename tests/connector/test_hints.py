"""The scheduler side's hints: the blocks that they name, requests without a hint, and hints pushed again."""

from __future__ import annotations

import pytest

from kvprefetch.connector.request import claims, hints
from kvprefetch.connector.request.claims import MAX_ON_DEMAND_HINTS
from kvprefetch.connector.request.hints import trace_of
from kvprefetch.connector.request.request_state import UNSENT
from kvprefetch.shmring.layout import Line
from kvprefetch.shmring.wire.records import NO_TRACE, FlagState

from .fakes import BLOCK, Engine

NOTHING, PENDING = (0, False), (None, False)


def test_a_hint_names_every_full_block_but_leaves_a_token_to_compute() -> None:
    """Blocks = floor((tokens - 1) / block), one digest each; the hint names the local blocks, too."""
    engine = Engine()
    for tokens, blocks in ((2 * BLOCK, 1), (2 * BLOCK + 1, 2), (BLOCK + 1, 1)):
        request = engine.add(f"r{tokens}", tokens, priority=-3)
        hint = engine.daemon.hint(request.request_id)
        assert (hint.blocks, hint.local_blocks, hint.prompt_tokens, hint.priority) == (blocks, 0, tokens, -3)
        assert hint.hashes == b"".join(request.digests(0, blocks))
    engine.add("local", 5 * BLOCK, local=2 * BLOCK)
    assert engine.daemon.hint("local").local_blocks == 2
    assert engine.daemon.flag("local") == (1, FlagState.HINTED, 0)


@pytest.mark.parametrize(("tokens", "local"), [(BLOCK, 0), (3, 0), (3 * BLOCK, 2 * BLOCK)])
def test_requests_left_alone(tokens: int, local: int) -> None:
    """Too short, or all local: no hint, nothing to load."""
    engine = Engine()
    request = engine.add("r", tokens, local=local)
    assert engine.side.counters == {}, "no hint was dropped"
    assert engine.match(request) == NOTHING
    engine.allocate(request, 0)
    engine.daemon.drain()
    assert engine.daemon.hints == []


@pytest.mark.parametrize("settings", [{"loads": False}, {"hint_on_arrival": False}])
def test_no_hint_at_arrival_when_not_wanted(settings: dict[str, bool]) -> None:
    engine = Engine(**settings)  # type: ignore[arg-type]
    request = engine.add("r", 3 * BLOCK)
    engine.daemon.drain()
    assert engine.daemon.hints == []
    assert engine.match(request) == (PENDING if settings.get("loads", True) else NOTHING)


def test_a_local_prefix_that_goes_on_shrinking_costs_one_hint() -> None:
    """The second one counts on no local block, and is not counted with those that a daemon lost."""
    local = MAX_ON_DEMAND_HINTS + 2
    engine = Engine()
    request = engine.add("r", (local + 2) * BLOCK, local=local * BLOCK)
    for left in range(local - 1, 1, -1):
        assert engine.match(request, left * BLOCK) == PENDING
        assert engine.daemon.hint("r").local_blocks == 0
    engine.daemon.drain()
    assert len(engine.daemon.hints) == 2
    for _ in range(MAX_ON_DEMAND_HINTS):
        engine.daemon.move(engine.daemon.hint("r").flag, FlagState.EXPIRED, 0)
        assert engine.match(request, BLOCK) == PENDING
    engine.daemon.stage("r", local + 1)
    assert engine.match(request, BLOCK) == (local * BLOCK, False)


def test_what_is_taken_back_is_pending_again_under_the_same_hint() -> None:
    """Before the first visit, and after an answer that was not used; no other hint, and asked for once."""
    engine = Engine()
    request = engine.add("r", 4 * BLOCK)
    hint = engine.daemon.stage("r", 3, slots=[4, 5, 6])
    for slots in ([6, 4, 5], [1, 2, 3]):
        engine.daemon.move(hint.flag, FlagState.HINTED, 0)
        assert engine.match(request) == PENDING
        engine.daemon.stage("r", 3, slots=slots)
        assert engine.match(request) == (3 * BLOCK, False)
        engine.step()
    engine.take(request, 3 * BLOCK)
    assert list(engine.step([(request, 4 * BLOCK)]).loads[0].slots) == [1, 2, 3]
    engine.daemon.drain()
    assert (len(engine.daemon.hints), len(engine.daemon.asks)) == (1, 1)


def test_a_hint_that_became_void_is_renewed_a_few_times() -> None:
    engine = Engine()
    request = engine.add("r", 4 * BLOCK)
    for _ in range(MAX_ON_DEMAND_HINTS):
        hint = engine.daemon.hint("r")
        engine.daemon.move(hint.flag, FlagState.EXPIRED, 0)
        assert engine.match(request) == PENDING
    engine.daemon.move(engine.daemon.hint("r").flag, FlagState.EXPIRED, 0)
    assert engine.match(request) == NOTHING
    assert engine.match(request) == NOTHING
    assert engine.daemon.unreturned() == []


def test_dropped_hints_are_counted_and_made_up_for() -> None:
    """No free flag, or a full ring: the request is hinted when the scheduler reaches it."""
    engine = Engine(flags=1)
    first, second = engine.add("first", 3 * BLOCK), engine.add("second", 3 * BLOCK)
    assert engine.daemon.words.load_acquire(Line.HINTS_DROPPED) == 1
    assert engine.match(second) == PENDING
    engine.side.finished(first)
    engine.daemon.drain()
    engine.daemon.free()
    assert engine.match(second) == PENDING
    engine.daemon.stage("second", 2)
    assert engine.match(second) == (2 * BLOCK, False)

    engine = Engine(ring=4096)
    requests = [engine.add(f"r{i}", 40 * BLOCK) for i in range(10)]
    assert engine.daemon.words.load_acquire(Line.HINTS_DROPPED) > 0
    for request in requests:
        engine.side.finished(request)
    assert engine.daemon.unreturned() == [], "a full ring loses nudges, never releases"


def test_a_dropped_hint_is_sent_again_when_there_is_room_before_the_scheduler_asks() -> None:
    """Oldest first, with what is local by then, and not for requests that ended or that became all local."""
    engine = Engine(ring=4096)
    fill = [engine.add(f"fill{i}", 39 * BLOCK) for i in range(3)]
    lost = [engine.add(f"lost{i}", 39 * BLOCK) for i in range(5)]
    names, looks = [request.request_id for request in lost], engine.cache.looks
    engine.step()
    assert engine.side.counters["hints_dropped"] == 5, "a second try is no second loss"
    assert engine.cache.looks == looks, "before there is room nobody looks at what is local, which takes 20 ms"
    engine.side.finished(lost[1])
    engine.cache.hits |= {"lost2": 39 * BLOCK, "lost3": 2 * BLOCK}
    for _ in range(3):
        engine.daemon.drain()
        engine.step()
    engine.daemon.drain()
    came = {hint.request_id: hint.local_blocks for hint in engine.daemon.hints if hint.request_id in names}
    assert list(came.items()) == [("lost0", 0), ("lost3", 2), ("lost4", 0)]
    assert engine.side.counters["hints_resent"] == 3
    assert engine.side.counters["on_demand_hints"] == 0
    for request in (*fill, lost[0], *lost[2:]):
        engine.side.finished(request)
    assert not engine.side.phases[UNSENT]


def test_hints_that_found_no_room_cost_a_step_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks are sent in each, and a segment that says it has room and takes no hint is tried once."""
    monkeypatch.setattr(claims, "RESENT_BLOCKS", 50)
    engine = Engine(flags=5)
    requests = [engine.add(f"r{i}", 31 * BLOCK) for i in range(10)]
    with monkeypatch.context() as full:
        full.setattr(hints, "fits", lambda *_: True)
        looks = engine.cache.looks
        engine.step()
        assert engine.cache.looks == looks + 1
    for request in requests[:5]:
        engine.side.finished(request)
    engine.daemon.drain()
    engine.daemon.free()
    sent = []
    for _ in range(3):
        engine.step()
        sent.append(engine.side.counters["hints_resent"])
    assert sent == [2, 4, 5]
    engine.daemon.drain()
    assert [hint.request_id for hint in engine.daemon.hints][-5:] == [f"r{i}" for i in range(5, 10)], "the oldest first"


TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{TRACE_ID}-{PARENT_ID}-01", bytes.fromhex(TRACE_ID + PARENT_ID)),
        (f"01-{TRACE_ID}-{PARENT_ID}-03-more", bytes.fromhex(TRACE_ID + PARENT_ID)),
        (f"00-{TRACE_ID}-{PARENT_ID}-00", NO_TRACE),  # not sampled
        (f"00-{TRACE_ID}", NO_TRACE),
        ("x", NO_TRACE),
        ("", NO_TRACE),
    ],
)
def test_the_trace_of_a_request_comes_from_its_headers(header: str, expected: bytes) -> None:
    assert trace_of({"traceparent": header}) == expected
    assert trace_of({"tracestate": header}) == NO_TRACE
