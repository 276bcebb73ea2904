"""What the HTTP door takes: bad fields are named with value and bound, unknown ones are ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvprefetch.daemon.door.envelope import MAX_ACTIONS, Action, Bad, Envelope, parsed, payload
from kvprefetch.shmring.wire.checks import ACTION, ACTION_VERSION

AB, CD = "ab" * 32, "cd" * 32


def envelope(**changes: Any) -> bytes:
    action = {"action_id": "a1", "action_type": ACTION, "action_version": ACTION_VERSION, "payload": {"token_ids": [1]}}
    return json.dumps({"protocol_version": "0.1", "message_id": "m", "actions": [action], **changes}).encode()


def refused(model: type[Envelope], body: bytes) -> str:
    with pytest.raises(Bad) as bad:
        parsed(model, body)
    assert bad.value.status == 400
    assert len(str(bad.value).splitlines()) == 1
    return str(bad.value)


def test_fields_of_later_versions_are_ignored() -> None:
    found = parsed(Envelope, envelope(new_field={"x": 1}))
    assert found.actions[0].payload == {"token_ids": [1]}
    assert payload(action(token_ids=[1, 2], urgency="later")).token_ids == [1, 2]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"what", ["JSON"]),
        (b"[1]", ["value", "[1]"]),
        (envelope(protocol_version="2"), ["protocol_version", "'0.1'", "'2'"]),
        (envelope(message_id="a b"), ["message_id", "'a b'"]),
        (envelope(actions=[]), ["actions", "at least 1"]),
        (envelope(actions=[{}] * (MAX_ACTIONS + 1)), ["actions"]),
        (envelope(actions=[{"action_id": 7}]), ["actions.0.action_id", "7"]),
        (b"[" * 100_000, ["JSON"]),
    ],
)
def test_a_bad_envelope_is_one_line(body: bytes, words: list[str]) -> None:
    text = refused(Envelope, body)
    for word in words:
        assert word in text


def action(**fields: Any) -> Action:
    return Action(action_id="a1", action_type=ACTION, action_version=ACTION_VERSION, payload=fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ["one of token_ids, block_hashes and session_id", "given=none"]),
        ({"token_ids": [1], "block_hashes": [AB]}, ["given=both"]),
        ({"token_ids": []}, ["token_ids", "at least 1"]),
        ({"token_ids": [1, -1]}, ["token_ids.1", "-1", "greater than or equal to 0"]),
        ({"token_ids": [1, True]}, ["token_ids.1"]),
        ({"block_hashes": ["abc"]}, ["block_hashes.0", "'abc'"]),
        ({"block_hashes": [AB, "ab"]}, ["differ in length", "bytes=[1, 32]"]),
        ({"token_ids": [1], "cache_salt": 5}, ["cache_salt", "5"]),
        ({"token_ids": [1], "lora_name": "x"}, ["lora_name", "announce session_id"]),
        ({"token_ids": [1], "ttl_ms": 0}, ["ttl_ms", "1 to 3600000", "0"]),
        ({"token_ids": [1], "expected_in_ms": "soon"}, ["expected_in_ms", "'soon'"]),
    ],
)
def test_a_bad_payload_is_one_line_that_names_its_action(fields: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Bad) as bad:
        payload(action(**fields))
    text = str(bad.value)
    assert text.startswith("action a1: ")
    assert len(text.splitlines()) == 1
    for word in words:
        assert word in text
