"""The connector's configuration: the daemon to start, and one line for what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kvprefetch.connector.words.config import load, override

# Of Dynamo 1.6.1's own tests: dynamo/vllm/tests/test_kv_hints.py and test_state_agent.py.
DYNAMO_ENTRY = {
    "type": "custom",
    "router_capabilities": ["router_hint"],
    "control_host": "0.0.0.0",
    "control_advertise_host": "127.0.0.1",
    "control_ports": ["23280"],
}
DYNAMO_AGENT = {
    "raw_advertise_host": "worker-a",
    "cache_owner_ids": {"0": f"{'a' * 32}:{'b' * 32}/{'c' * 16}/{'d' * 32}"},
}


def test_an_engine_starts_with_what_dynamo_reads_of_its_settings() -> None:
    """The keys are Dynamo's alone: with them an engine does what it does without them."""
    dynamo = {"secondary_tiers": [DYNAMO_ENTRY], "dynamo_state_agent": DYNAMO_AGENT}
    assert load({"wait_timeout_ms": 7, **dynamo}) == load({"wait_timeout_ms": 7})
    assert load({"secondary_tiers": []}) == load({})


def test_what_starts_a_daemon() -> None:
    given: tuple[Any, ...] = (None, False, True, {}, {"disk": "/x"})
    assert [load({"start_daemon": each}).start_daemon for each in given] == [None, None, {}, {}, {"disk": "/x"}]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"wait_polcy": "wait"}, ["'wait_polcy': the keys are socket, daemon_user, ", "; did you mean wait_policy?"]),
        ({7: "x"}, ["unknown key 7"]),
        ({"wait_timeout_ms": "5000"}, ["wait_timeout_ms", "integer", "'5000'"]),
        ({"wait_timeout_ms": -1}, ["wait_timeout_ms: should be 0 to 3600000: wait_timeout_ms=-1"]),
        ({"save_decode_cache": 1}, ["save_decode_cache", "boolean", "1"]),
        ({"socket": "/" + "é" * 60}, ["socket", "1 to 107 bytes"]),
        ({"daemon_user": -1}, ["daemon_user", "-1", "0 to 4294967294"]),
        ({"daemon_user": True}, ["daemon_user", "a user's name, or its number"]),
        ({"mode": "x" * 10_000}, ["mode", "'on'", "'xxx"]),
        ({"start_daemon": "/x"}, ["start_daemon: should be true or the daemon's options", "start_daemon='/x'"]),
        ({"secondary_tiers": [{"type": "fs", "root_dir": "/x"}]}, ["secondary_tiers: only what advertises", "'fs'"]),
        ({"secondary_tiers": [DYNAMO_ENTRY, "x"]}, ["secondary_tiers: only what advertises", "entry='x'"]),
        ({"secondary_tiers": "x"}, ["secondary_tiers: only what advertises", "entry='x'"]),
        ({"router_hint": True}, ["unknown key 'router_hint'"]),
        ({"start_daemon": {"socket": "/x"}}, ["without socket", "start_daemon={'socket': '/x'}"]),
    ],
)
def test_a_bad_value_is_one_line_with_key_value_and_bound(values: dict[Any, object], names: list[str]) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as caught:
        load(values)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 400
    for name in names:
        assert name in text


def test_a_former_setting_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = load({"reset_timeout_ms": 5, "mode": "shadow", "wait_timeout_ms": 7})
    assert (config.mode, config.wait_timeout_ms) == ("off", 7)
    said = sorted(record.getMessage() for record in caplog.records)
    assert [text.partition(": ")[2] for text in said] == [
        "mode: shadow is the daemon's alone now (kvprefetchd mode shadow); this engine is off",
        "the key reset_timeout_ms is gone, and ignored: a reset is confirmed at once",
    ]


@pytest.mark.parametrize("wishes", ["x" * 10_000, {"wait_policy": "x" * 10_000}, {"x" * 10_000: 1}])
def test_what_a_client_wishes_fills_no_log(wishes: object) -> None:
    with pytest.raises(ValueError, match="kv_transfer_params") as caught:
        override(load({}), wishes)
    assert len(str(caught.value)) < 600
