"""Beside a peer-to-peer connector: requests that a prefill engine computed are its own, until that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from kvprefetch.shmring.wire.records import Outcome
from tests.connector.fakes import BLOCK
from tests.connector.real import PeerConnector, RealEngine

Make = Callable[..., RealEngine]
pytestmark = [
    pytest.mark.shows("prefill/decode, beside a peer-to-peer connector"),
    pytest.mark.parametrize("first", [False, True], ids=["behind it", "before it"]),
]


def beside_peer(make: Make, first: bool, **options: Any) -> RealEngine:
    return make(multi=True, beside="PeerConnector", first=first, **options)


def from_peer(engine: RealEngine, name: str = "r", blocks: int = 4) -> Any:
    params = {"kv_transfer_params": {"do_remote_prefill": True}}
    return engine.add(name, blocks * BLOCK + 5, sampling={"extra_args": params})


@pytest.mark.parametrize("load_mode", ["sync", "async"])
def test_what_a_prefill_engine_brings_is_neither_hinted_nor_waited_for(make: Make, first: bool, load_mode: str) -> None:
    """Also a request for which nobody brings anything is served as ever."""
    engine = beside_peer(make, first, load_mode=load_mode)
    request = from_peer(engine)
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.hinted("ours", 4 * BLOCK)
    engine.finish()
    assert [hint.request_id for hint in engine.daemon.hints] == ["ours"]
    assert [order.request_id for order in engine.orders()] == ["ours"]
    assert len(engine.tokens["r"]) == len(engine.tokens["ours"]) == 3


def test_what_a_prefill_engine_did_not_bring_comes_from_the_store(
    make: Make, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerConnector, "fails", True)
    engine = beside_peer(make, first)
    from_peer(engine)
    for _ in range(3):
        engine.step()
    engine.stage("r")
    engine.finish()
    assert [order.request_id for order in engine.orders()] == ["r"]
    engine.daemon.drain()
    assert [done.outcome for done in engine.daemon.dones] == [Outcome.LOADED]
    assert len(engine.tokens["r"]) == 3


def test_neither_brings_it(make: Make, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's load fails, then ours has nothing: it is recomputed."""
    monkeypatch.setattr(PeerConnector, "fails", True)
    engine = beside_peer(make, first)
    from_peer(engine)
    for _ in range(3):
        engine.step()
    engine.stage("r", 0)
    engine.finish()
    assert engine.orders() == []
    assert len(engine.tokens["r"]) == 3


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_abort_in_between_leaves_nothing(make: Make, first: bool, steps: int) -> None:
    engine = beside_peer(make, first)
    from_peer(engine)
    for _ in range(steps):
        engine.step()
    engine.abort("r")
    engine.finish()
