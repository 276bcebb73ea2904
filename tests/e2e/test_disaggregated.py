"""Prefill and decode engines with NIXL between them, and our store beside it: docs/prefill-decode.md, on CPUs."""

from __future__ import annotations

import json
import re
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import BLOCK, Site, whole_blocks
from tests.lab.engine import Engine, EngineSpec
from tests.lab.prompts import make_prompts

pytest.importorskip("nixl", reason="NIXL is not installed")
PROMPTS = make_prompts(4, 300, seed=8)
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "prefill-decode.md").read_text()
# What a router sends to a prefill engine.
REMOTE = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)


def configurations() -> dict[str, dict[str, Any]]:
    """Those of the page, by what the line before names them."""
    return {name: json.loads(text) for name, text in re.findall(r"(\w+):\n\n```json\n(.*?)```", PAGE, re.DOTALL)}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def start(site: Site) -> Callable[..., Engine]:
    def start(name: str, order: Callable[[list[Any]], list[Any]] = list) -> Engine:
        """An engine with a configuration of the page, its children in this order."""
        transfer = configurations()[name]
        children = transfer["kv_connector_extra_config"]["connectors"]
        for child in children:
            if child["kv_connector"] == "KVPrefetchConnector":
                waits = {"wait_policy": "timeout", "wait_timeout_ms": 60_000}
                child |= {"kv_connector_extra_config": {"socket": str(site.daemon.socket), **waits}}
        transfer["kv_connector_extra_config"]["connectors"] = order(children)
        env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        return site.engine(EngineSpec(model=site.model, kv_transfer=transfer, env=env | {"UCX_TLS": "tcp,self"}))

    return start


@pytest.fixture(scope="module")
def prefill(start: Callable[..., Engine]) -> Engine:
    return start("Prefill")


def served(engine: Engine, name: str, params: list[Any], max_tokens: int = 16) -> list[dict[str, Any]]:
    prompts = PROMPTS[: len(params)]
    return list(engine.call("tests.e2e.disaggregated:run", name, prompts, params, max_tokens, timeout_s=120))


def handed_over(prefill: Engine, name: str) -> list[dict[str, Any]]:
    """What the prefill engine answers to the router, which sends it to a decode engine."""
    return [each["params"] for each in served(prefill, name, [REMOTE] * len(PROMPTS), 1)]


@pytest.mark.shows("prefill/decode, beside a peer-to-peer connector")
@pytest.mark.parametrize(
    "decoder",
    ["NIXL first", pytest.param("ours first", marks=pytest.mark.stress)],  # the page's order, and the other one
)
def test_a_decode_engine_takes_from_its_peer_and_from_the_store(
    site: Site, start: Callable[..., Engine], prefill: Engine, plain: Engine, decoder: str
) -> None:
    right = plain.run(PROMPTS, max_tokens=16).tokens
    decode = start("Decode", list if decoder == "NIXL first" else lambda both: both[::-1])

    def check(name: str, params: list[Any], computed: list[int]) -> None:
        found = served(decode, name, params)
        assert [each["tokens"] for each in found] == right
        assert [each["computed"] for each in found] == computed
        assert decode.reset_prefix_cache()

    before = len(site.daemon.records("request.done"))
    check("peer", handed_over(prefill, f"p {decoder}"), [1] * len(PROMPTS))
    assert prefill.call("tests.e2e.disaggregated:step_until_idle"), "what was fetched is free"
    site.assert_idle()
    of_decode = [line for line in site.daemon.records("request.done")[before:] if line["request_id"].startswith("peer")]
    assert of_decode == [], "our side asked the daemon for nothing"

    stored = [len(prompt) - whole_blocks(prompt) for prompt in PROMPTS]
    check("store", [None] * len(PROMPTS), stored)

    gone = {"remote_engine_id": str(uuid.uuid4()), "remote_port": free_port()}
    lost = [each | gone for each in handed_over(prefill, f"q {decoder}")]
    check("gone", lost, stored)

    for steps in range(3):
        params = served(prefill, f"a{steps} {decoder}", [REMOTE], 1)[0]["params"]
        decode.call("tests.e2e.disaggregated:abort", f"abort-{steps}", PROMPTS[0], params, steps)
    assert decode.call("tests.e2e.disaggregated:step_until_idle")
    assert decode.reset_prefix_cache(), "no block is held"
    check("again", handed_over(prefill, f"r {decoder}"), [1] * len(PROMPTS))
    site.assert_idle()
    decode.stop()


def test_the_page_s_orders_are_what_was_run() -> None:
    """NIXL, as a producer or a consumer, beside ours."""
    children = {
        name: [(each["kv_connector"], each["kv_role"]) for each in one["kv_connector_extra_config"]["connectors"]]
        for name, one in configurations().items()
    }
    assert children == {
        "Prefill": [("KVPrefetchConnector", "kv_both"), ("NixlConnector", "kv_producer")],
        "Decode": [("NixlConnector", "kv_consumer"), ("KVPrefetchConnector", "kv_both")],
    }
    assert BLOCK == 32
