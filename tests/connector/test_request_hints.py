"""Hints that travel with a request: read from vLLM's own structures, obeyed at arrival and later, ignored where bad."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

protocol = pytest.importorskip("vllm.v1.kv_hints.protocol")

import msgspec  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.engine import EngineCoreRequest  # noqa: E402
from vllm.v1.request import Request  # noqa: E402

from kvprefetch.connector.words.request_hints import MAX_ACTIONS, NO_CAP, NO_HINTS, RequestHints, parse  # noqa: E402
from kvprefetch.shmring.wire.records import NO_SESSION, session_digest  # noqa: E402

from .fakes import BLOCK, Engine  # noqa: E402

NOTHING, PENDING = (0, False), (None, False)
WAYS = ["kv_hints", "params.kv_hints", "params.kv_hint"]


def action(payload: Any, action_type: str = "kv.prefetch", version: str = "1.0") -> dict[str, Any]:
    return {"action_id": "a", "action_type": action_type, "action_version": version, "payload": payload}


def envelope(*actions: Any, version: str = "0.1") -> dict[str, Any]:
    return {"protocol_version": version, "message_id": "m", "actions": list(actions)}


def brought(way: str, content: Any) -> dict[str, Any]:
    """The two attributes of vLLM's own request, as it is after its way into the engine's process."""
    where, _, name = way.partition(".")
    sampling = SamplingParams(max_tokens=1)
    if where == "params":
        sampling.extra_args = {"kv_transfer_params": {name: content}}
        content = None
    else:
        content = msgspec.convert(content, protocol.KvHintsEnvelope)
    core = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        kv_hints=content,
    )
    sent = msgspec.msgpack.encode(core)
    request = Request.from_engine_core_request(msgspec.msgpack.decode(sent, type=EngineCoreRequest), None)
    return {"kv_hints": request.kv_hints, "kv_transfer_params": request.kv_transfer_params}


@pytest.mark.parametrize("way", WAYS)
def test_all_fields_are_read_from_vllm_s_own_request(way: str) -> None:
    payload = {"fetch": False, "priority": -7, "max_load_tokens": 64, "session_id": "s", "token_ids": [1], "ttl_ms": 5}
    found = parse(*brought(way, envelope(action(payload))).values())
    assert found == RequestHints(fetch=False, priority=-7, max_load_tokens=64, session_id="s", bad={})


@pytest.mark.parametrize(
    "content",
    [
        envelope(),
        envelope(action({"fetch": False}, "kv.fetch")),
        envelope(action({"fetch": False}, version="2.0")),
        envelope(action({"fetch": False}), version="9.0"),
        envelope(action({"Fetch": False, "hurry": 1})),
        envelope(action({"fetch": None, "priority": None})),
        envelope(*[action({}, "kv.other")] * MAX_ACTIONS, action({"fetch": False})),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_known_is_ignored(way: str, content: Any) -> None:
    assert parse(*brought(way, content).values()) == NO_HINTS


# What Dynamo 1.6.1 sends with a request of which another engine has two blocks (lib/kv-router/src/kv_hints.rs, and
# `_build_vllm_kv_hints` of dynamo/vllm/handlers.py, which makes vLLM's own structure of it).
DYNAMO_FETCH = action({"source_control_endpoint": "tcp://127.0.0.1:23280", "block_hashes": [11, 22]}, "kv.fetch")


@pytest.mark.parametrize("way", WAYS)
def test_dynamo_s_fetch_is_what_each_request_gets_and_no_client_s_refusal_is_undone(way: str) -> None:
    engine = Engine()
    engine.add("r", 3 * BLOCK, **brought(way, envelope(DYNAMO_FETCH)))
    engine.add("plain", 3 * BLOCK)
    assert engine.daemon.hint("r").blocks == engine.daemon.hint("plain").blocks == 2
    own = {"kv_hints": envelope(action({"fetch": False})), "kv_hint": envelope(DYNAMO_FETCH)}
    assert parse(msgspec.convert(envelope(DYNAMO_FETCH), protocol.KvHintsEnvelope), own) == RequestHints(fetch=False)


def test_requests_without_hints_have_none() -> None:
    given: list[Any] = [None, {}, {"do_remote_prefill": True}, {"kvprefetch": {}}, "text", [1]]
    for params in given:
        assert parse(None, params) == NO_HINTS


def test_the_last_of_several_values_counts() -> None:
    actions = action({"priority": 1}), action({"priority": 2, "fetch": True})
    params: dict[str, Any] = {"max_load_tokens": 5, "kv_hints": envelope(*actions)}
    assert parse(None, params) == RequestHints(priority=2, max_load_tokens=5, bad={})
    own = msgspec.convert(envelope(action({"priority": 3})), protocol.KvHintsEnvelope)
    assert parse(own, params).priority == 3


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({"fetch": 0}, "should be true or false: fetch=0"),
        ({"priority": 1 << 31}, f"should be an integer from {-(1 << 31)} to {(1 << 31) - 1}: priority={1 << 31}"),
        ({"priority": True}, "should be an integer from .*: priority=True"),
        ({"max_load_tokens": -1}, f"should be an integer from 0 to {NO_CAP}: max_load_tokens=-1"),
        ({"max_load_tokens": [1] * 100_000}, r"should be an integer from .*: max_load_tokens=\[1, .{1,200}"),
        ({"session_id": 7}, "should be a text of 1 to 256 characters: session_id=7"),
        ({"session_id": "s" * 257}, "should be a text of 1 to 256 characters: session_id='s.{1,200}"),
        ([1], r"should be an object: payload=\[1\]"),
    ],
)
def test_a_bad_value_is_ignored_and_the_others_count(payload: Any, text: str) -> None:
    found = parse(None, {"kv_hints": envelope(action(payload), action({"fetch": False}))})
    assert found[:3] == RequestHints(fetch=False)[:3]
    (line,) = found.bad.values()
    assert re.fullmatch(text, line)


@pytest.mark.parametrize("content", ["text", 5, [], {}, {"actions": "kv.prefetch"}, {"actions": {"a": 1}}])
def test_an_envelope_of_another_form_is_named(content: Any) -> None:
    (line,) = parse(None, {"kv_hints": content}).bad.values()
    assert line.startswith("should be an object with a list of actions: kv_hints=")
    assert parse(None, {"kv_hints": envelope("text", 5, None, [])}) == NO_HINTS


# --- what the scheduler side does with them ---------------------------------------------------------------------


def test_without_a_fetch_there_is_no_hint_and_a_plain_miss() -> None:
    engine = Engine()
    request = engine.add("r", 3 * BLOCK, **brought("kv_hints", envelope(action({"fetch": False}))))
    assert engine.match(request) == NOTHING
    engine.allocate(request, 0)
    engine.daemon.drain()
    assert (engine.daemon.hints, engine.side.counters) == ([], {})
    assert engine.cache.looks == 0


@pytest.mark.parametrize("way", WAYS)
def test_the_fetch_has_the_hint_s_priority(way: str) -> None:
    engine = Engine()
    engine.add("r", 3 * BLOCK, priority=5, **brought(way, envelope(action({"priority": -9}))))
    assert engine.daemon.hint("r").priority == -9


def test_the_hint_names_the_session_by_the_digest_of_its_id() -> None:
    """Its own attribute goes before a hint that travels with it; without either there are zeros."""
    engine = Engine()
    engine.add("own", 3 * BLOCK, session_id="a", kv_transfer_params={"session_id": "b"})
    engine.add("params", 3 * BLOCK, kv_transfer_params={"session_id": "b"})
    engine.add("hint", 3 * BLOCK, **brought("kv_hints", envelope(action({"session_id": "c"}))))
    engine.add("none", 3 * BLOCK)
    found = [engine.daemon.hint(name).session for name in ("own", "params", "hint", "none")]
    assert found == [*map(session_digest, "abc"), NO_SESSION]


def capped(tokens: int) -> dict[str, Any]:
    return brought("params.kv_hints", envelope(action({"max_load_tokens": tokens})))


@pytest.mark.parametrize(("cap", "blocks"), [(BLOCK - 1, 0), (BLOCK, 1), (3 * BLOCK - 1, 2), (100 * BLOCK, 6)])
def test_no_more_than_the_cap_is_fetched_after_what_is_local(cap: int, blocks: int) -> None:
    engine = Engine()
    request = engine.add("r", 9 * BLOCK, local=2 * BLOCK, **capped(cap))
    engine.daemon.drain()
    assert [(hint.local_blocks, hint.blocks) for hint in engine.daemon.hints] == [(2, 2 + blocks)] * bool(blocks)
    if blocks:
        engine.daemon.stage("r", 2 + blocks)
    assert engine.match(request) == (blocks * BLOCK, False)


def test_the_cap_holds_for_later_hints(caplog: pytest.LogCaptureFixture) -> None:
    """After local blocks were evicted, with a hint at the first visit only, and after a preemption."""
    engine = Engine()
    evicted = engine.add("evicted", 9 * BLOCK, local=3 * BLOCK, **capped(2 * BLOCK))
    assert engine.match(evicted, BLOCK) == PENDING
    hint = engine.daemon.hint("evicted")
    assert (hint.local_blocks, hint.blocks) == (1, 3)
    late = Engine(hint_on_arrival=False)
    request = late.add("late", 9 * BLOCK, priority=1, **capped(2 * BLOCK))
    assert late.match(request) == PENDING
    assert late.daemon.hint("late").blocks == 2
    late.daemon.stage("late", 2)
    late.take(request, 2 * BLOCK)
    late.step([(request, 7 * BLOCK)])
    request.num_preemptions += 1
    assert late.match(request) == PENDING
    late.daemon.drain()
    assert [hint.blocks for hint in late.daemon.hints] == [2, 2]


def test_a_bad_field_is_one_warning_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    with caplog.at_level(logging.WARNING, logger="vllm.kvprefetch"):
        for name in ("one", "two"):
            engine.add(name, 3 * BLOCK, kv_transfer_params={"kv_hints": envelope(action({"fetch": "no"}))})
            assert engine.daemon.hint(name).blocks == 2
    (record,) = caplog.records
    assert record.getMessage() == (
        "kvprefetch: request one: kv.prefetch: should be true or false: fetch='no'; it is ignored"
    )
    assert engine.side.counters["bad_overrides"] == 2
