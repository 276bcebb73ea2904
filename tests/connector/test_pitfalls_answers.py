"""Pitfalls of answering vLLM's scheduler (docs/PITFALLS.md): each check fails once its guard is taken away."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core import kv_cache_utils

from kvprefetch.connector.connector import KVPrefetchConnector
from kvprefetch.connector.request import claims, hints
from kvprefetch.connector.request.claims import Claims
from kvprefetch.connector.request.loads import Loads
from kvprefetch.connector.request.request_state import RequestState
from kvprefetch.connector.scheduler.scheduler import SchedulerSide
from kvprefetch.kv.groups import Group, Groups, Kind
from kvprefetch.kv.prompts import Prompt
from kvprefetch.shmring.wire.records import FlagState, Outcome

from .fakes import BLOCK, GEOMETRY, fails_with
from .fakes import Engine as FakeEngine
from .real import OtherConnector, RealEngine
from .reports import reads_of

Make = Callable[..., RealEngine]
Patch = pytest.MonkeyPatch


def fail(*_: Any) -> None:
    """In place of a load."""
    raise OSError("planted")


def test_p01_a_full_prompt_hit_leaves_a_token_to_compute(make: Make, monkeypatch: Patch) -> None:
    def check() -> None:
        engine = make(load_mode="sync")
        engine.hinted("r", 4 * BLOCK)
        engine.run()
        assert [len(order.slots) for order in engine.orders()] == [3]
        assert engine.left() == []

    fails_with(check, monkeypatch, Claims, "last_tokens", 0)


def test_p01_nothing_is_never_asynchronous(make: Make, monkeypatch: Patch) -> None:
    def check() -> None:
        engine = make(load_mode="async")
        engine.hinted("r", 4 * BLOCK, staged=0)
        engine.run()
        assert engine.tokens["r"] == [3, 3, 3]

    fails_with(check, monkeypatch, claims, "NOTHING", (0, True))


def grown_local_hit(make: Make) -> RealEngine:
    """Two blocks of b become local after its hint; then its six staged blocks are asked for."""
    engine = make(seqs=1)
    prompt = list(range(100, 100 + 6 * BLOCK + 5))
    engine.add("a", prompt[: 2 * BLOCK + 1], out=1)
    engine.add("b", prompt)
    engine.stage("a", 0)
    engine.stage("b")
    while not engine.orders():
        engine.step()
    return engine


def test_p02_the_answer_is_relative_to_what_is_local_now(make: Make, monkeypatch: Patch) -> None:
    def check() -> None:
        engine = grown_local_hit(make)
        assert [list(order.slots) for order in engine.orders()] == [[2, 3, 4, 5]]
        engine.finish()

    original = Claims.match

    def from_the_first(self: Claims, state: Any, epoch: Any, start: int, **rest: Any) -> Any:
        return original(self, state, epoch, 0, **rest)

    fails_with(check, monkeypatch, Claims, "match", from_the_first)


def test_p03_an_answer_may_be_asked_for_again_and_is_given_up_when_not_used(make: Make, monkeypatch: Patch) -> None:
    """Asked any number of times; an allocation that fails after the answer tells the connector nothing."""

    def check() -> None:
        engine = make(load_mode="sync")
        request = engine.hinted("r", 4 * BLOCK)
        manager = engine.scheduler.kv_cache_manager
        allocate = manager.allocate_slots
        manager.allocate_slots = lambda *args, **kwargs: None
        engine.step()
        assert engine.daemon.flag("r").state == FlagState.READY, "the daemon may take it back between passes"
        manager.allocate_slots = allocate
        answers = {engine.connector.get_num_new_matched_tokens(request, 0) for _ in range(3)}
        assert answers == {(3 * BLOCK, False)}
        engine.run()
        assert len(engine.orders()) == 1
        assert engine.left() == []

    fails_with(check, monkeypatch, hints, "unclaim", lambda handle: None, match="take it back")


def test_p04_waiting_ends_without_vllms_help(make: Make) -> None:
    """vLLM asks for ever. The guard is the deadline: with one that never comes the request never runs."""

    def check(wait_timeout_ms: int) -> None:
        engine = make(wait_timeout_ms=wait_timeout_ms)
        engine.add("r", 4 * BLOCK)
        for _ in range(5):
            engine.step()
        engine.clock.advance_ms(1000)
        for _ in range(5):
            engine.step()
        assert engine.tokens["r"], "still waiting"

    check(500)
    with pytest.raises(AssertionError, match="still waiting"):
        check(3_600_000)


def test_p05_a_request_that_skips_reading_is_left_alone(make: Make, monkeypatch: Patch) -> None:
    """vLLM asks for it all the same and ignores the answer; were it claimed, the later call with 0 gives it back."""

    def check() -> RealEngine:
        engine = make()
        engine.add("r", 4 * BLOCK, sampling={"prompt_logprobs": 1})
        engine.daemon.drain()
        if engine.daemon.hints:
            engine.stage("r")
        engine.finish()
        assert engine.orders() == []
        return engine

    assert check().daemon.hints == []
    original = SchedulerSide.arrived

    def heedless(self: SchedulerSide, request: Any) -> None:
        skips, request.skip_reading_prefix_cache = request.skip_reading_prefix_cache, False
        original(self, request)
        request.skip_reading_prefix_cache = skips

    monkeypatch.setattr(SchedulerSide, "arrived", heedless)
    assert len(check().daemon.hints) == 1, "without the guard a hint for nothing; still nothing leaks"


def test_p06_only_what_was_allocated_for_us_is_loaded(make: Make, monkeypatch: Patch) -> None:
    """The second call after an asynchronous load, and another child's request with real blocks, both say 0."""

    def check() -> None:
        engine = make(load_mode="async")
        engine.hinted("r", 4 * BLOCK)
        engine.run()
        assert len(engine.orders()) == 1
        engine = make(multi=True, load_mode="sync")
        engine.hinted("r", 4 * BLOCK)
        monkeypatch.setattr(OtherConnector, "tokens", 2 * BLOCK)
        engine.step()
        assert engine.orders() == [], "the other child loads this request"
        engine.daemon.drain()
        assert [done.outcome for done in engine.daemon.dones] == [Outcome.UNUSED]
        monkeypatch.setattr(OtherConnector, "tokens", 0)
        engine.finish()

    original = SchedulerSide.allocated

    def careless(self: SchedulerSide, request: Any, blocks: Any, tokens: int) -> None:
        if (answer := self.requests[request.request_id].answer) is not None:
            tokens = answer.count * BLOCK
        original(self, request, blocks, tokens)

    fails_with(check, monkeypatch, SchedulerSide, "allocated", careless, match="other child")


def test_p07_loads_write_only_behind_the_local_blocks(make: Make, monkeypatch: Patch) -> None:
    """The leading blocks are shared: other requests read them."""

    def check() -> None:
        engine = grown_local_hit(make)
        (order,) = engine.orders()
        assert list(order.block_ids) == engine.table("b")[2:6]

    original = Loads.dispatch

    def from_the_first(self: Loads, state: Any, *rest: Any) -> None:
        state.answer = state.answer._replace(start=0)
        original(self, state, *rest)

    fails_with(check, monkeypatch, Loads, "dispatch", from_the_first)


def test_p11_a_request_whose_load_failed_is_not_loaded_again(make: Make, monkeypatch: Patch) -> None:
    """With no good token it is matched again, and a connector that answers the same again does so for ever."""

    def check() -> None:
        engine = make(load_mode="async")
        engine.hinted("r", 4 * BLOCK)
        engine.workers[0].worker_side.paged.load = fail
        engine.step()
        engine.run()
        assert engine.tokens["r"] == [3, 3, 3]
        assert engine.side.counters["hints"] == engine.side.counters["failed_loads"] == 1

    def forgetful(self: RequestState) -> bool:
        self.restart(self.prefill_tokens, self.usable)
        return True

    fails_with(check, monkeypatch, RequestState, "not_loaded", forgetful)


def test_p33_a_request_whose_load_failed_stands_in_nobodys_way(make: Make, monkeypatch: Patch) -> None:
    """It lost its blocks and lacks room; a streaming session behind it has that, and cannot go on to give it back."""

    def check() -> None:
        engine = make(load_mode="async", blocks=1 + 9)
        engine.workers[0].worker_side.paged.load = fail
        engine.add("session", 4 * BLOCK - 1, resumable=True)
        engine.step()
        engine.add("r", 4 * BLOCK + 5)
        engine.stage("r")
        engine.step()
        assert [order.request_id for order in engine.orders()] == ["r"]
        for _ in range(3):  # the session takes the fifth block that "r" would need, and ends its turn
            engine.step()
        assert engine.tokens == {"session": [3, 3, 3], "r": []}
        engine.add("session", BLOCK, resumable=True)
        for _ in range(6):
            engine.step()
        assert len(engine.tokens["session"]) == 6
        engine.abort("session")
        engine.run()
        assert engine.tokens["r"] == [3, 3, 3]
        assert engine.left() == []

    original = RequestState.not_loaded

    def as_if_it_could_not_fail(self: RequestState) -> bool:
        original(self)
        return False

    fails_with(check, monkeypatch, RequestState, "not_loaded", as_if_it_could_not_fail, match="3 == 6")


def test_p10_a_policy_that_fails_requests_is_warned_about(make: Make, monkeypatch: Patch, caplog: Any) -> None:
    def check() -> None:
        caplog.clear()
        make(policy="fail")
        assert "kv_load_failure_policy" in caplog.text
        caplog.clear()
        make(policy="recompute")
        assert "kv_load_failure_policy" not in caplog.text

    from kvprefetch.connector import connector

    fails_with(check, monkeypatch, connector.log, "warning", lambda *args: None)


def test_p24_a_drafter_costs_the_last_matched_block_once(monkeypatch: Patch) -> None:
    """Its draft KV depends on the token after it, which no hash covers; and a saved block's may not be written yet."""

    drafted = Groups((Group(Kind.FULL, BLOCK, drafts=True),), BLOCK)

    def check(groups: Groups) -> None:
        engine = FakeEngine(groups=groups, save_decode_cache=True, credits=range(40, 60))
        request, short = engine.add("r", 5 * BLOCK), engine.add("short", BLOCK + 1)
        assert engine.match(short) == (0, False), "nothing could prove its only block"
        hint = engine.daemon.hint("r")
        assert len(hint.hashes) // hint.hash_bytes == hint.blocks + 1 == 5, "the last digest is that of the proof"
        prompt = Prompt(drafted, hint.hashes, range(hint.blocks), room=9, staged=lambda _: False)
        while names := prompt.next(9):
            prompt.found(b"\1" * min(4, len(names)), b"")
        assert prompt.choose().blocks == 3, "four are there"
        engine.daemon.stage("r", 3)
        engine.take(request, 3 * BLOCK)
        engine.acknowledge(engine.step([(request, 2 * BLOCK)]))
        request.num_tokens += BLOCK
        assert engine.step([(request, BLOCK)]).saves == []

    check(drafted)
    with pytest.raises(AssertionError):
        check(GEOMETRY.groups)


def test_p27_a_full_ring_drops_the_hint_and_never_blocks(monkeypatch: Patch) -> None:
    """on_new_request runs on the engine's main thread; the late hint makes up for a dropped one."""

    def check() -> None:
        engine = FakeEngine(ring=4096)
        fill = [engine.add(f"fill{i}", 39 * BLOCK) for i in range(3)]
        lost = engine.add("lost", 39 * BLOCK)
        assert engine.side.counters["hints_dropped"] == 1
        engine.daemon.drain()  # the daemon caught up before the scheduler got there
        assert "lost" not in [hint.request_id for hint in engine.daemon.hints]
        assert engine.match(lost) == (None, False)
        hint = engine.daemon.hint("lost")
        assert hint.blocks == 38
        assert hint.flag in [ask.flag for ask in engine.daemon.asks], "its turn has come"
        assert engine.side.counters["on_demand_hints"] == 1
        engine.daemon.stage("lost", 38)
        assert engine.match(lost) == (38 * BLOCK, False)
        for request in (*fill, lost):
            engine.side.finished(request)

    check()

    original, made = Claims.push, list[Any]()

    def always(*arguments: Any) -> Any:
        """A ring without room is taken for one that took the hint."""
        made.append(original(*arguments) or made[-1])
        return made[-1]

    fails_with(check, monkeypatch, Claims, "push", always)


def test_p25_both_roles_answer_what_vllm_asks_of_both(make: Make, monkeypatch: Patch) -> None:
    """Statistics are asked of both in every step (the real scheduler does), shutdown and reset_cache as well."""

    def check() -> None:
        engine = make(ranks=2, credits=[40, 41])
        engine.hinted("r", 3 * BLOCK, staged=1)
        engine.run()
        for connector, result in ((engine.connector, True), *((worker, None) for worker in engine.workers)):
            assert connector.reset_cache() is result
            connector.get_kv_connector_stats()
            connector.shutdown()

    check()
    monkeypatch.setattr(KVPrefetchConnector, "reset_cache", lambda self: self.scheduler_side.reset())
    with pytest.raises(AttributeError):
        check()


def test_p32_equal_tokens_with_another_adapter_image_or_salt_share_nothing(make: Make, monkeypatch: Patch) -> None:
    """The digests that are hinted, and so those that are saved, rest on vLLM's own, with all that it hashes.

    Two adapters of one content are no exception: vLLM's hash has their names.
    """
    image = {"modality": "image", "mm_position": PlaceholderRange(offset=4, length=8), "data": None}
    others: dict[str, dict[str, Any]] = {
        "plain": {},
        "adapter": {"lora_request": LoRARequest("adapter", 1, "/adapter")},
        "other adapter": {"lora_request": LoRARequest("other", 2, "/other")},
        "cat": {"mm_features": [MultiModalFeatureSpec(**image, identifier="cat")]},
        "dog": {"mm_features": [MultiModalFeatureSpec(**image, identifier="dog")]},
        "salt": {"cache_salt": "salt"},
    }

    def check() -> None:
        engine = make()
        hints: list[bytes] = []
        for options in others.values():
            if adapter := options.get("lora_request"):
                engine.side.outputs(reads_of(adapter, "content"))
        for name, options in others.items():
            engine.add(name, list(range(10, 3 * BLOCK + 11)), **options)
            hint = engine.daemon.hint(name)
            assert hint.blocks == 3
            hints += struct.unpack("32s" * 3, hint.hashes)
        assert len(set(hints)) == 3 * len(others)

    fails_with(check, monkeypatch, kv_cache_utils, "generate_block_hash_extra_keys", lambda *args: (None, 0))
